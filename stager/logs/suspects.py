"""The lines that may belong to errors, so that no others of long logs need be read."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ..catalogue.catalogue import Prefilter, catalogue
from .prefixes import TRACEBACK, TracebackPrefix, show_block_as_terminal

WORDS = ("error", "fatal", "critical", "exception", "panic", "slurmstepd:", "srun:")
"""Texts of which a line about an error has at least one, in any case."""
_DIGITS = b"0123456789"


_CLOSING = re.compile(r"[A-Za-z_][\w.]*(?::|\s*$)")
"""The beginning of the line that ends a traceback: the exception, which is not indented."""
_LINE_BYTES = 2_000
_WINDOW = 1_000
"""Lines that may follow the one that begins a traceback; other ranks' may be among them."""


@dataclass(frozen=True)
class Open:
    """A traceback that had not ended when the lines were at their end."""

    lines: int
    """The number of lines that may follow."""
    prefix: TracebackPrefix
    """What stands before each of its lines."""


class Suspects:
    """Picks lines; one for all logs of a job, as it remembers words."""

    def __init__(self) -> None:
        needles = (entry.needle for entry in catalogue())
        self._prefilter = Prefilter(text.lower() for text in (*WORDS, TRACEBACK, *needles))

    def among(
        self, raws: Sequence[bytes], before: Sequence[Open]
    ) -> tuple[Collection[int], list[Open]]:
        """Return the places of the lines to look at.

        Returns:
            the places, and the tracebacks that these lines leave open.
        """
        lines = _as_terminal(raws)
        suspected = self._prefilter.among(_shapes(lines)).at
        places, still_open = set(suspected), []
        ends: dict[object, int] = {}
        traces = [(0, trace) for trace in before]
        for at in suspected:
            if TRACEBACK.encode() in lines[at]:
                traces.append((at + 1, Open(_WINDOW, _prefix(lines, at))))
        for start, trace in traces:
            if start < ends.get(trace.prefix.writer, 0):
                continue  # it belongs to the one that is open
            end, rest = _end(lines, start, trace)
            ends[trace.prefix.writer] = end
            places.update(range(start, end))
            if rest is not None:
                still_open.append(rest)
        return places, still_open


def _shapes(lines: Sequence[bytes]) -> list[bytes]:
    return b"\n".join(lines).lower().translate(None, _DIGITS).split(b"\n") if lines else []


def _as_terminal(raws: Sequence[bytes]) -> list[bytes]:
    shown = show_block_as_terminal(b"".join(raws)).split(b"\n")
    if raws and len(shown) == len(raws) + raws[-1].endswith(b"\n"):
        return shown[: len(raws)]
    return [show_block_as_terminal(raw) for raw in raws]  # some end otherwise


def _text(line: bytes) -> str:
    return line[:_LINE_BYTES].decode(errors="replace")


def _prefix(lines: Sequence[bytes], at: int) -> TracebackPrefix:
    below = _text(lines[at + 1]) if at + 1 < len(lines) else ""
    return TracebackPrefix(_text(lines[at]), below)


def _end(lines: Sequence[bytes], start: int, trace: Open) -> tuple[int, Open | None]:
    """Return the position after a traceback's last line, and the rest that is still open."""
    stop = min(start + trace.lines, len(lines))
    for at in range(start, stop):
        text = trace.prefix.strip(_text(lines[at]))
        if text is not None and _CLOSING.match(text):
            return at + 1, None
    more = trace.lines - (stop - start)
    return stop, Open(more, trace.prefix) if more else None
