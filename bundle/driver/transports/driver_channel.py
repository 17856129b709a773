"""Talking with the agents of one step: nobody waits for anybody who does not listen."""

from __future__ import annotations

import collections
import contextlib
import fcntl
import json
import os
import selectors
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import IO, cast

from ...channel.agent_channel import AGAIN, END
from ...channel.frames import Gap, Reader
from ...system import processes
from . import slurm_commands

OnLine = Callable[[str, str], None]
"""Called with the source of a message (``node:task``) and the message."""

_WAIT_SECONDS = 0.5
_TICK_SECONDS = 0.02
_CHUNK = 1 << 18
_KEPT = 1 << 18
"""Bytes of standard error that are kept; a failure shows at its end."""
_AFTER_SECONDS = 5.0
_KILL_SECONDS = 15.0
_ASK_SECONDS = 2.0
"""How long an agent may take to send again what is missing, before it is asked once more.

Each time it gets twice as long: what it sends comes behind all that is under way already."""
_ASKED = 3
"""How often an agent is asked for it."""
_MOST_GAPS = 20
"""Of one source, asked for at once: each task hears it."""
_MOST_ODDITIES = 100
_PIPE = 1 << 20
_F_SETPIPE_SZ = 1031  # linux/fcntl.h; in Python's fcntl from 3.10 on


class DriverChannel:
    """A running ``srun``: what is told to all its tasks, and the lines that they answer.

    Leaving the ``with`` block ends it, politely first: the agents see their standard input end.
    """

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], opening: bytes) -> None:
        """Start it; ``opening`` is sent as soon as it can be.

        Raises:
            process.ProcessError: it cannot be started.
        """
        self._process = processes.start(
            argv, env=env, stdin=processes.PIPE, stdout=processes.PIPE, stderr=processes.PIPE
        )
        self._reader = Reader()
        self._asked: dict[str, tuple[int, float]] = {}  # by source: how often, and when last
        self._stray: list[str] = []
        self._unsent = bytearray(opening)
        self._errors = self._read = b""
        self._meaning: tuple[dict[str, str], dict[str, set[int]]] = {}, {}
        self._over = False  # whether standard input shall end when all is sent
        self._selector = selectors.DefaultSelector()
        self._stdin, self._stdout, self._stderr = (
            cast("IO[bytes]", stream)
            for stream in (self._process.stdin, self._process.stdout, self._process.stderr)
        )
        for stream in (self._stdin, self._stdout, self._stderr):
            os.set_blocking(stream.fileno(), False)
        self._selector.register(self._stdin, selectors.EVENT_WRITE)
        self._selector.register(self._stdout, selectors.EVENT_READ)
        self._selector.register(self._stderr, selectors.EVENT_READ)
        with contextlib.suppress(OSError):  # fewer, larger reads; the limit for users may be lower
            fcntl.fcntl(self._stdout, _F_SETPIPE_SZ, _PIPE)

    def __enter__(self) -> DriverChannel:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self.ended:
            self.finish(_ignore, _KILL_SECONDS)
        self._selector.close()
        for stream in (self._stdin, self._stdout, self._stderr):
            with contextlib.suppress(OSError):
                stream.close()

    @property
    def ended(self) -> bool:
        """Whether it has ended, and all that it said has been read."""
        reading = {self._stdout, self._stderr}.intersection(self._listening())
        return not reading and self._process.poll() is not None

    @property
    def code(self) -> int:
        """Its exit status; negative for a signal, 0 while it runs."""
        return self._process.returncode or 0

    @property
    def errors(self) -> str:
        """What it wrote to standard error; the end of it where that is much."""
        return self._errors.decode(errors="replace")

    @property
    def faults(self) -> dict[str, str]:
        """What Slurm said went wrong, by node."""
        return self._understood()[0]

    @property
    def gone(self) -> dict[str, set[int]]:
        """The tasks of each node of which Slurm said that they have ended otherwise than well."""
        return self._understood()[1]

    def _understood(self) -> tuple[dict[str, str], dict[str, set[int]]]:
        """Read standard error, once as long as nothing is added."""
        if self._read is not self._errors:
            text = self.errors
            self._read = self._errors
            self._meaning = slurm_commands.step_faults(text), slurm_commands.ended_tasks(text)
        return self._meaning

    def losses(self) -> dict[str, int]:
        """Return how many frames of each source are lost since this was asked last."""
        lost, self._reader.lost = dict(self._reader.lost), collections.Counter()
        return lost

    def oddities(self) -> list[str]:
        """Return the lines that nobody is known to have sent since this was asked last.

        Pieces of frames that were cut are among them; these frames are sent again, or lost.
        """
        stray, self._stray = self._stray, []
        return stray

    def tell(self, line: str) -> None:
        """Send one line to every task; nothing once their standard input is closed."""
        if self._over:
            return
        self._unsent += line.encode() + b"\n"
        if self._stdin not in self._listening():
            self._selector.register(self._stdin, selectors.EVENT_WRITE)

    def pump(self, on_line: OnLine, seconds: float = _WAIT_SECONDS) -> None:
        """Pass on what has come, or wait a moment for it."""
        if not self._selector.get_map():
            time.sleep(_TICK_SECONDS)  # all is read; only its end is still to come
            return
        for key, _ in self._selector.select(seconds):
            if key.fileobj is self._stdin:
                self._send()
                continue
            chunk = os.read(key.fd, _CHUNK)
            if not chunk:
                self._selector.unregister(key.fileobj)
            elif key.fileobj is self._stderr:
                self._errors = (self._errors + chunk)[-_KEPT:]
            else:
                self._pass_on(self._reader.feed(chunk), on_line)
        self._repair(on_line)
        if self._process.poll() is not None and self._stdin in self._listening():
            self._selector.unregister(self._stdin)

    def finish(
        self, on_line: OnLine, grace: float, complete: Callable[[], bool] | None = None
    ) -> None:
        """End it: who has not gone ``grace`` seconds later is killed.

        Args:
            on_line: called with what comes meanwhile.
            grace: in seconds.
            complete: whether all has come that will come. Agents are told to end first and stay
                until then, so that what is missing can be sent again. Without it their standard
                input ends at once.
        """
        until = time.monotonic() + grace
        if complete is not None and not complete():
            self.tell(END)
            while not (self.ended or complete()) and time.monotonic() < until:
                self.pump(on_line)
            until = max(until, time.monotonic() + _AFTER_SECONDS)
        self._over = True
        self._send()
        while not self.ended and time.monotonic() < until:
            self.pump(on_line)
        if self._process.poll() is None:
            processes.stop(self._process, _AFTER_SECONDS)
        until = time.monotonic() + _AFTER_SECONDS
        while not self.ended and time.monotonic() < until:
            self.pump(on_line)
        for stream in self._listening():  # somebody else holds it open: there is no more to come
            self._selector.unregister(stream)
        self._pass_on(self._reader.end(), on_line)

    def _pass_on(self, messages: Iterable[tuple[str, str]], on_line: OnLine) -> None:
        for source, line in messages:
            if source:
                on_line(source, line)
            elif len(self._stray) < _MOST_ODDITIES:
                self._stray.append(line)

    def _repair(self, on_line: OnLine) -> None:
        """Ask for what is missing; give up what nobody has sent again, or can any more."""
        if self._stdout not in self._listening():
            self._pass_on(self._reader.end(), on_line)
            return
        gaps = self._reader.gaps()
        if not gaps:
            self._asked.clear()
            return
        now = time.monotonic()
        ask: dict[str, list[Gap]] = {}
        for source, missing in gaps.items():
            often, last = self._asked.get(source, (0, -_ASK_SECONDS))
            if now < last + _ASK_SECONDS * 2 ** max(0, often - 1):
                continue
            if often >= _ASKED or self._over:
                self._asked.pop(source, None)
                self._pass_on(self._reader.give_up(source), on_line)
                continue
            self._asked[source] = often + 1, now
            ask[source] = missing[:_MOST_GAPS]
        if ask:
            self.tell(json.dumps({AGAIN: ask}))

    def _listening(self) -> list[IO[bytes]]:
        return [cast("IO[bytes]", key.fileobj) for key in self._selector.get_map().values()]

    def _send(self) -> None:
        """Write what the pipe takes; when all is sent, stop asking whether it takes more."""
        try:
            while self._unsent:
                del self._unsent[: os.write(self._stdin.fileno(), self._unsent)]
        except BlockingIOError:
            if not self._over:
                return
        except (OSError, ValueError):  # it has ended, or it was closed before
            self._unsent.clear()
        if self._stdin in self._listening():
            self._selector.unregister(self._stdin)
        if self._over:
            with contextlib.suppress(OSError):
                self._stdin.close()


def _ignore(source: str, line: str) -> None:
    """Nobody is interested any more."""
