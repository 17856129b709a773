"""TOML in and out.

Reading is the standard library's (``tomli`` before Python 3.11), with a syntax error turned into a
message that says where. Writing covers what a lock needs: there is no writer in the standard
library, and one more dependency is not worth forty lines. The format is TOML 1.0 (toml.io).
"""

from __future__ import annotations

import datetime
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found,unused-ignore]

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
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
        text = path.read_bytes().decode("utf-8")
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
        found: dict[str, Any] = tomllib.loads(text)
    except tomllib.TOMLDecodeError as exc:
        told = str(exc)
        where = _POSITION.search(told)
        place = where.group(1) if where else "somewhere"
        raise ConfigError(
            f"{source}: {place}: {_POSITION.sub('', told)}",
            hint="the file is not valid TOML; strings need quotes, lists need brackets",
        ) from exc
    return found


def dumps(data: Mapping[str, Any]) -> str:
    """Write a mapping as TOML; the same mapping always gives the same bytes.

    Keys keep their order. Mappings become ``[tables]``, lists of mappings ``[[arrays of tables]]``;
    inside the latter everything is written inline, so that one entry stays one paragraph.

    Raises:
        TypeError: a value is of a type TOML does not have.
    """
    lines: list[str] = []
    _table(lines, data, prefix="")
    return "\n".join(lines).strip("\n") + "\n"


def _table(lines: list[str], data: Mapping[str, Any], *, prefix: str) -> None:
    later: list[tuple[str, Any]] = []
    for key, value in data.items():
        if isinstance(value, Mapping) or _is_tables(value):
            later.append((key, value))
        else:
            lines.append(f"{_key(key)} = {_value(value)}")
    for key, value in later:
        path = f"{prefix}{_key(key)}"
        if isinstance(value, Mapping):
            # A table that holds nothing but tables needs no header of its own.
            if not value or any(not isinstance(v, Mapping) for v in value.values()):
                lines.extend(["", f"[{path}]"])
            _table(lines, value, prefix=f"{path}.")
            continue
        for entry in value:
            lines.extend(["", f"[[{path}]]"])
            lines.extend(f"{_key(k)} = {_value(v)}" for k, v in entry.items())


def _is_tables(value: object) -> bool:
    return isinstance(value, list | tuple) and bool(value) and isinstance(value[0], Mapping)


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, datetime.datetime | datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, Mapping):
        inside = ", ".join(f"{_key(k)} = {_value(v)}" for k, v in value.items())
        return f"{{ {inside} }}" if inside else "{}"
    if isinstance(value, Sequence):
        return _list([_value(item) for item in value])
    raise TypeError(f"TOML has no type for {type(value).__name__}")


def _list(items: list[str]) -> str:
    short = "[" + ", ".join(items) + "]"
    if len(short) <= 80:
        return short
    return "[\n" + "".join(f"    {item},\n" for item in items) + "]"


def _key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _string(key)


def _string(text: str) -> str:
    parts = []
    for char in text:
        if char in _ESCAPES:
            parts.append(_ESCAPES[char])
        elif ord(char) < 0x20 or ord(char) == 0x7F:
            parts.append(f"\\u{ord(char):04x}")
        else:
            parts.append(char)
    return '"' + "".join(parts) + '"'
