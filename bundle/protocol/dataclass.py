"""``@dataclass`` that costs next to nothing when a module is imported.

The standard one compiles up to six methods of each class with ``exec`` (all at once since Python
3.13: https://github.com/python/cpython/issues/109870). A command imports 190 of them before its job
starts, and uses a few dozen. This one has the standard one make the fields and ``__init__`` of a
class when it is first used; the other methods are shared by all classes. That nothing is assigned
to the fields of a frozen one is left to the type checker.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

__all__ = ["dataclass"]

if TYPE_CHECKING:
    from dataclasses import dataclass
else:

    def dataclass(cls: type | None = None, *, frozen: bool = False, **options: bool) -> object:
        """Return a class with the methods of a dataclass; the options are those of the standard."""
        if cls is None:
            return functools.partial(dataclass, frozen=frozen, **options)
        own = dict(vars(cls))
        cls.__doc__ = cls.__doc__ or cls.__name__
        shared = _choose_methods(cls, frozen, options)
        for name, method in shared.items():
            if name not in own:
                setattr(cls, name, method)
        for name, value in own.items():
            if isinstance(value, dataclasses.Field):
                delattr(cls, name)
                if value.default is not dataclasses.MISSING:
                    setattr(cls, name, value.default)
        cls.__dataclass_fields__ = _UnusedFields(cls, own, options)
        return cls


def _choose_methods(kind: type, frozen: bool, options: dict[str, bool]) -> dict[str, object]:
    shared: dict[str, object] = {}
    if options.get("init", True):
        shared["__init__"] = _make_first_init(kind)
    if options.get("repr", True):
        shared["__repr__"] = _format
    if options.get("eq", True):
        shared.update(__eq__=_is_equal, __hash__=_compute_hash if frozen else None)
    return shared


class _UnusedFields:
    """Stands for the fields of a class until something asks for them."""

    def __init__(self, kind: type, own: dict[str, Any], options: dict[str, bool]) -> None:
        self.kind, self.own, self.options = kind, own, options

    def __get__(self, instance: object, owner: type) -> object:
        # Made beside the class, which other threads may be using: each would make the same.
        kind, own = self.kind, self.own
        bases = tuple(base for base in kind.__mro__[1:] if "__dataclass_fields__" in vars(base))
        names = {"__annotations__", "__module__", "__post_init__", *own.get("__annotations__", ())}
        body = {name: value for name, value in own.items() if name in names}
        made = type(kind.__name__, bases, body)
        dataclasses.dataclass(**{**self.options, "repr": False, "eq": False})(made)
        for name in ("__init__", "__dataclass_params__", "__dataclass_fields__"):
            if name in vars(made) and name not in own:
                setattr(kind, name, vars(made)[name])
        return vars(kind)["__dataclass_fields__"]


def _make_first_init(kind: Any) -> Callable[..., None]:  # noqa: ANN401
    def init(self: object, *values: object, **named: object) -> None:
        dataclasses.fields(kind)  # sets the true `__init__`
        kind.__init__(self, *values, **named)

    return init


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
