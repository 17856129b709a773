"""What a launcher and its ranks write, line by line, until they end.

The ranks' own lines come through one named pipe each (the wrapper turns its output there), so that
every line is known to be a certain rank's; the launcher's come through its standard output.
"""

from __future__ import annotations

import collections
import contextlib
import os
import re
import selectors
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from .. import process, signals
from ..problem import NodeError, Problem

OnLines = Callable[["int | None", "list[str]"], None]
"""Called with the rank, None for the launcher itself, and some of its lines."""

RANKS_ENDED = "ranks-ended"
"""An agent's event: its ranks have ended well, and their launcher still waits for other nodes."""
AGENT_SECONDS = 5.0
"""How much longer than its ranks an agent may take to end: it waits for them, and tidies up."""
KEPT = 200
"""Last lines that are remembered, of all and of each rank."""
LONGEST_LINE = 1 << 20
"""Bytes after which a line is passed on in pieces: a progress bar may never end its line."""
_CHUNK = 1 << 16
_LEAVE = 1 << 14
"""Bytes that all ranks together still say when they were told to end: a pipe holds more."""
_KILLING_SECONDS = 12.0
"""How long killing may take, see :mod:`bundle.process`."""
_PAUSE_SECONDS = 0.02
"""Between two reads of little: a rank that writes line by line makes few events, not thousands."""
_POLL_SECONDS = 0.2
_DRAIN_SECONDS = 2.0
"""How long, after the launcher's end, what it had written is still read."""
_NAME = re.compile(r"\x1e(rank|end) (\d+)$")
"""How a rank says who it is, and that its program has ended well."""
_OVER_SECONDS = 3.0
"""How long all ranks have ended well when that is told: as a rule their launcher ends by then."""


@dataclass
class Heard:
    """The last that was written."""

    tail: collections.deque[str] = field(default_factory=lambda: collections.deque(maxlen=KEPT))
    """Of all together, in the order in which it was read."""
    own: dict[int, collections.deque[str]] = field(default_factory=dict)
    """Of each rank."""


@dataclass
class _Stream:
    """One descriptor that is read."""

    handle: int
    rank: int | None
    """None for the launcher, and until a rank has said its name."""
    rest: bytes = b""
    over: bool = False
    """Whether its rank's program has ended well."""


class Outputs:
    """The named pipes of a node's ranks; they go when the block ends."""

    def __init__(self, folder: str, ranks: int, grace: float) -> None:
        """Make one pipe for each local rank in a new directory.

        Args:
            folder: the directory.
            ranks: how many there are.
            grace: seconds between SIGTERM and SIGKILL for the ranks, if they are to end.

        Raises:
            OSError: they cannot be made.
        """
        self.folder = folder
        self._grace = grace
        self.on_over: Callable[[], None] | None = None
        self._streams: list[_Stream] = []
        os.mkdir(folder, 0o700)
        self._pipes = []
        for local in range(ranks):
            path = os.path.join(folder, str(local))
            os.mkfifo(path, 0o600)
            # Open both ways: it then has no end, however many ranks come and go.
            self._pipes.append(os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC))

    def close(self) -> None:
        """Close the pipes."""
        for pipe in self._pipes:
            os.close(pipe)
        self._pipes.clear()

    @property
    def over(self) -> bool:
        """Whether the programs of all ranks have ended well; a launcher may still wait."""
        own = self._streams[1:]
        return bool(own) and all(stream.over for stream in own)

    def follow(self, running: process.Process, heard: Heard, on_lines: OnLines) -> None:
        """Pass on lines until the launcher has ended and what was written is read.

        Its end counts, not the pipe's: a child that it left behind may keep that open for ever,
        and so would the ranks of a launcher that was killed. They are ended, then the rest is read.
        """
        main = running.stdout.fileno() if running.stdout is not None else -1
        os.set_blocking(main, False)
        with selectors.DefaultSelector() as waiting:
            self._streams = [_Stream(main, None), *(_Stream(pipe, None) for pipe in self._pipes)]
            for stream in self._streams:
                waiting.register(stream.handle, selectors.EVENT_READ, stream)
            until: float | None = None
            told = 0.0
            while until is None or time.monotonic() < until:
                if until is None and running.poll() is not None:
                    process.stop(running, 0)
                    until = time.monotonic() + _DRAIN_SECONDS
                told = self._tell_over(told)
                ready = waiting.select(_POLL_SECONDS if until is None else 0)
                sizes = [self._read(key.data, waiting, heard, on_lines) for key, _ in ready]
                if until is not None and not any(sizes):
                    break
                if sizes and max(sizes) < _CHUNK // 4:
                    time.sleep(_PAUSE_SECONDS)
        self._end_lines(heard, on_lines)

    def _tell_over(self, since: float) -> float:
        """Say once that all ranks have ended well, a while after they have; returns since when."""
        if not self.over:
            return 0.0
        since = since or time.monotonic()
        if self.on_over is not None and time.monotonic() > since + _OVER_SECONDS:
            self.on_over()
            self.on_over = None
        return since

    def stop(self, running: process.Process, on_lines: OnLines) -> None:
        """End the launcher with its ranks, reading on; pass on the last that the ranks write.

        Not what the launcher writes, which only complains that it was told to end; and not much, as
        nobody may be there any more to read it.
        """
        ending = threading.Thread(target=process.stop, args=(running, self._grace))
        heard = Heard()
        own = self._streams[1:] or self._streams  # a rank that Slurm started writes by itself

        def keep(rank: int | None, lines: list[str]) -> None:
            """Nothing yet: what counts is what comes last."""

        ending.start()
        until = time.monotonic() + self._grace + _KILLING_SECONDS
        with selectors.DefaultSelector() as waiting:
            for stream in self._streams:
                waiting.register(stream.handle, selectors.EVENT_READ, stream)
            while time.monotonic() < until:
                over = not ending.is_alive()
                ready = waiting.select(0 if over else _PAUSE_SECONDS)
                sizes = [self._read(key.data, waiting, heard, keep) for key, _ in ready]
                if over and not any(sizes):
                    break
                if not ready:  # all streams may have ended, and the selector waits for none
                    time.sleep(_PAUSE_SECONDS)
        ending.join()
        self._end_lines(heard, keep)
        room = _LEAVE // len(own)
        for rank in sorted({stream.rank for stream in own}, key=lambda rank: rank or 0):
            said = _last(list(heard.own.get(rank, ()) if rank is not None else heard.tail), room)
            if said:
                on_lines(rank, said)

    def _end_lines(self, heard: Heard, on_lines: OnLines) -> None:
        """Pass on last lines that have no end."""
        for stream in self._streams:
            if stream.rest:
                _pass_on(stream, [stream.rest], heard, on_lines)
                stream.rest = b""

    @staticmethod
    def _read(
        stream: _Stream, waiting: selectors.BaseSelector, heard: Heard, on_lines: OnLines
    ) -> int:
        try:
            chunk = os.read(stream.handle, _CHUNK)
        except BlockingIOError:
            return 0
        if not chunk:
            waiting.unregister(stream.handle)
            return 0
        *whole, stream.rest = (stream.rest + chunk).split(b"\n")
        if len(stream.rest) > LONGEST_LINE:
            whole, stream.rest = [*whole, stream.rest], b""
        _pass_on(stream, whole, heard, on_lines)
        return len(chunk)


def _pass_on(stream: _Stream, found: Sequence[bytes], heard: Heard, on_lines: OnLines) -> None:
    lines: list[str] = []
    for raw in found:
        line = raw.decode(errors="replace")
        name = _NAME.search(line)
        if name is None:
            lines.append(line)
            continue
        if line[: name.start()]:  # the last line of the one before had no end
            lines.append(line[: name.start()])
        _tell(stream, lines, heard, on_lines)
        lines, stream.rank, stream.over = [], int(name[2]), name[1] == "end"
    _tell(stream, lines, heard, on_lines)


def _tell(stream: _Stream, lines: list[str], heard: Heard, on_lines: OnLines) -> None:
    if not lines:
        return
    heard.tail.extend(lines)
    if stream.rank is not None:
        own = heard.own.setdefault(stream.rank, collections.deque(maxlen=KEPT))
        own.extend(lines)
    on_lines(stream.rank, lines)


def _last(lines: Sequence[str], room: int) -> list[str]:
    """The last lines that fit into so many bytes."""
    kept: list[str] = []
    for line in reversed(lines):
        room -= len(line.encode(errors="replace")) + 1
        if room < 0:
            break
        kept.insert(0, line)
    return kept


def attend(
    argv: list[str],
    variables: Mapping[str, str],
    cwd: str,
    outputs: Outputs,
    on_lines: OnLines,
    running: process.Process | None = None,
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
        running = running or process.start(
            argv, env=variables, cwd=cwd, stdout=process.PIPE, stderr=process.STDOUT
        )
    except process.ProcessError as exc:
        fix = "stage the environment again"
        raise NodeError(Problem("the launcher cannot start", argv[0], exc.reason, fix)) from exc
    try:
        outputs.follow(running, heard, on_lines)
        code = running.wait()
    except signals.Stopped:
        with contextlib.suppress(OSError):  # the driver has gone, too
            outputs.stop(running, on_lines)
        return 0 if outputs.over else signals.TOLD_TO_END, heard
    finally:
        process.stop(running, 0)
    return code if code >= 0 else 128 - code, heard
