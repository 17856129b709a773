"""The check that no half of the file comes much slower than the other."""

from __future__ import annotations

from .chunks import ChunkFile

_SLOW_SHARE = 0.5
"""The part of the other half's rate below which a parent is slow. The halves share this node's
link, and not always evenly: a larger part would blame parents for it."""
_LEAST_CHUNKS = 8
"""Chunks that should have come before a rate is judged."""


class Pace:
    """The rate of the chunks from one parent, compared with the rate of the file's other half.

    Only what came from the present parent counts, and only lately: not what its predecessor, or
    this one in the past, has kept this node waiting for.
    """

    def __init__(self, file: ChunkFile, tree: int, seconds: float, now: float) -> None:
        """Measure rates for at least ``seconds``, longer if little arrives."""
        self._file, self._tree, self._other, self._seconds = file, tree, 1 - tree, seconds
        self._began = now
        self._usual = 0.0
        """Chunks a second of the other half, from the beginning until it was there."""
        self._other_is_there = False
        self.restart(now)

    def restart(self, now: float) -> None:
        """Measure from now on."""
        self._since, self._first = now, list(self._file.have)

    def is_slow(self, now: float) -> bool:
        """Return whether this half is behind, and has been slow; call it often.

        True once at the end of a measurement, after which the next one begins.
        """
        have = self._file.have
        expected = self._expected(now)
        if now < self._since + self._seconds or expected < _LEAST_CHUNKS:
            return False
        gained = have[self._tree] - self._first[self._tree]
        self.restart(now)
        return have[self._tree] < have[self._other] and gained < _SLOW_SHARE * expected

    def _expected(self, now: float) -> float:
        have = self._file.have[self._other]
        if self._other_is_there:
            return self._usual * (now - self._since)
        if now > self._began:
            self._usual = have / (now - self._began)
        self._other_is_there = have == self._file.totals[self._other]
        return have - self._first[self._other]
