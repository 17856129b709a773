"""Values that are of the type their dataclass declares; what came as JSON may be of any."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

_NUMBERS = 1 << 62
"""Where a count, a size or a number of seconds is no longer one."""


def check(value: object) -> None:
    """Compare the fields of a dataclass with what they are declared as.

    The types are read as text, as Python 3.9 cannot evaluate ``int | None``.

    Raises:
        ValueError: a field holds something else; the message names it.
    """
    if not dataclasses.is_dataclass(value):
        raise ValueError(f"{value!r:.100} is no dataclass")
    for field in dataclasses.fields(value):
        held = getattr(value, field.name)
        if not any(_is(held, kind) for kind in str(field.type).split(" | ")):
            raise ValueError(f"{field.name} is {held!r:.100}, not {field.type}")


def _is(held: object, kind: str) -> bool:
    test = _TESTS.get(kind)
    return type(held).__name__ == kind if test is None else test(held)


def _is_text(held: object) -> bool:
    return isinstance(held, str) and "\0" not in held


def _is_number(held: object) -> bool:
    return type(held) is int and -_NUMBERS < held < _NUMBERS


def _is_texts(held: object) -> bool:
    return isinstance(held, tuple) and all(map(_is_text, held))


def _is_pair(held: object) -> bool:
    return isinstance(held, tuple) and len(held) == 2 and all(map(_is_number, held))


def _is_table(held: object) -> bool:
    return isinstance(held, dict) and all(_is_text(one) for item in held.items() for one in item)


_TESTS: dict[str, Callable[[object], bool]] = {
    "None": lambda held: held is None,
    "str": _is_text,
    "int": _is_number,
    "tuple[str, ...]": _is_texts,
    "tuple[int, int]": _is_pair,
    "dict[str, str]": _is_table,
}
"""By how a type is written; anything else is the name of a class."""
