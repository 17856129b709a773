"""The catalogue of failures: the meaning of a log's lines, from the tables beside this file."""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import NamedTuple

from bundle.protocol.codec import decode
from bundle.protocol.dataclass import dataclass
from bundle.protocol.enumerations import FailureClass, TextEnum

from ..core.toml import read

# Logs repeat themselves: lines differ in digits only, and words come again and again. A word is
# looked at once, whatever the number of files it is in.

_WORDS = 200_000  # words that are remembered, so that memory stays small


class Prefilter:
    """Finds which of some texts are in lines; remembers the words that have none of them."""

    def __init__(self, texts: Iterable[str]) -> None:
        """Prepare to find texts, which contain no digits."""
        self._by_part: dict[bytes, list[bytes]] = {}
        for text in {text.encode() for text in texts}:
            # Whatever has the text in it has this, too, within one of its words.
            longest = max(text.split(), key=len)
            self._by_part.setdefault(longest, []).append(text)
        self._without_part: set[bytes] = set()
        self._parts_of: dict[bytes, frozenset[bytes]] = {}

    def find(self, lines: Sequence[bytes]) -> tuple[list[bytes], list[int]]:
        """Return the texts in these lines, which have no digits, and the places of such lines."""
        unique = set(lines)
        joined = b"\n".join(unique)
        # Not "-=", which would go through all words that are remembered.
        words = set(joined.split()) - self._without_part
        self._learn(words.difference(self._parts_of))
        texts = self._present(words, joined)
        if not texts:
            return [], []
        any_of = re.compile(b"|".join(map(re.escape, texts))).search
        having = {line for line in unique if any_of(line)}
        return texts, [place for place, line in enumerate(lines) if line in having]

    def _present(self, words: Collection[bytes], joined: bytes) -> list[bytes]:
        parts = {part for word in words for part in self._parts_of.get(word, ())}
        return sorted(text for part in parts for text in self._by_part[part] if text in joined)

    def _learn(self, words: Collection[bytes]) -> None:
        joined = b"\n".join(words)
        parts_of: dict[bytes, set[bytes]] = {}
        for part in self._by_part:
            if part not in joined:
                continue
            for word in words:
                if part in word:
                    parts_of.setdefault(word, set()).add(part)
        self._parts_of.update((word, frozenset(parts)) for word, parts in parts_of.items())
        if len(self._without_part) < _WORDS:
            self._without_part.update(word for word in words if word not in parts_of)


# --- The entries: each table of ``catalogue/*.toml`` is one --------------------------------------

#     [disk-full]                                 # its name
#     needle = "No space left on device"          # no line without it can match; no digits in it
#     pattern = 'No space left on (?P<what>\w+)'  # a regular expression; optional: the needle
#     role = "cascade"                            # one of LineRole; optional: "primary"
#     class = "disk-full"                         # one of FailureClass
#     cause = "a disk is full on that node"       # {name}: what a group of the pattern matched
#     remedy = "free some space there"
#     source = "Linux, ENOSPC"                    # who writes such a line
#     tells = "exit"                              # optional: one of LineTells
#     over = "Step created for"                   # optional: see CatalogueEntry.over
#     needs = "gloo-mesh"                         # optional: see CatalogueEntry.needs
#     weak = true                                 # optional: see CatalogueEntry.weak
#     explains = ["nccl-system"]                  # optional: see CatalogueEntry.explains

LONGEST = 2_000
"""Characters of a line that are searched: no pattern may take long, whatever the line."""
_WARNING = re.compile(r"[A-Za-z]Warning: ")
"""The beginning of Python's own warnings, which do not end a program."""
_DIGITS = re.compile(r"\d+")


class LineRole(TextEnum):
    """The account of a line in a verdict; the first one counts most."""

    PRIMARY = "primary"
    CASCADE = "cascade"  # a consequence: look for an earlier line
    NOISE = "noise"


class LineTells(TextEnum):
    """The part of a story that a line tells if not its cause."""

    EXIT = "exit"  # only that something ended, not why
    STUCK = "stuck"
    SYMPTOM = "symptom"
    """What often follows from another failure; it counts where nothing else tells one."""
    END = "end"  # that Slurm ended the job; what had failed before counts more


@dataclass(frozen=True, kw_only=True)
class CatalogueEntry:
    """One kind of line, and its meaning."""

    name: str
    needle: str
    """A text without which no line matches; it has no digits, see :mod:`stager.diagnosis.hits`."""
    expression: str = field(default="", metadata={"json": "pattern"})
    """A regular expression, searched for in one line; empty for the needle itself."""
    role: LineRole = LineRole.PRIMARY
    kind: FailureClass = field(metadata={"json": "class"})
    cause: str  # one sentence; groups of the pattern in braces
    remedy: str
    source: str
    tells: LineTells | None = None
    """The part of a story that a line tells; None for one that tells a cause."""
    over: str = ""  # a text in a later line of the same file that takes it back; empty for none
    needs: str = ""  # the entry without which, in the same file, it means nothing; empty for none
    weak: bool = False
    """True if programs print such a line and continue: alone, it does not show a failure."""
    explains: tuple[str, ...] = ()
    """The entries whose lines are consequences of this one, where both are in a log."""

    @functools.cached_property
    def pattern(self) -> re.Pattern[str]:
        """Return its expression, compiled."""
        return re.compile(self.expression or re.escape(self.needle))

    def explain(self, groups: Mapping[str, str]) -> tuple[str, str]:
        """Return cause and remedy, filled in with what the pattern found in a line."""
        known = _Groups({name: text for name, text in groups.items() if text})
        return self.cause.format_map(known), self.remedy.format_map(known)


class _Groups(dict[str, str]):
    def __missing__(self, name: str) -> str:
        return f"({name} unknown)"


class CatalogueMatch(NamedTuple):
    """An entry of the catalogue, and the parts of a line that it has found."""

    entry: CatalogueEntry
    groups: Mapping[str, str]


@functools.cache
def catalogue() -> tuple[CatalogueEntry, ...]:
    """Return all entries in the order of the tables; within a line the earlier one counts."""
    entries: list[CatalogueEntry] = []
    for table in sorted(Path(__file__).parent.glob("*.toml")):
        for name, fields in read(table).items():
            entries.append(decode(CatalogueEntry, {"name": name, **fields}, name))
    return tuple(entries)


def match_line(line: str, entries: Sequence[CatalogueEntry] | None = None) -> CatalogueMatch | None:
    """Return the entry that a line is a sample of, and its groups; causes come first."""
    line = line[:LONGEST]
    if _WARNING.search(line):
        return None
    searched = _find_by_needle(_DIGITS.sub("", line)) if entries is None else entries
    matches = [
        CatalogueMatch(entry, found.groupdict(default=""))
        for entry in searched
        if entry.needle in line and (found := entry.pattern.search(line))
    ]
    return min(matches, key=_weigh, default=None)  # of equal ones the first


@functools.lru_cache(maxsize=1 << 12)
def _find_by_needle(shape: str) -> tuple[CatalogueEntry, ...]:
    return tuple(candidate for candidate in catalogue() if candidate.needle in shape)


def _weigh(known: CatalogueMatch) -> tuple[int, bool]:
    is_no_cause = known.entry.tells in (LineTells.EXIT, LineTells.SYMPTOM)
    return list(LineRole).index(known.entry.role), is_no_cause
