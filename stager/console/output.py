"""Output of a command: talk on standard error, data on standard output, a bar for long work."""

from __future__ import annotations

import io
import os
import sys
import threading
import time
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

from ..core.errors import (
    UNWRITABLE,
    CommandFailure,
    StagerError,
    escape_invisible,
    escape_line_feeds,
    format_result,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.progress import Progress

T = TypeVar("T")

# --- A sign of life while a phase prints nothing -------------------------------------------------

SILENT_SECONDS = 4.0  # time without a line after which there is one
RANKS_SECONDS = 60.0  # time without output of any rank after which a line says so
_NO_OUTPUT = ", no output yet (does the script set MASTER_ADDR or MASTER_PORT?)"


class Pulse:
    """Shows every few seconds that a phase goes on, until it is stopped or nobody has the talk."""

    def __init__(self, talk: Output, *, of_ranks: bool = False) -> None:
        """Start; ``of_ranks`` is for a phase in which only ranks print, until the first does."""
        self._talk = weakref.ref(talk)
        self._patience = RANKS_SECONDS if of_ranks else SILENT_SECONDS
        self._of_ranks = of_ranks
        self._begun = time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Show no more."""
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(1.0):
            talk = self._talk()
            if talk is None:
                return
            if time.monotonic() - talk.last_line_time >= self._patience:
                done = _NO_OUTPUT if self._of_ranks else talk.progress
                with suppress(OSError, ValueError):  # the reader has gone
                    talk.show_pulse(f"  {time.monotonic() - self._begun:.0f} s{done}")
            del talk


# --- Output of a command: talk on standard error, data on standard output, a bar for long work

PHASES = {
    "lock": "Pinning the requirements",
    "wheels": "Fetching the wheels",
    "layers": "Making the layers",
    "bundle": "Writing the bundle",
    "sign": "Signing the bundle",
    "tool": "Collecting stager's own wheels",
    "export": "Writing the file to carry",
    "squashfs": "Writing the image",
    "import": "Taking the bundle out of the file",
    "mirror": "Adding to the mirror",
    "proof": "Proving that nothing is missing offline",
    "trace": "Running the smoke test, to see which files it reads",
    "preflight": "Examining the nodes",
    "place": "Placing the bundle",
    "unpack": "Unpacking",
    "probe": "Checking the environment",
    "deep": "Reading every file, and testing the network",
    "all_reduce": "Testing communication between all ranks",
    "launch": "Running",
    "collect": "Collecting the results",
    "clean": "Removing environments",
}
_STYLES = {"error": "31;1", "warning": "33", "good": "32", "dim": "2", "bold": "1"}


class Output:
    """The output of one command; ``as_json`` keeps standard output for one JSON object."""

    def __init__(
        self, *, quiet: bool = False, verbose: bool = False, as_json: bool = False
    ) -> None:
        self.quiet, self.verbose, self.as_json = quiet, verbose, as_json
        self._terminal = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self._colour = self._terminal and not os.environ.get("NO_COLOR")
        self._progress: Progress | None = None
        self._pulse: Pulse | None = None
        self._has_pulse = False  # true if the terminal's last line is the pulse's, without an end
        self.last_line_time = 0.0  # of talk, by the monotonic clock
        self.progress = ""  # what is done of the phase, after a comma
        self._has_result = False
        if isinstance(sys.stdout, io.TextIOWrapper):  # whatever a rank prints, or a file is named
            sys.stdout.reconfigure(errors="backslashreplace")

    @property
    def _is_on_terminal(self) -> bool:
        return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"

    # Talk.

    def say(self, line: str, style: str = "") -> None:
        """Print a line for people."""
        if not self.quiet:
            self._write(line, style)

    def error(self, failure: StagerError) -> None:
        """Print an expected failure: its message, the supporting lines, and what to do."""
        self.stop()
        if self.as_json:
            self.emit(CommandFailure.from_error(failure))
        self._write(f"error: {failure.message}", "error")
        for line in failure.context:
            self._write(f"  {line}")
        if failure.hint:
            self._write(f"hint: {failure.hint}", "good")

    def show_interrupt(self) -> None:
        """Say that the command was interrupted; in JSON, too, unless its result is there."""
        self.stop()
        if self.as_json and not self._has_result:
            failure = StagerError("interrupted", hint="run the command again")
            self.emit(CommandFailure.from_error(failure))
        self._write("interrupted")

    def _write(self, line: str, style: str = "") -> None:
        self.last_line_time = time.monotonic()
        line = escape_invisible(line)
        if self._progress is not None:
            self._progress.console.print(line, markup=False, highlight=False, soft_wrap=True)
            return
        if style and self._colour:
            line = f"\x1b[{_STYLES[style]}m{line}\x1b[0m"
        try:
            self._clear_pulse()
            print(line, file=sys.stderr, flush=True)
        except OSError as exc:
            if exc.errno not in UNWRITABLE:
                raise  # talk on a full disk is left out: no job ends for want of it

    # Data.

    def emit(self, result: object) -> None:
        """Print a result, a dataclass, as one JSON object; its escapes keep a terminal safe."""
        self.stop()
        self._has_result = True
        print(format_result(result), end="", flush=True)

    def show(self, result: T, render: Callable[[T], object]) -> None:
        """Print a command's result: as one JSON object with ``--json``, else for a person."""
        self.stop()
        if self.as_json:
            self.emit(result)
        else:
            render(result)

    def data(self, line: str) -> None:
        """Print a line of a command's result; to standard error while JSON owns standard output."""
        self.stop()
        if self.as_json:
            self.say(escape_line_feeds(line))
        else:
            print(escape_line_feeds(line), flush=True)

    def data_lines(self, lines: Sequence[str]) -> None:
        """Print lines of a result at once, each like :meth:`data`: a rank may print a million."""
        if self.as_json or not "".join(lines).isprintable():
            for line in lines:
                self.data(line)
        elif lines:
            self.stop()
            print("\n".join(lines), flush=True)

    def text(self, text: str) -> None:
        """Print a command's result that is a file, to the byte."""
        self.stop()
        stream = sys.stdout
        stream.flush()
        left = memoryview(text.encode(stream.encoding, stream.errors or "strict"))
        # Under PYTHONUNBUFFERED a write may take a part only, which the text layer would not say.
        while left:
            left = left[stream.buffer.write(left) :]
        stream.buffer.flush()

    # Progress.

    def begin(self, phase: str) -> None:
        """Print the beginning of a phase."""
        self.stop()
        self.say(PHASES.get(phase, phase), "bold")
        self.progress = ""
        if not self.quiet and phase != "trace":  # in which a program of the user's runs
            self._pulse = Pulse(self, of_ranks=phase == "launch")

    def show_pulse(self, line: str) -> None:
        """Show that a phase goes on: on a terminal in one line, which the next one replaces."""
        if self._progress is not None:  # which moves by itself
            return
        if self._terminal:
            print(f"\r\x1b[2K{line}", end="", file=sys.stderr, flush=True)
            self._has_pulse = True
        else:
            self._write(line)

    def _clear_pulse(self) -> None:
        if self._has_pulse:
            print("\r\x1b[2K", end="", file=sys.stderr, flush=True)
            self._has_pulse = False

    def step(self, what: str, done: int, total: int) -> None:
        """Print that a piece of the phase is done; on a terminal, move the progress bar."""
        if self.quiet:
            return
        what = escape_invisible(what)
        if self._terminal and total:
            if self._progress is None:
                self._clear_pulse()  # before rich stands in for the stream
                self._progress = self._start_progress(total)
            (task,) = self._progress.task_ids
            self._progress.update(task, completed=done, description=what)
        elif self._terminal:
            self._write(f"  {what}", "dim")
        else:
            self._write(f"  {what} ({done}/{total})" if total else f"  {what}")

    def note(self, line: str) -> None:
        """Print something the user should know."""
        self.say(f"  {line}")

    def warn(self, line: str) -> None:
        """Print something the user must know, also from a quiet command."""
        self.stop()
        self._write(f"warning: {line}", "warning")

    def stop(self) -> None:
        """Remove the progress bar, and the sign of life."""
        if self._pulse is not None:
            self._pulse.stop()
            self._clear_pulse()
            self._pulse = None
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _start_progress(self, total: int) -> Progress:
        from rich.console import Console as RichConsole
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
        from rich.progress import TimeElapsedColumn as Elapsed

        progress = Progress(
            TextColumn("  "),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            Elapsed(),
            TextColumn("{task.description}", markup=False),
            console=RichConsole(file=sys.stderr, no_color=not self._colour),
            transient=True,
        )
        progress.start()
        progress.add_task("", total=total)
        return progress
