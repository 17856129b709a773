"""Lines out of pieces of any size, in a time that grows with the bytes and not with the pieces."""

from __future__ import annotations


class Lines:
    """Splits what comes piece by piece."""

    def __init__(self) -> None:
        """Start with nothing pending."""
        self._rest: list[bytes] = []

    def feed(self, chunk: bytes) -> list[bytes]:
        """Take what was read; return the lines that are now whole, without their ends."""
        first, *more = chunk.split(b"\n")
        self._rest.append(first)
        if not more:
            return []
        lines = [b"".join(self._rest), *more[:-1]]
        self._rest = [more[-1]]
        return lines

    def last(self) -> bytes:
        """Return what has no end; nothing is pending then."""
        last, self._rest = b"".join(self._rest), []
        return last
