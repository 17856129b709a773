"""Reading a parsed TOML document key by key, and collecting every problem on the way.

A check takes the value of a key and returns the value to use; it raises :class:`ValueError` for a
value that is not allowed. The allowed values are described separately, so that every message reads
the same: key path, value found, values allowed.
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
        """Wrap a whole document; ``path`` goes before its keys in messages."""
        self._data = data
        self._path = path
        self._known: list[str] = []
        self._tables: list[Table] = []
        self.problems: list[str] = []

    def take(self, key: str, default: D, check: Callable[[object], T], allowed: str) -> T | D:
        """Return the value of a key, checked; the default if it is absent or wrong.

        Args:
            key: the key, without the table's own path.
            default: the value of an absent key.
            check: returns the value to use, or raises ValueError.
            allowed: the allowed values, for the message.
        """
        self._known.append(key)
        if key not in self._data:
            return default
        value = self._data[key]
        if _has_nul(value):
            self.problem(key, f"found {describe(value)}, with a NUL character in it; remove that")
            return default
        try:
            return check(value)
        except ValueError:
            self.problem(key, f"found {describe(value)}, allowed: {allowed}")
            return default

    def has(self, key: str) -> bool:
        """Return whether the key is present, whatever its value."""
        return key in self._data

    def problem(self, key: str, problem: str) -> None:
        """Note that a key's value cannot be used."""
        self.problems.append(f"{self._full(key)}: {problem}")

    def table(self, key: str) -> Table:
        """Return a sub-table; an absent one is empty."""
        self._known.append(key)
        value = self._data.get(key, {})
        if not isinstance(value, Mapping):
            self.problem(key, f"found {describe(value)}, allowed: a table, written [{key}]")
            value = {}
        child = Table(value, path=self._full(key))
        child.problems = self.problems
        self._tables.append(child)
        return child

    def finish(self) -> list[str]:
        """Return all problems, including keys that nothing read."""
        known = self._known_paths()
        for path in self._unknown_paths():
            self.problems.append(f"{path}: unknown key; {_suggestion(path, known)}")
        return self.problems

    def _full(self, key: str) -> str:
        if not self._path:
            return key
        return f"{self._path}.{key}"

    def _known_paths(self) -> list[str]:
        paths = [self._full(key) for key in self._known]
        for table in self._tables:
            paths += table._known_paths()
        return paths

    def _unknown_paths(self) -> list[str]:
        paths = [self._full(key) for key in self._data if key not in self._known]
        for table in self._tables:
            paths += table._unknown_paths()
        return paths


def describe(value: object) -> str:
    """Return a TOML value in words: its type, and the value itself if it is short."""
    try:
        return _described(value)
    except ValueError:  # Python writes no number of more than 4300 digits
        return "a number of thousands of digits"


def _described(value: object) -> str:
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


def _has_nul(value: object) -> bool:
    """Return whether any string of a value has a NUL in it; no path and no argument can."""
    if isinstance(value, str):
        return "\0" in value
    if isinstance(value, Mapping):
        return any(_has_nul(item) for pair in value.items() for item in pair)
    return isinstance(value, list) and any(map(_has_nul, value))


def _suggestion(path: str, known: list[str]) -> str:
    """Suggest the nearest known key, or list all keys of the same table."""
    nearest = _nearest(path, known)
    if nearest:
        return f"did you mean {nearest}?"
    return f"known are {', '.join(_siblings(path, known))}"


def _siblings(path: str, known: list[str]) -> dict[str, str]:
    """Return the known keys of the same table by their last component."""
    table = path.rpartition(".")[0]
    siblings = {}
    for key in known:
        key_table, _, name = key.rpartition(".")
        if key_table == table:
            siblings[name] = key
    return siblings


def _nearest(path: str, known: list[str]) -> str:
    """Return the known key path most like this one: in its own table first, then in any."""
    name = path.rpartition(".")[2]
    namesakes = {key.rpartition(".")[2]: key for key in reversed(known)}
    for candidates, cutoff in ((_siblings(path, known), 0.6), (namesakes, 0.75)):
        match = difflib.get_close_matches(name, list(candidates), n=1, cutoff=cutoff)
        if match:
            return candidates[match[0]]
    return ""
