"""Values of JSON, checked one by one: each reader returns a value of its type, or says what it is.

A reader takes the value and its key path, and raises :class:`DecodeError`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

AnyText = str
"""Text that a program wrote, in annotations: any character may be in it, NUL too."""
Reader = Callable[[object, str], object]
"""Turns a JSON value into a value of one type; its second argument is the key path."""
_NUMBER_LIMIT = 1 << 62
"""No count, size or number of seconds is as large as this."""


class DecodeError(ValueError):
    """A JSON value is not what it should be.

    Attributes:
        path: the key path of the wrong value, ``nodes[2].address``; empty for all of it.
        reason: what is wrong with it.
    """

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}" if path else reason)
        self.path, self.reason = path, reason


def _none(raw: object, path: str) -> None:
    if raw is not None:
        raise DecodeError(path, f"is {shown(raw)}, not null")


def _boolean(raw: object, path: str) -> bool:
    if not isinstance(raw, bool):
        raise DecodeError(path, f"is {shown(raw)}, not true or false")
    return raw


def _integer(raw: object, path: str) -> int:
    if type(raw) is not int or not -_NUMBER_LIMIT < raw < _NUMBER_LIMIT:
        raise DecodeError(path, f"is {shown(raw)}, not a whole number of a usual size")
    return raw


def _number(raw: object, path: str) -> float:
    if type(raw) is int and -_NUMBER_LIMIT < raw < _NUMBER_LIMIT:
        return float(raw)
    if not isinstance(raw, float) or not math.isfinite(raw):
        raise DecodeError(path, f"is {shown(raw)}, not a finite number")
    return raw


def text(raw: object, path: str) -> str:
    """Return a value that is a text without NUL."""
    if not isinstance(raw, str) or "\0" in raw:
        raise DecodeError(path, f"is {shown(raw)}, not a text")
    return raw


def any_text(raw: object, path: str) -> str:
    """Return a value that is any text."""
    if not isinstance(raw, str):
        raise DecodeError(path, f"is {shown(raw)}, not a text")
    return raw


def _anything(raw: object, _: str) -> object:
    return raw


PLAIN: dict[str, Reader] = {
    "None": _none,
    "bool": _boolean,
    "int": _integer,
    "float": _number,
    "str": text,
    "object": _anything,
}
"""Readers by the text of a type; any other text is the name of a class."""


def json_object(raw: object, path: str) -> dict[object, object]:
    """Return a value that is an object."""
    if not isinstance(raw, dict):
        raise DecodeError(path, f"is {shown(raw)}, not an object")
    return raw


def json_list(raw: object, path: str) -> list[object] | tuple[object, ...]:
    """Return a value that is a list."""
    if not isinstance(raw, (list, tuple)):
        raise DecodeError(path, f"is {shown(raw)}, not a list")
    return raw


def shown(raw: object) -> str:
    """Return a value as a message shows it."""
    whole = repr(raw)
    return whole if len(whole) <= 80 else f"{whole[:80]}..."
