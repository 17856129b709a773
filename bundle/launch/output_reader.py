"""What a launcher and its ranks write, byte by byte, until they end.

What the ranks write comes through one named pipe each (the wrapper turns its output there), so that
every byte is known to be a certain rank's; the launcher's comes through its standard output. It is
passed on in whole lines, as other things are written into the same log.

A pipe is a local rank's. Which rank that is now, after a restart perhaps another one, the wrapper
says in a line of its own, which counts only with a nonce that is made for each launch: whatever a
program writes that looks like such a line is output.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import os
import re
import selectors
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ..protocol.problem import NodeError, Problem
from ..system import open_files, processes, signals
from .rank_monitor import RankMonitor

OnOutput = Callable[["int | None", bytes], None]
"""Called with the rank, None for the launcher itself, and what it wrote next: whole lines, but for
one that is very long, and the last."""

RANKS_ENDED = "ranks-ended"
"""An agent's event: its ranks have ended well, and their launcher still waits for other nodes."""
AGENT_SECONDS = 5.0
"""How much longer than its ranks an agent may take to end: it waits for them, and tidies up."""
KEPT = 200
"""Last lines that are remembered, of all and of each rank."""
LONGEST_LINE = 1 << 20
"""Bytes after which a line is passed on in pieces: a progress bar may never end its line."""
_KEPT_BYTES = 1 << 12
"""Of each line that is remembered; what is wrong shows in its beginning."""
_CHUNK = 1 << 16
_KILLING_SECONDS = 12.0
"""How long killing may take, see :mod:`bundle.system.processes`."""
_PAUSE_SECONDS = 0.02
"""Between two reads of little: a rank that writes line by line makes few events, not thousands."""
_POLL_SECONDS = 0.2
_DRAIN_SECONDS = 2.0
"""How long, after the launcher's end, what it had written is still read."""
_LEFT_SECONDS = 1.0
"""How long what ranks have left behind may take to end, after SIGTERM, once all has gone well."""
_RESERVE = 32
"""Files that an agent opens besides the pipes, and its launcher as it starts."""
_FINISHED_SECONDS = 3.0
"""How long all programs have finished when that is told: as a rule their launcher ends by then."""


@dataclass
class Heard:
    """The last that was written."""

    tail: collections.deque[str] = field(default_factory=lambda: collections.deque(maxlen=KEPT))
    """Of all together, in the order in which it was read."""
    own: dict[int, collections.deque[str]] = field(default_factory=dict)
    """Of each rank."""
    launcher: collections.deque[str] = field(default_factory=lambda: collections.deque(maxlen=KEPT))
    """Of the launcher, and of ranks that write where it does."""


@dataclass(eq=False)
class _Stream:
    """One descriptor that is read."""

    handle: int
    possible: range = range(0)
    """The ranks that may write here; none for the launcher."""
    rank: int | None = None
    """None for the launcher, and until a rank has said its name."""
    rest: list[bytes] = field(default_factory=list)
    """A line that has no end yet, in pieces: joined again and again, a long one would take for
    ever."""
    held: int = 0
    """Its bytes."""

    def take(self, chunk: bytes) -> bytes:
        """Add what was read; return what can be passed on."""
        end = chunk.rfind(b"\n") + 1
        if not end and self.held + len(chunk) <= LONGEST_LINE:
            self.rest.append(chunk)
            self.held += len(chunk)
            return b""
        whole = b"".join([*self.rest, chunk[:end] if end else chunk])
        self.rest = [chunk[end:]] if end and end < len(chunk) else []
        self.held = sum(map(len, self.rest))
        return whole

    def last(self) -> bytes:
        """Return the line that has no end."""
        whole, self.rest, self.held = b"".join(self.rest), [], 0
        return whole


class Outputs:
    """The named pipes of a node's ranks; they go when the block ends.

    Attributes:
        folder: where they are.
        monitor: watches the ranks' processes.
        variables: what the launcher needs besides, so that ranks find their pipes.
    """

    def __init__(self, folder: str, ranks: Sequence[range], grace: float) -> None:
        """Make one pipe for each local rank in a new directory.

        Args:
            folder: the directory.
            ranks: for each local rank the ranks that it may be.
            grace: seconds between SIGTERM and SIGKILL for the ranks, if they are to end.

        Raises:
            OSError: they cannot be made; with EMFILE where so many files may not be open.
        """
        if ranks and len(ranks) + _RESERVE > open_files.open_files():
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        self.folder = folder
        nonce = os.urandom(16).hex()
        self.variables = {"STAGER_OUTPUT": folder, "STAGER_OUTPUT_NONCE": nonce} if ranks else {}
        self._name = re.compile(rb"\x1erank (\d{1,9}) %s\n" % nonce.encode())
        self._grace = grace
        self.on_finished: Callable[[], None] | None = None
        self._ranks = ranks
        self._streams: list[_Stream] = []
        os.mkdir(folder, 0o700)
        self.monitor = RankMonitor(folder)
        self._pipes: list[int] = []
        try:
            self._make_pipes()
        except BaseException:
            self.close()
            raise

    def _make_pipes(self) -> None:
        for local in range(len(self._ranks)):
            path = os.path.join(self.folder, str(local))
            os.mkfifo(path, 0o600)
            # Open both ways: it then has no end, however many ranks come and go.
            pipe = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            self._pipes.append(pipe)

    def close(self) -> None:
        """Close the pipes."""
        for pipe in self._pipes:
            os.close(pipe)
        self._pipes.clear()
        self.monitor.close()

    @property
    def all_finished(self) -> bool:
        """Whether the programs of all ranks have ended well; a launcher may still wait."""
        return bool(self._ranks) and self.monitor.finished_well() >= len(self._ranks)

    def follow(self, running: processes.Process, heard: Heard, on_output: OnOutput) -> None:
        """Pass on output until the launcher has ended and what was written is read.

        Its end counts, not the pipe's: a child that it left behind may keep that open for ever,
        and so would the ranks of a launcher that was killed. They are ended, then the rest is read.
        """
        main = running.stdout.fileno() if running.stdout is not None else -1
        os.set_blocking(main, False)
        with selectors.DefaultSelector() as waiting:
            self._streams = [_Stream(main), *map(_Stream, self._pipes, self._ranks)]
            for stream in self._streams:
                waiting.register(stream.handle, selectors.EVENT_READ, stream)
            waiting.register(self.monitor, selectors.EVENT_READ)
            until: float | None = None
            told = 0.0
            while until is None or time.monotonic() < until:
                self.monitor.take()
                processes.reap_orphans()
                if until is None and running.poll() is not None:
                    self.monitor.over(stopped=False)
                    processes.stop(running, 0 if running.returncode else _LEFT_SECONDS)
                    until = time.monotonic() + _DRAIN_SECONDS
                told = self._tell_finished(told)
                ready = waiting.select(_POLL_SECONDS if until is None else 0)
                streams = [key.data for key, _ in ready if key.data is not None]
                sizes = [self._read(stream, waiting, heard, on_output) for stream in streams]
                if until is not None and not any(sizes):
                    break
                if sizes and max(sizes) < _CHUNK // 4:
                    time.sleep(_PAUSE_SECONDS)
        for stream in self._streams:
            _tell(stream, stream.last(), heard, on_output)

    def _tell_finished(self, since: float) -> float:
        """Say once that all ranks have finished, a while after they have; return since when."""
        if not self.all_finished:
            return 0.0
        since = since or time.monotonic()
        if self.on_finished is not None and time.monotonic() > since + _FINISHED_SECONDS:
            self.on_finished()
            self.on_finished = None
        return since

    def stop(self, running: processes.Process, on_output: OnOutput) -> None:
        """End the launcher with its ranks, reading on; pass on what the ranks still write.

        Not what the launcher writes, which only complains that it was told to end. Should nobody be
        there any more to read it, the rest goes nowhere.
        """
        ending = threading.Thread(target=processes.stop, args=(running, self._grace))
        heard, listened = Heard(), True
        own = self._streams[1:] or self._streams  # a rank that Slurm started writes by itself

        def pass_on(rank: int | None, data: bytes) -> None:
            nonlocal listened
            try:
                if listened:
                    on_output(rank, data)
            except OSError:  # the driver has gone, too
                listened = False

        ending.start()
        until = time.monotonic() + self._grace + _KILLING_SECONDS
        with selectors.DefaultSelector() as waiting:
            for stream in self._streams:
                waiting.register(stream.handle, selectors.EVENT_READ, stream)
            while time.monotonic() < until:
                over = not ending.is_alive()
                ready = [key.data for key, _ in waiting.select(0 if over else _PAUSE_SECONDS)]
                sizes = [
                    self._read(stream, waiting, heard, pass_on if stream in own else _drop)
                    for stream in ready
                ]
                if over and not any(sizes):
                    break
                if not ready:  # all streams may have ended, and the selector waits for none
                    time.sleep(_PAUSE_SECONDS)
        ending.join()
        for stream in own:
            _tell(stream, stream.last(), heard, pass_on)

    def _read(
        self, stream: _Stream, waiting: selectors.BaseSelector, heard: Heard, on_output: OnOutput
    ) -> int:
        try:
            chunk = os.read(stream.handle, _CHUNK)
        except BlockingIOError:
            return 0
        if not chunk:
            waiting.unregister(stream.handle)
            return 0
        self._pass_on(stream, stream.take(chunk), heard, on_output)
        return len(chunk)

    def _pass_on(self, stream: _Stream, data: bytes, heard: Heard, on_output: OnOutput) -> None:
        """Pass on what was written, up to each name of a rank as that rank's before."""
        at = 0
        for name in self._name.finditer(data):
            if int(name[1]) not in stream.possible:
                continue
            before = data[at : name.start()]
            if before and not before.endswith(b"\n"):
                before += b"\n"  # the last line of the one before had no end
            _tell(stream, before, heard, on_output)
            stream.rank, at = int(name[1]), name.end()
        _tell(stream, data[at:] if at else data, heard, on_output)


def _tell(stream: _Stream, data: bytes, heard: Heard, on_output: OnOutput) -> None:
    if not data:
        return
    lines = _last_lines(data)
    heard.tail.extend(lines)
    if stream.rank is not None:
        own = heard.own.setdefault(stream.rank, collections.deque(maxlen=KEPT))
        own.extend(lines)
    else:
        heard.launcher.extend(lines)
    on_output(stream.rank, data)


def _last_lines(data: bytes) -> list[str]:
    """Return the last lines, as far as they are remembered."""
    raws = data.rsplit(b"\n", KEPT + 1)[-KEPT - 1 :]
    if not raws[-1]:
        raws.pop()
    return [raw[:_KEPT_BYTES].decode(errors="replace") for raw in raws[-KEPT:]]


def _drop(rank: int | None, data: bytes) -> None:
    """Nobody is interested any more."""


def attend(
    argv: list[str],
    variables: Mapping[str, str],
    cwd: str,
    outputs: Outputs,
    on_output: OnOutput,
    running: processes.Process | None = None,
) -> tuple[int, Heard]:
    """Run a launcher to its end, passing on what it and its ranks write.

    With ``running`` it has been started before, and only its end is waited for.

    A signal to us ends it first. Whatever a rank left behind (data loaders, daemons of its own)
    ends with it.

    Returns:
        Its exit status, 128 and more for a signal; and the last that was written.

    Raises:
        NodeError: it cannot be started.
    """
    heard = Heard()
    try:
        running = running or processes.start(
            argv, env=variables, cwd=cwd, stdout=processes.PIPE, stderr=processes.STDOUT
        )
    except processes.ProcessError as exc:
        fix = "stage the environment again"
        raise NodeError(Problem("the launcher cannot start", argv[0], exc.reason, fix)) from exc
    try:
        outputs.follow(running, heard, on_output)
        code = running.wait()
    except signals.Stopped:
        outputs.monitor.over(stopped=True)
        with contextlib.suppress(OSError):  # the driver has gone, too
            outputs.stop(running, on_output)
        return 0 if outputs.all_finished else signals.TERMINATED, heard
    finally:
        processes.stop(running, 0)
    return code if code >= 0 else 128 - code, heard
