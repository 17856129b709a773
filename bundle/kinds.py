"""Values that are of the type their dataclass declares; what came as JSON may be of any."""

from __future__ import annotations

import dataclasses
from typing import Any

_NUMBERS = 1 << 62
"""Where a count, a size or a number of seconds is no longer one."""


def check(value: Any) -> None:
    """Compare the fields of a dataclass with what they are declared as.

    The types are read as text, as Python 3.9 cannot evaluate ``int | None``.

    Raises:
        ValueError: a field holds something else; the message names it.
    """
    for field in dataclasses.fields(value):
        held = getattr(value, field.name)
        if not any(_is(held, kind) for kind in str(field.type).split(" | ")):
            raise ValueError(f"{field.name} is {held!r:.100}, not {field.type}")


def _is(held: object, kind: str) -> bool:
    if kind == "None":
        return held is None
    if kind == "str":
        return isinstance(held, str) and "\0" not in held
    if kind == "int":
        return type(held) is int and -_NUMBERS < held < _NUMBERS
    if kind == "tuple[str, ...]":
        return isinstance(held, tuple) and all(_is(one, "str") for one in held)
    if kind == "tuple[int, int]":
        return isinstance(held, tuple) and len(held) == 2 and all(_is(one, "int") for one in held)
    if kind == "dict[str, str]":
        return isinstance(held, dict) and all(_is(one, "str") for pair in held.items() for one in pair)
    return type(held).__name__ == kind
