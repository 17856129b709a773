"""``@dataclass`` for about a sixth of what the standard one costs when a module is imported.

That compiles up to six methods of each class with ``exec`` (all at once since Python 3.13:
https://github.com/python/cpython/issues/109870), and looks up the signature of a class without a
docstring. For 190 classes it took half of the time that a command needs before its job starts. This
one has it compile ``__init__`` only; the other methods are shared by all classes. That nothing is
assigned to the fields of a frozen one is left to the type checker.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING

__all__ = ["dataclass"]

if TYPE_CHECKING:
    from dataclasses import dataclass
else:

    def dataclass(cls: type | None = None, *, frozen: bool = False, **options: bool) -> object:
        """Return a class with the methods of a dataclass; the options are those of the standard."""
        if cls is None:
            return functools.partial(dataclass, frozen=frozen, **options)
        cls.__doc__ = cls.__doc__ or cls.__name__
        own = dict(vars(cls))
        made = dataclasses.dataclass(cls, **{**options, "repr": False, "eq": False})
        shared = {"__repr__": _format} if options.get("repr", True) else {}
        if options.get("eq", True):
            shared |= {"__eq__": _is_equal, "__hash__": _compute_hash if frozen else None}
        for name, method in shared.items():
            if name not in own:
                setattr(made, name, method)
        return made


def _format(self: object) -> str:
    fields = (each for each in dataclasses.fields(self) if each.repr)  # type: ignore[arg-type]
    values = ", ".join(f"{each.name}={getattr(self, each.name)!r}" for each in fields)
    return f"{type(self).__qualname__}({values})"


def _is_equal(self: object, other: object) -> object:
    if type(self) is not type(other):
        return NotImplemented
    get_values, _ = _make_getters(type(self))  # type: ignore[arg-type] # a type is hashable
    return get_values(self) == get_values(other)


def _compute_hash(self: object) -> int:
    return hash(_make_getters(type(self))[1](self))  # type: ignore[arg-type]


@functools.lru_cache(maxsize=None)
def _make_getters(kind: type) -> list[Callable[[object], object]]:
    """Return what gets the values of an instance that are compared, and those that are hashed."""
    compared = [each for each in dataclasses.fields(kind) if each.compare]
    hashed = [each for each in compared if each.hash is not False]
    return [
        operator.attrgetter(*(each.name for each in some)) if some else (lambda _: ())
        for some in (compared, hashed)
    ]
