"""The time by which a relay judges others: what it missed itself does not count against them."""

from __future__ import annotations

import time
from collections.abc import Callable

MOST_SECONDS = 0.5
"""A round of the loop counts no longer. It waits for a fifth of that; a process that took more was
stopped, or waited for the disk or a processor, and could not see what came meanwhile."""


class RelayClock:
    """A clock that a loop advances at the beginning of each round, before it waits for what comes.

    So whatever came until :attr:`now` has been seen in this round, before a deadline is compared
    with it.

    Attributes:
        now: the time, in seconds from an arbitrary beginning.
    """

    def __init__(self, read: Callable[[], float] = time.monotonic) -> None:
        self._read = read
        self._real = self.now = read()

    def advance(self) -> None:
        """Begin a round."""
        real = self._read()
        self.now += min(real - self._real, MOST_SECONDS)
        self._real = real
