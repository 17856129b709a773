"""Lines out of pieces of any size, in a time that grows with the bytes and not with the pieces."""

from __future__ import annotations


class Lines:
    """Splits what comes piece by piece.

    Attributes:
        pending: the number of bytes that have no line's end yet.
    """

    def __init__(self) -> None:
        self._rest: list[bytes] = []
        self.pending = 0

    def feed(self, chunk: bytes) -> list[bytes]:
        """Take what was read; return the lines that are now whole, without their ends."""
        first, *more = chunk.split(b"\n")
        self._rest.append(first)
        if not more:
            self.pending += len(first)
            return []
        lines = [b"".join(self._rest), *more[:-1]]
        self._rest, self.pending = [more[-1]], len(more[-1])
        return lines

    def last(self) -> bytes:
        """Return what has no end; nothing is pending then."""
        last = b"".join(self._rest)
        self._rest, self.pending = [], 0
        return last
