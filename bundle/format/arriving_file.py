"""A file that is read while it is still being sent.

``sbcast`` writes its target from the beginning to the end, so what lies before the current end of
the file has arrived. Should some version of it give the file its full length at once, a digest
tells: what does not fit yet is read again until the sending is over.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import time

from ..protocol.problem import NodeError, Problem

_SENDING, _DONE, _FAILED = range(3)
_PAUSE_SECONDS = 0.004
_SLOTS = 256
"""Processes that note apart from one another how long they waited; more of them share a note."""


class Arrival:
    """How far the sending is; shared with the processes that are forked later."""

    def __init__(self) -> None:
        """Begin: nothing has arrived yet."""
        self._state = mmap.mmap(-1, 1)
        self._waits = memoryview(mmap.mmap(-1, _SLOTS * 8)).cast("d")

    @classmethod
    def over(cls) -> Arrival:
        """That of a file which is there."""
        arrival = cls()
        arrival.end(whole=True)
        return arrival

    def end(self, *, whole: bool) -> None:
        """Note that no more will come, and whether all has come."""
        self._state[0] = _DONE if whole else _FAILED

    @property
    def failed(self) -> bool:
        """Whether the sending has failed."""
        return self._state[0] == _FAILED

    def ongoing(self, path: str) -> bool:
        """Whether more may come.

        Raises:
            NodeError: the sending has failed.
        """
        if self.failed:
            why, fix = "the rest of it did not come", "see the problem named first"
            raise NodeError(Problem("the bundle could not be sent", path, why, fix))
        return self._state[0] == _SENDING

    def open(self, path: str, flags: int) -> int:
        """Open the file as soon as it is there.

        Raises:
            NodeError: the sending has failed.
            OSError: it cannot be opened, or is not there when the sending is over.
        """
        while self.ongoing(path):
            with contextlib.suppress(FileNotFoundError):
                return os.open(path, flags)
            self.pause()
        return os.open(path, flags)

    def wait(self, handle: int, end: int, path: str) -> None:
        """Wait until the open file has ``end`` bytes, or no more will come.

        Raises:
            NodeError: the sending has failed.
        """
        while os.fstat(handle).st_size < end and self.ongoing(path):
            self.pause()

    def pause(self) -> None:
        """Let a moment pass, in which more may come."""
        started = time.monotonic()
        time.sleep(_PAUSE_SECONDS)
        self._waits[os.getpid() % _SLOTS] += time.monotonic() - started

    @property
    def waited(self) -> float:
        """Seconds that each process has waited, on average of those that had to."""
        waits = [seconds for seconds in self._waits if seconds]
        return sum(waits) / len(waits) if waits else 0.0
