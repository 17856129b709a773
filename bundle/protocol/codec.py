"""Dataclasses as JSON and back: one codec for all that travels between the two sides.

A type is read from its annotation as text, as Python 3.9 cannot evaluate ``int | None``. It may be
``None``, ``bool``, ``int``, ``float``, ``str``, ``object`` (any JSON value), ``tuple[T, ...]``,
``tuple[A, B]``, ``dict[str, T]``, a class, or several of these with ``|``. A class is an
enumeration, a kind of text that checks itself (:class:`~bundle.protocol.digest.Digest`), another
dataclass, or one with ``to_json`` and ``from_json`` of its own. Classes are looked up in the module
that declares the field, so it must import them when it runs, not only for a type checker.

A field's JSON name is its own, or ``json`` of its metadata: ``field(metadata={"json": "class"})``.
One with :data:`WRITTEN` as its metadata is never left out; one with :data:`REQUIRED` must be there
when it is read, too. One whose ``json`` is None has no place in the JSON. A path becomes its text.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import math
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, TypeVar

# --- Values of JSON, checked one by one: each reader returns a value of its type, or says what it
# is

# A reader takes the value and its key path, and raises :class:`DecodeError`.

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


_T = TypeVar("_T")
WRITTEN = {"written": True}
"""Metadata of a field that is always written; where it is missing, it has its default."""
REQUIRED = {"required": True}
"""Metadata of a field that is always in JSON: its default is for those who make a value only."""


def encode(
    value: object, *, short: bool = False, names: Collection[str] | None = None
) -> dict[str, object]:
    """Return a dataclass of the types above as a JSON object."""
    encoded = {}
    for field in _fields(type(value)):
        if names is not None and field.name not in names:
            continue
        held = getattr(value, field.name)
        if field.written or not (short and field.is_default(held)):
            encoded[field.json_name] = _encoded(held, short)
    return encoded


def _encoded(value: object, short: bool) -> object:
    if isinstance(value, enum.Enum):
        return value.value
    if hasattr(value, "to_json") and hasattr(value, "from_json"):
        return value.to_json()
    if isinstance(value, dict):
        return {key: _encoded(item, short) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_encoded(item, short) for item in value]
    if dataclasses.is_dataclass(value):
        return encode(value, short=short)
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def decode(kind: type[_T], raw: object, path: str = "", *, strict: bool = True) -> _T:
    """Read a dataclass from a JSON object.

    Args:
        kind: the dataclass.
        raw: the JSON value.
        path: the key path of this object, for messages.
        strict: refuse what is missing, unknown or wrong. Else read what may be damaged, or of
            another version: keys without a field are ignored, a field that is missing or wrong has
            its default, and lists and tables are without the items that are wrong.

    Raises:
        DecodeError: a field is missing, unknown, or holds something else than it declares; where
            that is not refused, one without a default.
    """
    items = json_object(raw, path)
    fields = _fields(kind, strict)
    values = {}
    prefix = f"{path}." if path else ""
    for field in fields:
        if field.json_name in items:
            with _refusing(strict or field.required):
                values[field.name] = field.read(items[field.json_name], prefix + field.json_name)
    _refuse_missing(fields, values, path)
    if strict:
        _refuse_unknown(fields, items, path)
    try:
        return kind(**values)
    except ValueError as exc:  # of a class that checks its values
        raise DecodeError(path, str(exc)) from exc


def _refuse_missing(fields: Iterable[_Field], values: Collection[str], path: str) -> None:
    missing = [field.json_name for field in fields if field.required and field.name not in values]
    if missing:
        raise DecodeError(path, f"{', '.join(missing)}: missing")


def _refuse_unknown(fields: Iterable[_Field], items: Collection[object], path: str) -> None:
    unknown = set(items) - {field.json_name for field in fields}
    if unknown:
        raise DecodeError(path, f"{', '.join(sorted(map(str, unknown)))}: unknown")


def _refusing(wanted: bool) -> contextlib.AbstractContextManager[None]:
    return _REFUSES if wanted else contextlib.suppress(DecodeError)


_REFUSES = contextlib.nullcontext()


@dataclasses.dataclass(frozen=True)
class _Field:
    name: str
    json_name: str
    default: object
    """The default; ``dataclasses.MISSING`` for a field that is required."""
    written: bool
    """True if it is never left out."""
    read: Reader

    @property
    def required(self) -> bool:
        return self.default is dataclasses.MISSING

    def is_default(self, value: object) -> bool:
        return type(value) is type(self.default) and value == self.default


_FIELDS: dict[tuple[type, bool], tuple[_Field, ...]] = {}


def _fields(kind: type, strict: bool = True) -> tuple[_Field, ...]:
    """Return a dataclass's fields, cached; TypeError for another class."""
    if (kind, strict) not in _FIELDS:
        fields: tuple[dataclasses.Field[Any], ...] = dataclasses.fields(kind)
        _FIELDS[kind, strict] = tuple(
            _Field(
                field.name,
                field.metadata.get("json", field.name),
                _default(field, strict),
                bool(field.metadata.get("written")),
                _reader(str(field.type), _module_of(kind, field), strict),
            )
            for field in fields
            if field.metadata.get("json", field.name) is not None
        )
    return _FIELDS[kind, strict]


def _default(field: dataclasses.Field[Any], strict: bool) -> object:
    if strict and field.metadata.get("required"):
        return dataclasses.MISSING
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _module_of(kind: type, field: dataclasses.Field[Any]) -> str:
    for base in reversed(kind.__mro__):
        if dataclasses.is_dataclass(base) and field in dataclasses.fields(base):
            return base.__module__
    return kind.__module__


@functools.lru_cache(maxsize=None)
def _reader(declared: str, module: str, strict: bool) -> Reader:
    alternatives = list(_split(declared, "|"))
    if len(alternatives) > 1:
        readers = [_reader(alternative, module, strict) for alternative in alternatives]
        return _union(readers, declared)
    name, bracket, inner = declared.partition("[")
    if bracket:
        return _container_reader(name, list(_split(inner[:-1], ",")), module, strict)
    if name == "str" and not strict:
        return any_text
    return PLAIN.get(name) or _class_reader(getattr(sys.modules[module], name), strict)


def _container_reader(name: str, items: list[str], module: str, strict: bool) -> Reader:
    if name == "dict":
        return _dict_reader(_reader(items[1], module, strict), strict)
    if items[-1] == "...":
        return _list_reader(_reader(items[0], module, strict), strict)
    return _tuple_reader([_reader(item, module, strict) for item in items])


def _split(text: str, separator: str) -> Iterator[str]:
    """Split a type's text at separators outside brackets."""
    depth, part = 0, ""
    for char in text:
        depth += (char == "[") - (char == "]")
        if char == separator and not depth:
            yield part.strip()
            part = ""
        else:
            part += char
    yield part.strip()


def _union(readers: list[Reader], declared: str) -> Reader:
    def read(raw: object, path: str) -> object:
        inner = None
        for reader in readers:
            try:
                return reader(raw, path)
            except DecodeError as exc:
                if exc.path != path:
                    inner = exc
        # A fault inside an object or a list says more than the names of all types.
        raise inner or DecodeError(path, f"is {shown(raw)}, not {declared}")

    return read


def _list_reader(item: Reader, strict: bool) -> Reader:
    def read(raw: object, path: str) -> object:
        values = []
        for position, value in enumerate(json_list(raw, path)):
            with _refusing(strict):
                values.append(item(value, f"{path}[{position}]"))
        return tuple(values)

    return read


def _tuple_reader(items: list[Reader]) -> Reader:
    def read(raw: object, path: str) -> object:
        values = json_list(raw, path)
        if len(values) != len(items):
            raise DecodeError(path, f"has {len(values)} items, not {len(items)}")
        pairs = enumerate(zip(items, values))
        return tuple(item(value, f"{path}[{position}]") for position, (item, value) in pairs)

    return read


def _dict_reader(item: Reader, strict: bool) -> Reader:
    def read(raw: object, path: str) -> object:
        values = {}
        for key, value in json_object(raw, path).items():
            with _refusing(strict):
                values[text(key, path)] = item(value, f"{path}.{key}")
        return values

    return read


def _class_reader(kind: Any, strict: bool) -> Reader:  # noqa: ANN401 - any class
    if kind is AnyText:
        return any_text
    if hasattr(kind, "from_json"):
        return _converter(kind.from_json)
    if hasattr(kind, "__dataclass_fields__"):
        return functools.partial(decode, kind, strict=strict)
    if not issubclass(kind, enum.Enum):
        return _converter(kind)
    choices = ", ".join(str(member.value) for member in kind)
    return _converter(kind, f"none of {choices}")


def _converter(convert: Callable[[Any], object], reason: str = "") -> Reader:
    def read(raw: object, path: str) -> object:
        try:
            return convert(raw)
        except (KeyError, TypeError, ValueError) as exc:
            raise DecodeError(path, f"is {shown(raw)}, {reason or exc}") from exc

    return read
