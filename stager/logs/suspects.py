"""The lines that may belong to errors, so that no others of long logs need be read."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ..catalogue.catalogue import catalogue
from ..catalogue.prefilter import Prefilter

TRACEBACK = "Traceback (most recent call last)"
WORDS = ("error", "fatal", "critical", "exception", "panic", "slurmstepd:", "srun:")
"""Texts of which a line about an error has at least one, in any case."""
_DIGITS = b"0123456789"


_CLOSING = re.compile(rb"[A-Za-z_][\w.]*(?::|\s*$)")
"""The beginning of the line that ends a traceback: the exception, which is not indented."""
_WINDOW = 1_000
"""Lines that may follow the one that begins a traceback; other ranks' may be among them."""


@dataclass(frozen=True)
class Open:
    """A traceback that had not ended when the lines were at their end."""

    lines: int
    """The number of lines that may follow."""
    head: bytes
    """The mark before each of its lines."""


class Suspects:
    """Picks lines; one for all logs of a job, as it remembers words."""

    def __init__(self) -> None:
        """Begin without any known word."""
        needles = (entry.needle for entry in catalogue())
        self._prefilter = Prefilter(text.lower() for text in (*WORDS, TRACEBACK, *needles))

    def among(
        self, raws: Sequence[bytes], before: Sequence[Open]
    ) -> tuple[Collection[int], list[Open]]:
        """Return the places of the lines to look at.

        Args:
            raws: lines of one log.
            before: the tracebacks that the lines before them have left open.

        Returns:
            the places, and the tracebacks that these lines leave open.
        """
        suspected = self._prefilter.among(_shapes(raws)).at
        places, still_open = set(suspected), []
        ends: dict[bytes, int] = {}
        traces = [(0, trace) for trace in before]
        for at in suspected:
            if _begins(raws[at]):
                traces.append((at + 1, Open(_WINDOW, _head(raws[at]))))
        for start, trace in traces:
            if start < ends.get(trace.head, 0):
                continue  # it belongs to the one that is open
            end, rest = _end(raws, start, trace)
            ends[trace.head] = end
            places.update(range(start, end))
            if rest is not None:
                still_open.append(rest)
        return places, still_open


def _shapes(raws: Sequence[bytes]) -> list[bytes]:
    """Return the lines in lower case and without digits."""
    whole = b"".join(raws).lower().translate(None, _DIGITS).split(b"\n")
    if raws and len(whole) == len(raws) + raws[-1].endswith(b"\n"):
        return whole[: len(raws)]
    return [raw.lower().translate(None, _DIGITS) for raw in raws]  # some end otherwise


def _begins(raw: bytes) -> bool:
    return TRACEBACK.encode() in raw


def _head(raw: bytes) -> bytes:
    return raw[: raw.index(TRACEBACK.encode())]


def _end(raws: Sequence[bytes], start: int, trace: Open) -> tuple[int, Open | None]:
    """Return the place behind the last line of a traceback, and the rest that is still open."""
    stop = min(start + trace.lines, len(raws))
    for at in range(start, stop):
        if raws[at].startswith(trace.head) and _CLOSING.match(raws[at], len(trace.head)):
            return at + 1, None
    more = trace.lines - (stop - start)
    return stop, Open(more, trace.head) if more else None
