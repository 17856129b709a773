"""The lines of a job that belong to errors: each once, without noise."""

from __future__ import annotations

import collections
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace

from ..catalogue.catalogue import LineRole, match
from .lines import Line
from .suspects import TRACEBACK

_LAUNCHERS = "ChildFailedError"
"""Torchrun's own exception, which says no more than the table after it."""
_CLOSING_ENTRIES = ("closing-signal", "child-failed")
"""Entries of the catalogue for torchrun's lines about ending the other ranks."""
_ERROR = re.compile(
    r"\b(?:error|fatal|critical|exception|panic)\b|(?:Error|Exception)\b|^slurmstepd:|^srun: ", re.I
)
_WARNING = re.compile(r"Warning: |^\s*warnings\.warn\(|\bWARN(?:ING)?\b|\[W\d{4} ")
_CLOSING = re.compile(r"^[A-Za-z_][\w.]*(?::|$)")
_DIGITS = re.compile(r"\d+|0x[0-9a-f]+")
_LONGEST_TRACE = 200


def errors_of(lines: Iterable[Line]) -> Iterator[Line]:
    """Yield the lines that belong to errors.

    A traceback is one thing: it comes whole, at its last line's time. Lines that are equal but for
    numbers are shown for the first rank that has them, and counted for the others.
    """
    open_traces: dict[tuple[object, ...], list[Line]] = {}
    seen: collections.Counter[str] = collections.Counter()
    for line in lines:
        key = (line.path, line.rank)
        if key in open_traces:
            open_traces[key].append(line)
            if _ends(open_traces[key]):
                trace = open_traces.pop(key)
                if _LAUNCHERS not in trace[-1].text:
                    yield from _once(trace, seen)
        elif TRACEBACK in line.text:
            open_traces[key] = [line]
        elif _is_error(line.text):
            yield from _once([line], seen)
    for trace in open_traces.values():
        yield from _once(trace, seen)


def _ends(trace: list[Line]) -> bool:
    text = trace[-1].text
    closing = bool(text) and not text[0].isspace() and bool(_CLOSING.match(text))
    return (closing and len(trace) > 1) or len(trace) > _LONGEST_TRACE


def _is_error(text: str) -> bool:
    known = match(text)
    if known is not None:
        return known.entry.role != LineRole.NOISE and known.entry.name not in _CLOSING_ENTRIES
    return bool(_ERROR.search(text)) and not _WARNING.search(text)


def _once(group: list[Line], seen: collections.Counter[str]) -> Iterator[Line]:
    shape = "\n".join(_DIGITS.sub("#", line.text) for line in group)
    seen[shape] += 1
    if seen[shape] == 1:
        yield from group
    elif seen[shape] == 2 and len(group) > 1:
        last = group[-1]
        yield replace(last, text=f"{last.text}  (the same traceback as above, here as well)")
