"""TOML in and out.

Reading is the standard library's (``tomli`` before Python 3.11), with a syntax error turned into a
message that says where. Writing covers what a lock needs: there is no writer in the standard
library, and one more dependency is not worth forty lines. The format is TOML 1.0 (toml.io).
"""

from __future__ import annotations

import datetime
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .errors import ConfigError
from .files import bytes_of

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found,unused-ignore]

_BYTE_ORDER_MARK = "\ufeff"
"""Some editors write it in front of a file; the standard's parser refuses it."""
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_TWICE = re.compile(r"Cannot declare (\(.*\)) twice")
"""What the parser says of a table that is written twice, with the parts of its name."""
_POSITION = re.compile(r"\s*\(at (line \d+, column \d+|end of document)\)")
_ESCAPES = {
    "\b": "\\b",
    "\t": "\\t",
    "\n": "\\n",
    "\f": "\\f",
    "\r": "\\r",
    '"': '\\"',
    "\\": "\\\\",
}


def read(path: Path) -> dict[str, Any]:
    """Parse a TOML file.

    Raises:
        ConfigError: the file cannot be read, is not UTF-8, or is not TOML; says file, line, column.
    """
    try:
        text = bytes_of(path).decode("utf-8")
    except OSError as exc:
        raise ConfigError(
            f"cannot read {path}: {exc.strerror or exc}", hint="check the path and its permissions"
        ) from exc
    except UnicodeDecodeError as exc:
        raise ConfigError(
            f"{path}: byte {exc.start} is not UTF-8", hint="TOML files are written in UTF-8"
        ) from exc
    return loads(text, path)


def loads(text: str, source: Path) -> dict[str, Any]:
    """Parse TOML text; ``source`` is the file it came from, for the message.

    Raises:
        ConfigError: the text is not TOML; says file, line and column.
    """
    try:
        data: dict[str, Any] = tomllib.loads(text.removeprefix(_BYTE_ORDER_MARK))
    except tomllib.TOMLDecodeError as exc:
        message = str(exc)
        position = _POSITION.search(message)
        place = position.group(1) if position else "somewhere"
        _refuse_twice(text, source, place, message)
        raise ConfigError(
            f"{source}: {place}: {_POSITION.sub('', message)}",
            hint="the file is not valid TOML; strings need quotes, lists need brackets",
        ) from exc
    except RecursionError as exc:
        raise ConfigError(
            f"{source}: lists or tables lie too deep within each other",
            hint="look for a bracket or brace that was repeated by mistake",
        ) from exc
    except ValueError as exc:  # a number of more than 4300 digits, a date that does not exist
        raise ConfigError(
            f"{source}: a value cannot be used: {exc}", hint="correct the number or the date"
        ) from exc
    return data


def table(data: Mapping[str, Any], *keys: str) -> Mapping[str, Any]:
    """Return the table at a path of keys; an empty one where there is none."""
    value: object = data
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value if isinstance(value, Mapping) else {}


def listed(data: Mapping[str, Any], key: str) -> list[Any]:
    """Return the list at a key; an empty one where there is none."""
    value = data.get(key)
    return value if isinstance(value, list) else []


def _refuse_twice(text: str, source: Path, place: str, message: str) -> None:
    """Raise a clear error if the parser's message is about a table that is defined twice."""
    twice = _TWICE.match(message)
    if twice is None:
        return
    name = ".".join(re.findall(r"'([^']*)'", twice.group(1)))
    begin = re.compile(rf"\s*\[\s*{re.escape(name)}\s*\]")
    lines = [number for number, line in enumerate(text.splitlines(), 1) if begin.match(line)]
    first = f", in line {lines[0]}" if lines else ""
    raise ConfigError(
        f"{source}: {place}: the table [{name}] is there twice",
        hint=f"write its keys below the first one{first}",
    )


def dumps(data: Mapping[str, Any]) -> str:
    """Write a mapping as TOML; the same mapping always gives the same bytes.

    Keys keep their order. Mappings become ``[tables]``, lists of mappings ``[[arrays of tables]]``;
    inside the latter everything is written inline, so that one entry stays one paragraph.

    Raises:
        TypeError: a value is of a type TOML does not have.
    """
    lines: list[str] = []
    _write_table(lines, data, prefix="")
    return "\n".join(lines).strip("\n") + "\n"


def inline(value: object) -> str:
    """Write a value as it may stand behind a key; a long list has several lines.

    Raises:
        TypeError: it is of a type TOML does not have.
    """
    return _value(value)


def _write_table(lines: list[str], data: Mapping[str, Any], *, prefix: str) -> None:
    """Add the lines of a table: its plain values first, then the tables in it."""
    tables: list[tuple[str, Any]] = []
    for key, value in data.items():
        if isinstance(value, Mapping) or _is_array_of_tables(value):
            tables.append((f"{prefix}{_key(key)}", value))
        else:
            lines.append(f"{_key(key)} = {_value(value)}")
    for path, value in tables:
        if isinstance(value, Mapping):
            if _needs_header(value):
                lines.extend(["", f"[{path}]"])
            _write_table(lines, value, prefix=f"{path}.")
        else:
            _array_of_tables(lines, path, value)


def _needs_header(table: Mapping[str, Any]) -> bool:
    if not table:
        return True
    return any(not isinstance(value, Mapping) for value in table.values())


def _array_of_tables(lines: list[str], path: str, entries: Sequence[Mapping[str, Any]]) -> None:
    for entry in entries:
        lines.extend(["", f"[[{path}]]"])
        lines.extend(f"{_key(key)} = {_value(value)}" for key, value in entry.items())


def _is_array_of_tables(value: object) -> bool:
    return isinstance(value, list | tuple) and bool(value) and isinstance(value[0], Mapping)


def _value(value: object) -> str:
    for kind, write in _WRITERS:
        if isinstance(value, kind):
            return write(value)
    raise TypeError(f"TOML has no type for {type(value).__name__}")


def _boolean(value: bool) -> str:
    return "true" if value else "false"


def _string(text: str) -> str:
    return '"' + "".join(_character(char) for char in text) + '"'


def _character(char: str) -> str:
    if char in _ESCAPES:
        return _ESCAPES[char]
    if ord(char) < 0x20 or ord(char) == 0x7F:
        return f"\\u{ord(char):04x}"
    return char


def _inline_table(table: Mapping[str, Any]) -> str:
    if not table:
        return "{}"
    inside = ", ".join(f"{_key(key)} = {_value(value)}" for key, value in table.items())
    return f"{{ {inside} }}"


def _list(values: Sequence[Any]) -> str:
    items = [_value(value) for value in values]
    short = "[" + ", ".join(items) + "]"
    if len(short) <= 80:
        return short
    return "[\n" + "".join(f"    {item},\n" for item in items) + "]"


def _key(key: str) -> str:
    if _BARE_KEY.fullmatch(key):
        return key
    return _string(key)


_WRITERS: tuple[tuple[tuple[type, ...], Callable[[Any], str]], ...] = (
    ((bool,), _boolean),  # before the numbers, since a bool is an int
    ((str,), _string),
    ((int, float), repr),
    ((datetime.datetime, datetime.date, datetime.time), lambda value: value.isoformat()),
    ((Mapping,), _inline_table),
    ((Sequence,), _list),
)
"""Types of TOML values in the order they are tried, and the function that writes each."""
