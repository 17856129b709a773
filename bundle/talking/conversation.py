"""Talking with the agents of one step: nobody waits for anybody who does not listen."""

from __future__ import annotations

import contextlib
import os
import selectors
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import IO, cast

from .. import process, slurm
from .frames import Joiner

OnLine = Callable[[str, str], None]
"""Called with the source of a line (``node:task``; empty for none) and the line."""

_WAIT_SECONDS = 0.5
_TICK_SECONDS = 0.02
_CHUNK = 1 << 18
_KEPT = 1 << 18
"""Bytes of standard error that are kept; a failure shows at its end."""
_AFTER_SECONDS = 5.0
_KILL_SECONDS = 15.0


class Conversation:
    """A running ``srun``: what is told to all its tasks, and the lines that they answer.

    Leaving the ``with`` block ends it, politely first: the agents see their standard input end.
    """

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], opening: bytes) -> None:
        """Start it; ``opening`` is sent as soon as it can be.

        Raises:
            process.ProcessError: it cannot be started.
        """
        self._process = process.start(
            argv, env=env, stdin=process.PIPE, stdout=process.PIPE, stderr=process.PIPE
        )
        self._joiner = Joiner()
        self._unsent = opening
        self._errors = b""
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

    def __enter__(self) -> Conversation:
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
        return slurm.step_faults(self.errors) if self._errors else {}

    def tell(self, line: str) -> None:
        """Send one line to every task."""
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
                for source, line in self._joiner.feed(chunk):
                    on_line(source, line)
        if self._process.poll() is not None and self._stdin in self._listening():
            self._selector.unregister(self._stdin)

    def finish(self, on_line: OnLine, grace: float) -> None:
        """End it: standard input ends, and who has not gone ``grace`` seconds later is killed."""
        self._over = True
        self._send()
        until = time.monotonic() + grace
        while not self.ended and time.monotonic() < until:
            self.pump(on_line)
        if self._process.poll() is None:
            process.stop(self._process, _AFTER_SECONDS)
        until = time.monotonic() + _AFTER_SECONDS
        while not self.ended and time.monotonic() < until:
            self.pump(on_line)
        for stream in self._listening():  # somebody else holds it open: there is no more to come
            self._selector.unregister(stream)

    def _listening(self) -> list[IO[bytes]]:
        return [cast("IO[bytes]", key.fileobj) for key in self._selector.get_map().values()]

    def _send(self) -> None:
        """Write what the pipe takes; when all is sent, stop asking whether it takes more."""
        try:
            while self._unsent:
                self._unsent = self._unsent[os.write(self._stdin.fileno(), self._unsent) :]
        except BlockingIOError:
            if not self._over:
                return
        except (OSError, ValueError):  # it has ended, or it was closed before
            self._unsent = b""
        if self._stdin in self._listening():
            self._selector.unregister(self._stdin)
        if self._over:
            with contextlib.suppress(OSError):
                self._stdin.close()


def _ignore(source: str, line: str) -> None:
    """Nobody is interested any more."""
