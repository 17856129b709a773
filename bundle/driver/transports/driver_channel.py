"""The driver's channel to the agents of one step; it never waits for an agent to read."""

from __future__ import annotations

import collections
import contextlib
import fcntl
import json
import os
import selectors
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import IO, cast

from ...channel.agent_channel import AGAIN, END
from ...channel.frames import FrameReader, Gap
from ...system import processes
from ...transfer.relay_process import RelayProcess
from .liveness import Heartbeats
from .transport import Ended, StepErrors

OnLine = Callable[[str, str], None]  # source (``node:task``) and message

_WAIT_SECONDS = 1.0  # for messages; all else may be late by as much
_TICK_SECONDS = 0.02
_CHUNK = 1 << 18
_KEPT_ERRORS = 1 << 18  # bytes of standard error that are kept; a failure shows at its end
_AFTER_SECONDS = 5.0
_KILL_SECONDS = 15.0
_ASK_SECONDS = 2.0
"""Time to send missing frames again; it doubles, as they come behind all that is under way."""
_MOST_ASKED = 3  # the number of times that an agent is asked for them
_MOST_GAPS = 20  # gaps of one source that are asked for at once: each task reads the request
_MOST_STRAY_LINES = 100
_PIPE = 1 << 20
_F_SETPIPE_SZ = 1031  # linux/fcntl.h; in Python's fcntl from 3.10 on


class DriverChannel:
    """A running ``srun`` or similar command: lines to all of its tasks, and their messages."""

    def __init__(
        self, argv: Sequence[str], env: Mapping[str, str], first: bytes, reader: StepErrors
    ) -> None:
        self.heartbeats = Heartbeats()
        self.stopped = False  # true once it was killed: the last messages may be missing
        pipe = processes.PIPE
        self._process = processes.start(argv, env=env, stdin=pipe, stdout=pipe, stderr=pipe)
        self._fault_reader = reader
        self._reader = FrameReader()
        self._asked: dict[str, tuple[int, float]] = {}  # how often, and when last
        self._stray: list[str] = []
        self._unsent = bytearray(first)
        self._errors = b""
        self.faults: dict[str, Ended] = {}  # as it reported; another object for each news
        self.gone: dict[str, set[int]] = {}  # the tasks of each node that have failed
        self._closing = False  # true once standard input is to end when all is sent
        self._selector = selectors.DefaultSelector()
        self._stdin, self._stdout, self._stderr = (
            cast("IO[bytes]", stream)
            for stream in (self._process.stdin, self._process.stdout, self._process.stderr)
        )
        for stream in (self._stdin, self._stdout, self._stderr):
            os.set_blocking(stream.fileno(), False)
            events = selectors.EVENT_WRITE if stream is self._stdin else selectors.EVENT_READ
            self._selector.register(stream, events)
        with contextlib.suppress(OSError):  # fewer, larger reads; the limit for users may be lower
            fcntl.fcntl(self._stdout, _F_SETPIPE_SZ, _PIPE)

    def __enter__(self) -> DriverChannel:
        return self

    def __exit__(self, *exc: object) -> None:
        if not self.has_ended:
            self.finish(lambda source, line: None, _KILL_SECONDS)
        self._selector.close()
        for stream in (self._stdin, self._stdout, self._stderr):
            with contextlib.suppress(OSError):
                stream.close()

    @property
    def has_ended(self) -> bool:
        """True once it has ended, and all that it wrote has been read."""
        reading = {self._stdout, self._stderr}.intersection(self._open_streams())
        return not reading and self._process.poll() is not None

    @property
    def code(self) -> int:
        """Its exit status; negative for a signal, 0 while it runs."""
        return self._process.returncode or 0

    @property
    def errors(self) -> str:
        """The end of what it wrote to standard error."""
        return self._errors.decode(errors="replace")

    def pop_losses(self) -> tuple[dict[str, int], list[str]]:
        """Return each source's lost frames since the last call, and the lines of no source."""
        lost, stray = dict(self._reader.lost), self._stray
        self._reader.lost, self._stray = collections.Counter(), []
        return lost, stray

    def send_line(self, line: str) -> None:
        """Send one line to every task; nothing once their standard input is closed."""
        if self._closing:
            return
        self._unsent += line.encode() + b"\n"
        if self._stdin not in self._open_streams():
            self._selector.register(self._stdin, selectors.EVENT_WRITE)

    @contextlib.contextmanager
    def watch_process(self, other: RelayProcess) -> Iterator[None]:
        """Let :meth:`pump` return while the block runs when ``other`` can be read from, too."""
        self._selector.register(other, selectors.EVENT_READ, other)
        try:
            yield
        finally:
            self._selector.unregister(other)

    def pump(self, on_line: OnLine, seconds: float = _WAIT_SECONDS) -> None:
        """Pass on what has come, or wait a moment for it."""
        if not self._open_streams():
            time.sleep(_TICK_SECONDS)  # all is read; only its end is still to come
            return
        for key, _ in self._selector.select(seconds):
            if key.fileobj is self._stdin:
                self._send()
            elif key.data is None:
                self._receive(key, on_line)
        self._repair(on_line)
        if self._process.poll() is not None and self._stdin in self._open_streams():
            self._selector.unregister(self._stdin)

    def finish(
        self, on_line: OnLine, grace: float, complete: Callable[[], bool] | None = None
    ) -> None:
        """End it, once ``complete`` so that agents can send again what is missing, or killed."""
        until = time.monotonic() + grace
        if complete is not None and not complete():
            self.send_line(END)
            self._pump_until(until, on_line, lambda: self.has_ended or complete())
            until = max(until, time.monotonic() + _AFTER_SECONDS)
        self._closing = True
        self._send()
        self._pump_until(until, on_line, lambda: self.has_ended)
        if self._process.poll() is None:
            self.stopped = True
            processes.stop(self._process, _AFTER_SECONDS)
        self._pump_until(time.monotonic() + _AFTER_SECONDS, on_line, lambda: self.has_ended)
        for stream in self._open_streams():  # somebody else holds it open: there is no more to come
            self._selector.unregister(stream)
        self._dispatch(self._reader.end(), on_line)

    def _pump_until(self, until: float, on_line: OnLine, done: Callable[[], bool]) -> None:
        while not done() and time.monotonic() < until:
            self.pump(on_line, max(0.0, min(_WAIT_SECONDS, until - time.monotonic())))

    def _receive(self, key: selectors.SelectorKey, on_line: OnLine) -> None:
        chunk = os.read(key.fd, _CHUNK)
        if not chunk:
            self._selector.unregister(key.fileobj)
        elif key.fileobj is self._stderr:
            self._errors = (self._errors + chunk)[-_KEPT_ERRORS:]
            self.faults = self._fault_reader.parse_step_faults(self.errors)
            self.gone = self._fault_reader.parse_failed_tasks(self.errors)
        else:
            self._dispatch(self._reader.feed(chunk), on_line)

    def _dispatch(self, messages: Iterable[tuple[str, str]], on_line: OnLine) -> None:
        for source, line in messages:
            if source:
                self.heartbeats.note(source.rpartition(":")[0])
                if line:  # else it is a heartbeat
                    on_line(source, line)
            elif len(self._stray) < _MOST_STRAY_LINES:
                self._stray.append(line)

    def _repair(self, on_line: OnLine) -> None:
        """Ask for missing frames; give up those that are overdue or cannot come."""
        if self._stdout not in self._open_streams():
            self._dispatch(self._reader.end(), on_line)
            return
        gaps = self._reader.find_gaps()
        if not gaps:
            self._asked.clear()
            return
        now = time.monotonic()
        questions: dict[str, list[Gap]] = {}
        for source, missing in gaps.items():
            times, last = self._asked.get(source, (0, -_ASK_SECONDS))
            if now < last + _ASK_SECONDS * 2 ** max(0, times - 1):
                continue
            if times >= _MOST_ASKED or self._closing:
                self._asked.pop(source, None)
                self._dispatch(self._reader.give_up(source), on_line)
            else:
                self._asked[source] = times + 1, now
                questions[source] = missing[:_MOST_GAPS]
        if questions:
            self.send_line(json.dumps({AGAIN: questions}))

    def _open_streams(self) -> list[IO[bytes]]:
        keys = self._selector.get_map().values()
        return [cast("IO[bytes]", key.fileobj) for key in keys if key.data is None]

    def _send(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: os.write(self._stdin.fileno(), self._unsent)]
        except BlockingIOError:
            if not self._closing:
                return
        except (OSError, ValueError):  # it has ended, or it was closed before
            self._unsent.clear()
        if self._stdin in self._open_streams():
            self._selector.unregister(self._stdin)
        if self._closing:
            with contextlib.suppress(OSError):
                self._stdin.close()
