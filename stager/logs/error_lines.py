"""The lines of a job that belong to errors: each once, without noise."""

from __future__ import annotations

import collections
import functools
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace

from ..catalogue.catalogue import CatalogueEntry, LineRole, catalogue, match
from .lines import Line
from .prefixes import TRACEBACK, TracebackPrefix, parse_line

_LAUNCHERS = "ChildFailedError"
"""Torchrun's own exception, which says no more than the table after it."""
_CLOSING_ENTRIES = ("closing-signal", "child-failed")
"""Entries of the catalogue for torchrun's lines about ending the other ranks."""
_ERROR = re.compile(
    r"\b(?:error|fatal|critical|exception|panic)\b|(?:Error|Exception)\b|^slurmstepd:|^srun: ", re.I
)
_WARNING = re.compile(r"Warning: |^\s*warnings\.warn\(|\bWARN(?:ING)?\b|\[W\d{4} ")
_CLOSING = re.compile(r"^[A-Za-z_][\w.]*(?::|$)")
_BEGINNING = re.compile(r"(?<![\[\\])\^")
_DIGITS = re.compile(r"0x[0-9a-f]+|\d+")
_LONGEST_TRACE = 200


def errors_of(lines: Iterable[Line]) -> Iterator[Line]:
    """Yield the lines that belong to errors.

    A traceback is one thing: it comes whole, at its last line's time. Lines that are equal but for
    numbers are shown for the first rank that has them, and counted for the others.
    """
    open_traces: dict[tuple[object, ...], _Trace] = {}
    seen: collections.Counter[str] = collections.Counter()
    for line in lines:
        key = (line.path, line.rank)
        trace = open_traces.get(key)
        if trace is not None and trace.take(line):
            if trace.ended:
                del open_traces[key]
                if _LAUNCHERS not in line.text:
                    yield from _once(trace.lines, seen)
        elif trace is None and TRACEBACK in line.text:
            open_traces[key] = _Trace(line)
        elif _is_error(line.text):
            yield from _once([line], seen)
    for trace in open_traces.values():
        yield from _once(trace.lines, seen)


class _Trace:
    def __init__(self, first: Line) -> None:
        self.lines = [first]
        self.ended = False
        self._prefix: TracebackPrefix | None = None

    def take(self, line: Line) -> bool:
        """Add a line; return False if another process wrote it."""
        if self._prefix is None:
            self._prefix = TracebackPrefix(self.lines[0].text, line.text)
        text = self._prefix.strip(line.text)
        if text is None:
            return False
        self.lines.append(line)
        self.ended = bool(_CLOSING.match(text)) or len(self.lines) > _LONGEST_TRACE
        return True


def _is_error(text: str) -> bool:
    known = match(text)
    if known is None and any(entry.needle in text for entry in _at_beginning()):
        known = match(parse_line(text).text, _at_beginning())
    if known is not None:
        return known.entry.role != LineRole.NOISE and known.entry.name not in _CLOSING_ENTRIES
    return bool(_ERROR.search(text)) and not _WARNING.search(text)


@functools.cache
def _at_beginning() -> tuple[CatalogueEntry, ...]:
    """Return the entries whose pattern starts at the beginning of a line, after its prefixes."""
    return tuple(entry for entry in catalogue() if _BEGINNING.search(entry.expression))


def _once(group: list[Line], seen: collections.Counter[str]) -> Iterator[Line]:
    shape = "\n".join(_DIGITS.sub("#", line.text) for line in group)
    seen[shape] += 1
    if seen[shape] == 1:
        yield from group
    elif seen[shape] == 2 and len(group) > 1:
        last = group[-1]
        yield replace(last, text=f"{last.text}  (the same traceback as above, here as well)")
