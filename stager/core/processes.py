"""Commands that the login side runs, feeds and follows; bundle.system.processes starts them."""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import IO, NamedTuple

from bundle.channel.frames import Lines
from bundle.redaction.secrets import mask_arguments
from bundle.system import processes
from bundle.system.processes import TAIL_LINES, CompletedCommand, ProcessError
from bundle.system.signals import USER_SIGNALS, replace_handlers

from .errors import StagerError

log = logging.getLogger(__name__)

_CHUNK = 1 << 16


class CommandError(StagerError):
    """A command ended with an exit status other than 0, or ran out of time."""

    def __init__(
        self, completed: CompletedCommand, *, reason: str, timed_out: bool = False
    ) -> None:
        tail = (completed.stderr.strip() or completed.stdout.strip()).splitlines()[-TAIL_LINES:]
        super().__init__(f"{reason}: {shlex.join(mask_arguments(completed.argv))}", context=tail)
        self.completed = completed
        self.timed_out = timed_out


Runner = Callable[..., CompletedCommand]  # of :func:`run`, the default of functions that take one


def run(
    argv: Sequence[str],
    *,
    timeout: float,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    check: bool = True,
) -> CompletedCommand:
    """Run one command to its end, with ``env`` added to the environment; return its output."""
    full = {**os.environ, **env} if env is not None else None
    return run_with_input(argv, None, environment=full, timeout=timeout, cwd=cwd, check=check)


def run_with_input(
    argv: Sequence[str],
    text: str | None,
    *,
    environment: Mapping[str, str] | None,
    timeout: float,
    cwd: Path | None = None,
    check: bool = True,
) -> CompletedCommand:
    """Run one command that reads a text from its standard input, in exactly this environment."""
    folder = None if cwd is None else str(cwd)
    try:
        completed = processes.run(
            argv, timeout=timeout, env=environment, cwd=folder, input=text, check=False
        )
    except ProcessError as exc:
        if not exc.timed_out:
            raise _cannot_start(argv, exc.__cause__) from exc
        completed = CompletedCommand(tuple(argv), exc.code or 0, "", "\n".join(exc.lines))
        reason = f"the command {exc.reason}"
        raise CommandError(completed, reason=reason, timed_out=True) from exc
    if check and completed.returncode != 0:
        raise CommandError(completed, reason=f"exit status {completed.returncode}")
    return completed


def feed_command(argv: Sequence[str], text: str, *, timeout: float) -> None:
    """Run one command that reads a text from its standard input, and writes to standard error.

    What it starts in the background does not keep this process waiting.
    """
    process = _start(
        argv, stdin=processes.PIPE, stdout=sys.stderr.fileno(), env=None, new_session=False
    )
    timed_out = False
    try:
        process.communicate(text.encode(), timeout=timeout)
    except processes.TimeoutExpired:
        timed_out = True
    finally:
        if process.returncode is None:
            processes.stop(process, 0)
    if process.returncode or timed_out:
        completed = CompletedCommand(tuple(argv), process.returncode, "", "")
        reason = f"exit status {process.returncode}"
        if timed_out:
            reason = f"the command took more than {timeout:g} s"
        raise CommandError(completed, reason=reason, timed_out=timed_out)


class Streamed(NamedTuple):
    """Outcome of a command: ``interrupted`` by Ctrl-C or a signal to this process, or not."""

    returncode: int
    interrupted: bool


def follow_command(
    argv: Sequence[str],
    on_line: Callable[[str], None],
    *,
    on_talk: Callable[[str], None] | None = None,
    environment: Mapping[str, str] | None = None,
    end_it: Callable[[int], None] | None = None,
    pass_on: Callable[[int, int], None] | None = None,
) -> Streamed:
    """Run a command that reports line by line, and return its outcome.

    Ctrl-C reaches it directly, unless ``end_it`` is given: that is called with its process id at
    each interrupt, and it has a session of its own. Its last lines are still passed on. ``pass_on``
    is called with its process id and a SIGUSR1 or SIGUSR2 of this process.
    """
    process = _start(
        argv,
        env=environment,
        stdout=processes.PIPE,
        stderr=None if on_talk is None else processes.PIPE,
        new_session=end_it is not None,
    )
    interrupted = False

    def interrupt() -> None:
        nonlocal interrupted
        first, interrupted = not interrupted, True
        with contextlib.suppress(ProcessLookupError):
            if end_it is None and first:
                process.send_signal(signal.SIGINT)
            elif end_it is not None and process.returncode is None:  # else its id may be another's
                end_it(process.pid)

    def signal_it(number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            if pass_on is not None and process.returncode is None:
                pass_on(process.pid, number)

    readers = {process.stdout: on_line, process.stderr: on_talk}
    user_signals = USER_SIGNALS if _is_main_thread() else ()
    with _handle_interrupts(interrupt), replace_handlers(user_signals, signal_it):
        try:
            _deliver_lines(readers)
        finally:  # closed pipes end it
            code = process.wait()
        return Streamed(returncode=code, interrupted=interrupted)


def _start(
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None,
    stdin: int = processes.DEVNULL,
    stdout: int | None,
    stderr: int | None = None,
    new_session: bool,
) -> processes.Process:
    try:
        return processes.start(
            argv, env=env, stdin=stdin, stdout=stdout, stderr=stderr, new_session=new_session
        )
    except ProcessError as exc:
        raise _cannot_start(argv, exc.__cause__) from exc


@contextlib.contextmanager
def _handle_interrupts(act: Callable[[], None]) -> Iterator[None]:
    """Call a function at each interrupt: an exception could lose the line being handled."""
    numbers = [
        number
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if _is_main_thread() and signal.getsignal(number) is signal.default_int_handler
    ]
    called = False

    def call(number: int, frame: FrameType | None) -> None:
        nonlocal called
        called = True
        act()

    for number in numbers:
        signal.signal(number, call)
    try:
        yield
    finally:
        if not called:
            for number in numbers:
                signal.signal(number, signal.default_int_handler)


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _deliver_lines(readers: Mapping[IO[bytes] | None, Callable[[str], None] | None]) -> None:
    with contextlib.ExitStack() as pipes, selectors.DefaultSelector() as selector:
        for pipe, on_line in readers.items():
            if pipe is not None and on_line is not None:
                pipes.enter_context(pipe)
                selector.register(pipe, selectors.EVENT_READ, (on_line, Lines()))
        while selector.get_map():
            for key, _ in selector.select():
                take, lines = key.data
                chunk = os.read(key.fd, _CHUNK)
                if not chunk:
                    selector.unregister(key.fileobj)
                for line in lines.feed(chunk) if chunk else filter(None, [lines.last()]):
                    take(line.decode(errors="replace"))


def run_attached(
    argv: Sequence[str], *, environment: Mapping[str, str], has_input: bool, is_quiet: bool
) -> int:
    """Run a command that prints where this process does, to its end; return its status."""
    process = _start(
        argv,
        env=environment,
        stdin=sys.stdin.fileno() if has_input else processes.DEVNULL,
        stdout=sys.stderr.fileno() if is_quiet else None,
        new_session=False,
    )
    with _handle_interrupts(lambda: None):
        return process.wait()


def replace_process(argv: Sequence[str]) -> None:
    """Replace this process by a command; returns only by raising."""
    log.debug("become: %s", shlex.join(mask_arguments(argv)))
    try:
        os.execv(argv[0], list(argv))  # noqa: S606 - no shell is wanted
    except OSError as exc:
        raise _cannot_start(argv, exc) from exc


def _cannot_start(argv: Sequence[str], cause: BaseException | None) -> StagerError:
    return StagerError(
        f"cannot start {argv[0]}: {getattr(cause, 'strerror', None) or cause}",
        hint="check that the program is installed and on PATH",
    )
