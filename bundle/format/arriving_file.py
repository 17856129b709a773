"""A file that is read while it is still being transferred.

A relay counts what has arrived. ``sbcast`` writes its target from the beginning to the end, so
everything before the current end of the file has arrived; if some version of it sets the full
length at once, the digests show it: bytes that do not fit yet are read again until the transfer is
over.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import time

from ..protocol.problem import NodeError, Problem, ProblemCode

_RUNNING, _DONE, _FAILED = range(3)
_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.004, 0.03
"""Time between two looks at the file: short at first, and longer while nothing comes. On a slow
link most of the processor time of those that wait would be spent looking."""
_SLOTS = 256
"""Processes whose waiting times are kept apart; more of them share a slot."""


class Arrival:
    """The progress of a transfer; shared with the processes that are forked later."""

    def __init__(self, prefix: memoryview | None = None) -> None:
        """Share ``prefix``, the gapless bytes so far, with the writer; None if it is in order."""
        self._prefix = prefix
        self._state = mmap.mmap(-1, 1)
        self._waits = memoryview(mmap.mmap(-1, _SLOTS * 8)).cast("d")

    @classmethod
    def over(cls) -> Arrival:
        """Return the arrival of a file that is complete."""
        arrival = cls()
        arrival.end(whole=True)
        return arrival

    def end(self, *, whole: bool) -> None:
        """Note that the transfer is over, with all of the file or not."""
        self._state[0] = _DONE if whole else _FAILED

    @property
    def failed(self) -> bool:
        """True if the transfer has failed."""
        return self._state[0] == _FAILED

    def ongoing(self, path: str) -> bool:
        """Return True if more bytes may come.

        Raises:
            NodeError: the transfer has failed.
        """
        if self.failed:
            raise NodeError(Problem(ProblemCode.BUNDLE_CUT_OFF, path))
        return self._state[0] == _RUNNING

    def open(self, path: str, flags: int) -> int:
        """Open the file as soon as it exists.

        Raises:
            NodeError: the transfer has failed.
            OSError: it cannot be opened, or is missing after the transfer.
        """
        while self.ongoing(path):
            with contextlib.suppress(FileNotFoundError):
                return os.open(path, flags)
            self.pause()
        return os.open(path, flags)

    def wait(self, handle: int, end: int, path: str) -> None:
        """Wait until the open file has ``end`` bytes, or no more will come.

        Raises:
            NodeError: the transfer has failed.
        """
        seconds = _PAUSE_SECONDS
        while self._arrived(handle) < end and self.ongoing(path):
            self.pause(seconds)
            seconds = min(2 * seconds, _LONGEST_PAUSE_SECONDS)

    def _arrived(self, handle: int) -> int:
        if self._prefix is not None:
            return int(self._prefix[0])
        return os.fstat(handle).st_size

    def pause(self, seconds: float = _PAUSE_SECONDS) -> None:
        """Wait a moment for more bytes."""
        started = time.monotonic()
        time.sleep(seconds)
        self._waits[os.getpid() % _SLOTS] += time.monotonic() - started

    @property
    def waited(self) -> float:
        """Average of the seconds that processes have waited, without those that never did."""
        waits = list(filter(None, self._waits))
        if not waits:
            return 0.0
        return sum(waits) / len(waits)
