"""Dataclasses as JSON and back: one codec for all that travels between the two sides.

A type is read from its annotation as text, as Python 3.9 cannot evaluate ``int | None``: ``None``,
``bool``, ``int``, ``float``, ``str``, ``AnyText``, ``object`` (any JSON value), ``tuple[T, ...]``,
``tuple[A, B]``, ``dict[str, T]``, a class, or several of these with ``|``. A class is an
enumeration, a text that checks itself, another dataclass, or one with ``to_json`` and
``from_json``; the module that declares the field must import it when it runs. A field's JSON name
is its own, or ``json`` of its metadata; one whose ``json`` is None has no place in the JSON.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import math
import os
import sys
from collections.abc import Callable, Collection, Iterator
from typing import Any, TypeVar

AnyText = str  # text that a program wrote, in annotations: any character may be in it, NUL too
_T = TypeVar("_T")
_Reader = Callable[[Any, str], object]  # of a JSON value and its key path
_NUMBER_LIMIT = 1 << 62  # no count, size or number of seconds is as large as this


class DecodeError(ValueError):
    """A JSON value is not what it should be; ``path`` is its place, ``nodes[2].address``."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}" if path else reason)
        self.path = path
        self.reason = reason


_SCALARS = (str, int, float, bool, type(None))
_STRICT = contextlib.nullcontext()
_LENIENT = contextlib.suppress(DecodeError)


def encode(value: object, omit: Collection[str] = ()) -> dict[str, object]:
    """Return a dataclass of the types above as a JSON object, without some fields."""
    names = _json_names(type(value))  # type: ignore[arg-type] # as in decode
    return {key: _encode_value(getattr(value, name)) for name, key in names if name not in omit}


def _encode_value(value: object) -> object:
    if type(value) in _SCALARS:  # most values
        return value
    if isinstance(value, (tuple, list)):
        return [_encode_value(item) for item in value]
    if isinstance(value, dict):
        return {key: _encode_value(item) for key, item in value.items()}
    if hasattr(value, "to_json") and hasattr(value, "from_json"):
        return value.to_json()
    if dataclasses.is_dataclass(value):
        return encode(value)
    return value.value if isinstance(value, enum.Enum) else os.fspath(value)  # type: ignore[call-overload]


def decode(kind: type[_T], raw: object, path: str = "", *, strict: bool = True) -> _T:
    """Read a dataclass from a JSON object; DecodeError if a field is missing or wrong.

    If not strict, the object may be damaged, or of another version: unknown keys are ignored, a
    wrong field has its default, and lists and tables lack the items that are wrong.
    """
    items = _require(dict, "an object", raw, path)
    prefix = f"{path}." if path else ""
    values, missing = {}, []
    readers = _readers(kind, strict)  # type: ignore[arg-type] # of lru_cache: a type is hashable
    for name, key, read, is_required in readers:
        if key in items:
            with _STRICT if strict or is_required else _LENIENT:
                values[name] = read(items[key], prefix + key)
        elif is_required:
            missing.append(key)
    unknown = set(items).difference(key for _, key, _, _ in readers)
    _require_none(missing, "missing", path)
    _require_none(unknown if strict else (), "unknown", path)
    try:
        return kind(**values)
    except ValueError as exc:  # of a class that checks its values
        raise DecodeError(path, str(exc)) from exc


@functools.lru_cache(maxsize=None)
def _json_names(kind: type) -> tuple[tuple[str, str], ...]:
    fields = dataclasses.fields(kind)
    names = [(field.name, field.metadata.get("json", field.name)) for field in fields]
    return tuple((name, key) for name, key in names if key is not None)


@functools.lru_cache(maxsize=None)
def _readers(kind: type, strict: bool) -> tuple[tuple[str, str, _Reader, bool], ...]:
    """Return each field's name, its name in JSON, its reader, and whether it has no default."""
    readers = []
    for name, key in _json_names(kind):
        declared = [vars(base).get("__dataclass_fields__", {}).get(name) for base in kind.__mro__]
        field = next(filter(None, declared))
        module = kind.__mro__[len(declared) - 1 - declared[::-1].index(field)].__module__
        is_required = field.default is field.default_factory is dataclasses.MISSING
        readers.append((name, key, _reader(str(field.type), module, strict), is_required))
    return tuple(readers)


@functools.lru_cache(maxsize=None)
def _reader(declared: str, module: str, strict: bool) -> _Reader:
    alternatives = list(_split_type(declared, "|"))
    if len(alternatives) > 1:
        readers = [_reader(alternative, module, strict) for alternative in alternatives]
        return functools.partial(_read_union, readers, declared)
    name, bracket, inner = declared.partition("[")
    if not bracket:
        plain = _PLAIN.get("AnyText" if name == "str" and not strict else name)
        return plain or _class_reader(getattr(sys.modules[module], name), strict)
    *others, last = _split_type(inner[:-1], ",")
    if name == "dict":
        return functools.partial(_read_dict, _reader(last, module, strict), strict)
    if last == "...":
        return functools.partial(_read_list, _reader(others[0], module, strict), strict)
    items = [_reader(item, module, strict) for item in (*others, last)]
    return functools.partial(_read_tuple, items)


def _split_type(text: str, separator: str) -> Iterator[str]:
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


def _class_reader(kind: Any, strict: bool) -> _Reader:  # noqa: ANN401 - any class
    if hasattr(kind, "from_json"):
        return functools.partial(_convert, kind.from_json, "")
    if hasattr(kind, "__dataclass_fields__"):
        return functools.partial(decode, kind, strict=strict)
    choices = ""
    if issubclass(kind, enum.Enum):
        choices = f"none of {', '.join(str(member.value) for member in kind)}"
    return functools.partial(_convert, kind, choices)


def shorten(value: object) -> str:
    """Return a value as a message shows it: its first 80 characters."""
    shown = repr(value)
    return shown if len(shown) <= 80 else f"{shown[:80]}..."


def _make_error(raw: object, path: str, words: object) -> DecodeError:
    return DecodeError(path, f"is {shorten(raw)}, {words}")


def _require_none(keys: Collection[object], fault: str, path: str) -> None:
    if keys:
        raise DecodeError(path, f"{', '.join(sorted(map(str, keys)))}: {fault}")


def _require(kind: Any, words: str, raw: Any, path: str) -> Any:  # noqa: ANN401 - a JSON value
    if not isinstance(raw, kind):
        raise _make_error(raw, path, f"not {words}")
    return raw


def _read_integer(raw: object, path: str) -> int:
    if type(raw) is not int or not -_NUMBER_LIMIT < raw < _NUMBER_LIMIT:
        raise _make_error(raw, path, "not a whole number of a usual size")
    return raw


def _read_float(raw: object, path: str) -> float:
    if type(raw) is int and -_NUMBER_LIMIT < raw < _NUMBER_LIMIT:
        return float(raw)
    if not isinstance(raw, float) or not math.isfinite(raw):
        raise _make_error(raw, path, "not a finite number")
    return raw


def _read_text(raw: object, path: str) -> str:
    if not isinstance(raw, str) or "\0" in raw:
        raise _make_error(raw, path, "not a text")
    return raw


_PLAIN: dict[str, _Reader] = {
    "None": functools.partial(_require, type(None), "null"),
    "bool": functools.partial(_require, bool, "true or false"),
    "int": _read_integer,
    "float": _read_float,
    "str": _read_text,
    "AnyText": functools.partial(_require, str, "a text"),
    "object": lambda raw, _: raw,
}
"""Readers by the text of a type; any other text is the name of a class."""


def _read_union(readers: list[_Reader], declared: str, raw: object, path: str) -> object:
    inner = None
    for reader in readers:
        try:
            return reader(raw, path)
        except DecodeError as exc:
            if exc.path != path:
                inner = exc
    # A fault inside an object or a list says more than the names of all types.
    raise inner or _make_error(raw, path, f"not {declared}")


def _read_list(item: _Reader, strict: bool, raw: object, path: str) -> object:
    values = []
    for position, value in enumerate(_require((list, tuple), "a list", raw, path)):
        with _STRICT if strict else _LENIENT:
            values.append(item(value, f"{path}[{position}]"))
    return tuple(values)


def _read_tuple(items: list[_Reader], raw: object, path: str) -> object:
    values = _require((list, tuple), "a list", raw, path)
    if len(values) != len(items):
        raise DecodeError(path, f"has {len(values)} items, not {len(items)}")
    pairs = enumerate(zip(items, values))
    return tuple(item(value, f"{path}[{position}]") for position, (item, value) in pairs)


def _read_dict(item: _Reader, strict: bool, raw: object, path: str) -> object:
    values = {}
    for key, value in _require(dict, "an object", raw, path).items():
        with _STRICT if strict else _LENIENT:
            values[_read_text(key, path)] = item(value, f"{path}.{key}")
    return values


def _convert(convert: Callable[[Any], object], reason: str, raw: object, path: str) -> object:
    try:
        return convert(raw)
    except (KeyError, TypeError, ValueError) as exc:
        raise _make_error(raw, path, reason or exc) from exc
