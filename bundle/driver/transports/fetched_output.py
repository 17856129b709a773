"""The output of a command on a node: read until it ends, until it stalls, or until a signal.

A disk or a network that hangs would otherwise hold the allocation, and the user, for ever.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import selectors
from collections.abc import Iterator
from typing import IO

from ...system import signals

SILENT_SECONDS = 300.0
"""Time without a byte after which no more is expected."""
_CHUNK = 1 << 20


class FetchedOutput(io.RawIOBase):
    """A pipe from a command.

    Attributes:
        given_up: True if its end was not waited for.
    """

    def __init__(self, pipe: IO[bytes], stopped: int, silent_seconds: float) -> None:
        """Read a pipe until ``stopped`` is readable, or no byte has come for some seconds."""
        super().__init__()
        self.given_up = False
        self._pipe, self._stopped, self._silent_seconds = pipe, stopped, silent_seconds
        self._selector = selectors.DefaultSelector()
        self._selector.register(pipe, selectors.EVENT_READ)
        self._selector.register(stopped, selectors.EVENT_READ)

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Read what has come; return the number of bytes, 0 at the end.

        Raises:
            OSError: nothing has come for too long, or the reading is to end.
        """
        ready = {key.fd for key, _ in self._selector.select(self._silent_seconds)}
        if self._stopped in ready:
            self.given_up = True
            raise OSError(errno.ECANCELED, "stager was told to end")  # EINTR would be tried again
        if not ready:
            self.given_up = True
            raise OSError(errno.ETIMEDOUT, f"nothing has come for {self._silent_seconds:g} s")
        data = os.read(self._pipe.fileno(), len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def buffered(self) -> io.BufferedReader:
        """Return this as a stream with a buffer."""
        return io.BufferedReader(self, _CHUNK)

    def close(self) -> None:
        """Let go of what watches the pipe; the pipe itself stays open."""
        self._selector.close()
        super().close()


@contextlib.contextmanager
def fetched(pipe: IO[bytes], silent_seconds: float = SILENT_SECONDS) -> Iterator[FetchedOutput]:
    """Read from a command while the block runs; signals that end a program end the reading."""
    stopped, stop = os.pipe()
    os.set_blocking(stop, False)

    def end() -> None:
        with contextlib.suppress(BlockingIOError):  # it has been told often enough
            os.write(stop, b"!")

    try:
        with signals.heeding(end), FetchedOutput(pipe, stopped, silent_seconds) as output:
            yield output
    finally:
        os.close(stopped)
        os.close(stop)
