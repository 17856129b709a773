"""Reading a parsed TOML document key by key, and collecting every problem on the way.

A check takes the value found and gives the value to use; it raises :class:`ValueError` when the
value is not one it allows. What is allowed is a sentence of its own, so that every message reads
the same: key path, what was found, what is allowed.
"""

from __future__ import annotations

import datetime
import difflib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")
D = TypeVar("D")


class Table:
    """One table of a document, with its key path; sub-tables share the list of problems."""

    def __init__(self, data: Mapping[str, Any], *, path: str = "") -> None:
        """Wrap a whole document; ``path`` is what its keys are reported under."""
        self._data = data
        self._path = path
        self._known: list[str] = []
        self._tables: list[Table] = []
        self.problems: list[str] = []

    def take(self, key: str, default: D, check: Callable[[object], T], allowed: str) -> T | D:
        """The value of a key, checked; the default where it is absent or wrong.

        Args:
            key: the key, without the table's own path.
            default: what an absent key means.
            check: gives the value to use, or raises ValueError.
            allowed: what may stand there, for the message.
        """
        self._known.append(key)
        if key not in self._data:
            return default
        found = self._data[key]
        try:
            return check(found)
        except ValueError:
            self.problem(key, f"found {describe(found)}, allowed: {allowed}")
            return default

    def has(self, key: str) -> bool:
        """Whether the key is present, whatever its value."""
        return key in self._data

    def problem(self, key: str, what: str) -> None:
        """Note that a key's value cannot be used."""
        self.problems.append(f"{self._full(key)}: {what}")

    def table(self, key: str) -> Table:
        """A sub-table; an absent one is empty."""
        self._known.append(key)
        found = self._data.get(key, {})
        if not isinstance(found, Mapping):
            self.problem(key, f"found {describe(found)}, allowed: a table, written [{key}]")
            found = {}
        child = Table(found, path=self._full(key))
        child.problems = self.problems
        self._tables.append(child)
        return child

    def finish(self) -> list[str]:
        """All problems; keys that nothing asked for are added now."""
        known = self._known_paths()
        for path in self._unknown_paths():
            table = path.rpartition(".")[0]
            siblings = [k.rpartition(".")[2] for k in known if k.rpartition(".")[0] == table]
            near = _nearest(path, known)
            there = f"did you mean {near}?" if near else f"known are {', '.join(siblings)}"
            self.problems.append(f"{path}: unknown key; {there}")
        return self.problems

    def _full(self, key: str) -> str:
        return f"{self._path}.{key}" if self._path else key

    def _known_paths(self) -> list[str]:
        own = [self._full(key) for key in self._known]
        return own + [path for table in self._tables for path in table._known_paths()]

    def _unknown_paths(self) -> list[str]:
        own = [self._full(key) for key in self._data if key not in self._known]
        return own + [path for table in self._tables for path in table._unknown_paths()]


def describe(value: object) -> str:
    """A TOML value in words: its type, and the value itself where that is short."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f"the string {value!r}"
    if isinstance(value, int | float):
        return f"the number {value}"
    if isinstance(value, datetime.datetime | datetime.date | datetime.time):
        return f"the date or time {value}"
    if isinstance(value, Mapping):
        return "a table"
    return f"the list {value!r}" if len(repr(value)) < 60 else "a list"


def _nearest(path: str, known: list[str]) -> str:
    """The known key path most like this one: in its own table first, then in any."""
    table, _, name = path.rpartition(".")
    siblings = {k.rpartition(".")[2]: k for k in known if k.rpartition(".")[0] == table}
    namesakes = {k.rpartition(".")[2]: k for k in reversed(known)}
    for candidates, cutoff in ((siblings, 0.6), (namesakes, 0.75)):
        match = difflib.get_close_matches(name, list(candidates), n=1, cutoff=cutoff)
        if match:
            return candidates[match[0]]
    return ""
