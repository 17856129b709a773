"""The hosts that are still to be logged in to: which is next, and how many at a time.

An sshd takes so many logins at a time and closes further connections at once (``MaxStartups``, of
which ten are always taken); all logins through one jump host are logins to its sshd as well. So a
host that was turned away is tried again after a pause, and fewer logins are under way from then on.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

LOGINS = 16
"""Logins that are under way at once; sshd and what checks passwords take no more at a time."""
PAUSES = (1.0, 2.0, 4.0, 8.0, 8.0)
"""Seconds before each further try of a host that was turned away."""


class LoginQueue:
    """Hosts that wait for their login."""

    def __init__(self, names: Sequence[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._most = LOGINS
        """Logins that may be under way at once."""
        self._new = deque(names)
        self._again: list[tuple[float, str]] = []
        """Hosts that were turned away, and the time from which they may be tried again."""
        self._tries: dict[str, int] = {}
        """How often each of them was."""

    def __bool__(self) -> bool:
        """Return whether some host is still to be logged in to."""
        return bool(self._new or self._again)

    def next(self, under_way: int) -> str:
        """Return the next host to log in to; empty if none may be now."""
        if under_way >= self._most:
            return ""
        now = self._clock()
        ready = next((entry for entry in self._again if entry[0] <= now), None)
        if ready is not None:
            self._again.remove(ready)
            return ready[1]
        return self._new.popleft() if self._new else ""

    def turned_away(self, name: str, under_way: int) -> bool:
        """Record a refused login; the number of the others is the new limit; True to retry."""
        tries = self._tries[name] = self.tries(name) + 1
        self._most = max(1, min(self._most, under_way))
        if tries > len(PAUSES):
            return False
        self._again.append((self._clock() + PAUSES[tries - 1], name))
        return True

    def tries(self, name: str) -> int:
        """Return how often a host was turned away."""
        return self._tries.get(name, 0)
