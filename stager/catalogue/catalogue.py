"""The catalogue of failures: the meaning of a log's lines, from the tables beside this file.

Each table of ``catalogue/*.toml`` is one entry::

    [disk-full]                                 # its name
    needle = "No space left on device"          # no line without it can match; no digits in it
    pattern = 'No space left on device'         # a regular expression, searched for in one line
    role = "primary"                            # primary (a cause), cascade (a consequence), noise
    class = "disk-full"                         # one of FailureClass
    cause = "a disk is full on that node"       # {name}: what a group of the pattern matched
    remedy = "free some space there"
    source = "Linux, ENOSPC"                    # who writes such a line
    tells = "exit"                              # optional: see Entry.tells
    over = "Step created for"                   # optional: see Entry.over
    needs = "gloo-mesh"                         # optional: see Entry.needs
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bundle.protocol.words import FailureClass

from ..core.toml import loads

PRIMARY, CASCADE, NOISE = ROLES = ("primary", "cascade", "noise")
EXIT, STUCK, SYMPTOM, END = TELLS = ("exit", "stuck", "symptom", "end")

LONGEST = 2_000
"""Characters of a line that are searched: no pattern may take long, whatever the line."""
_WARNING = re.compile(r"[A-Za-z]Warning: ")
"""The beginning of Python's own warnings, which do not end a program."""


@dataclass(frozen=True, kw_only=True)
class CatalogueEntry:
    """One kind of line, and its meaning."""

    name: str
    """Its name in the catalogue."""
    needle: str
    """A text without which no line matches; it has no digits, see :mod:`stager.diagnosis.scan`."""
    pattern: re.Pattern[str]
    """The expression that is searched for in a line."""
    role: str
    """``primary``, a cause; ``cascade``, look for an earlier one; ``noise``, of no account."""
    kind: FailureClass
    """Its class."""
    cause: str
    """One sentence; groups of the pattern in braces."""
    remedy: str
    """The remedy: a command or a setting."""
    source: str
    """The program that writes such a line."""
    tells: str = ""
    """The part of a story that a line tells if not its cause; empty for one that tells a cause.

    ``exit``: only that something ended, not why. ``stuck``: that somebody else did not come.
    ``symptom``: what often follows from another failure; it counts where nothing else tells one.
    ``end``: that Slurm ended the job; what had failed before counts more.
    """
    over: str = ""
    """A text in a later line of the same file that takes it back; empty for none."""
    needs: str = ""
    """The entry without which, in the same file, it means nothing; empty for none."""

    def explain(self, groups: Mapping[str, str]) -> tuple[str, str]:
        """Return cause and remedy, filled in with what the pattern found in a line."""
        known = _Groups({name: text for name, text in groups.items() if text})
        return self.cause.format_map(known), self.remedy.format_map(known)


class _Groups(dict[str, str]):
    def __missing__(self, name: str) -> str:
        return f"({name} unknown)"


Match = tuple[CatalogueEntry, dict[str, str]]
"""An entry, and what the groups of its pattern have found."""


@functools.cache
def catalogue() -> tuple[CatalogueEntry, ...]:
    """Return all entries in the order of the tables; within a line the earlier one counts."""
    tables = sorted(Path(__file__).parent.glob("*.toml"))
    entries: list[CatalogueEntry] = []
    for table in tables:
        raw = loads(table.read_text(encoding="utf-8"), table)
        entries += (_entry(name, fields) for name, fields in raw.items())
    return tuple(entries)


@functools.cache
def entry(name: str) -> CatalogueEntry:
    """Return the entry of a name."""
    return next(known for known in catalogue() if known.name == name)


def match(line: str, entries: Sequence[CatalogueEntry] | None = None) -> Match | None:
    """Return the entry that a line is a sample of, and its groups; causes come first.

    Args:
        line: one line of a log.
        entries: those that it may be a sample of; None for all.
    """
    line = line[:LONGEST]
    if _WARNING.search(line):
        return None
    best: Match | None = None
    for candidate in catalogue() if entries is None else entries:
        if candidate.needle not in line:
            continue
        found = candidate.pattern.search(line)
        if found is None:
            continue
        if best is None or _weight(candidate) < _weight(best[0]):
            best = candidate, found.groupdict(default="")
    return best


def _weight(entry: CatalogueEntry) -> int:
    """Return the rank of an entry: a cause, then that something ended, then a consequence."""
    return ROLES.index(entry.role) * 2 + (entry.tells in (EXIT, SYMPTOM))


def _entry(name: str, raw: Mapping[str, Any]) -> CatalogueEntry:
    return CatalogueEntry(
        name=name,
        needle=raw["needle"],
        pattern=re.compile(raw["pattern"]),
        role=raw["role"],
        kind=FailureClass(raw["class"]),
        cause=raw["cause"],
        remedy=raw["remedy"],
        source=raw["source"],
        tells=raw.get("tells", ""),
        over=raw.get("over", ""),
        needs=raw.get("needs", ""),
    )
