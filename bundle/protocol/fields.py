"""A check that a dataclass holds values of the types it declares; JSON may hold any."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

_NUMBER_LIMIT = 1 << 62
"""No count, size or number of seconds is as large as this."""


def check(value: object) -> None:
    """Compare the fields of a dataclass with their declared types.

    The types are read as text, as Python 3.9 cannot evaluate ``int | None``.

    Raises:
        ValueError: a field holds something else; the message names it.
    """
    if not dataclasses.is_dataclass(value):
        raise ValueError(f"{value!r:.100} is no dataclass")
    for field in dataclasses.fields(value):
        content = getattr(value, field.name)
        declared = str(field.type)
        if not any(_is_of_type(content, name) for name in declared.split(" | ")):
            raise ValueError(f"{field.name} is {content!r:.100}, not {declared}")


def _is_of_type(value: object, name: str) -> bool:
    test = _TESTS.get(name)
    if test is None:
        return type(value).__name__ == name
    return test(value)


def _is_none(value: object) -> bool:
    return value is None


def _is_text(value: object) -> bool:
    return isinstance(value, str) and "\0" not in value


def _is_number(value: object) -> bool:
    return type(value) is int and -_NUMBER_LIMIT < value < _NUMBER_LIMIT


def _is_tuple_of_texts(value: object) -> bool:
    return isinstance(value, tuple) and all(map(_is_text, value))


def _is_pair_of_numbers(value: object) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and all(map(_is_number, value))


def _is_table_of_texts(value: object) -> bool:
    if not isinstance(value, dict):
        return False
    return all(map(_is_text, value)) and all(map(_is_text, value.values()))


_TESTS: dict[str, Callable[[object], bool]] = {
    "None": _is_none,
    "str": _is_text,
    "int": _is_number,
    "tuple[str, ...]": _is_tuple_of_texts,
    "tuple[int, int]": _is_pair_of_numbers,
    "dict[str, str]": _is_table_of_texts,
}
"""Tests by the text of a type; any other text is the name of a class."""
