"""Values of any dataclass that travels, made from the types that its fields declare."""

from __future__ import annotations

import dataclasses
import enum
import random
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from bundle.protocol.digest import Digest
from bundle.protocol.problem import Problem

_T = TypeVar("_T")
_TEXTS = ("", "n1", "two words", "größe", 'a "quote"', "line\nbreak", "\\", "{}", "\U0001f600")
_NUMBERS = (0, 1, 2, 3, 255, 10**9, 2**53)


def generated(kind: type[_T], seed: int, **given: object) -> _T:
    value: _T = _dataclass(kind, random.Random(seed), given)
    return value


def _dataclass(
    kind: Any, random_: random.Random, given: Mapping[str, object] = types.MappingProxyType({})
) -> Any:
    hints = typing.get_type_hints(kind)
    names = [field.name for field in dataclasses.fields(kind) if field.name not in given]
    return kind(**given, **{name: _value(hints[name], random_) for name in names})


def _value(declared: Any, random_: random.Random) -> Any:
    origin, inner = typing.get_origin(declared), typing.get_args(declared)
    if origin in (typing.Union, types.UnionType):
        return _value(random_.choice(inner), random_)
    if origin is tuple and inner[-1] is not Ellipsis:
        return tuple(_value(item, random_) for item in inner)
    if origin is tuple:
        return tuple(_value(inner[0], random_) for _ in range(random_.randrange(3)))
    if origin is dict:
        return {f"key {n}": _value(inner[1], random_) for n in range(random_.randrange(3))}
    if declared in _MAKERS:
        return _MAKERS[declared](random_)
    if issubclass(declared, enum.Enum):
        return random_.choice(list(declared))
    return _dataclass(declared, random_)


def _problem(random_: random.Random) -> Problem:
    keys = ("what", "where", "why", "fix")
    return Problem.from_json({key: random_.choice(_TEXTS[1:]) for key in keys})


_MAKERS: dict[Any, Callable[[random.Random], Any]] = {
    type(None): lambda _: None,
    bool: lambda random_: random_.random() < 0.5,
    int: lambda random_: random_.choice(_NUMBERS),
    float: lambda random_: random_.choice((0.0, 0.125, -1.5, 1e9)),
    str: lambda random_: random_.choice(_TEXTS),
    Digest: lambda random_: Digest.of(random_.randbytes(4)),
    Problem: _problem,
}
