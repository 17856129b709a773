"""TOML in and out; ``tomli-w`` would write a lock, which is under version control, otherwise."""

from __future__ import annotations

import datetime
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .errors import ConfigError
from .files import read_text

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found,unused-ignore]

Table = Mapping[str, object]  # a table as it stands in a file, unchecked

_BYTE_ORDER_MARK = "\ufeff"  # some editors write it; the standard's parser refuses it
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_POSITION = re.compile(r"\s*\(at (line \d+, column \d+|end of document)\)")


def read(path: Path) -> dict[str, Any]:
    """Parse a TOML file."""
    try:
        return loads(read_text(path), path)
    except OSError as exc:
        raise ConfigError(
            f"cannot read {path}: {exc.strerror or exc}", hint="check the path and its permissions"
        ) from exc
    except UnicodeDecodeError as exc:
        raise ConfigError(
            f"{path}: byte {exc.start} is not UTF-8", hint="TOML files are written in UTF-8"
        ) from exc


def loads(text: str, source: Path) -> dict[str, Any]:
    """Parse TOML text; ``source`` is the file it came from, for the message."""
    try:
        data: dict[str, Any] = tomllib.loads(text.removeprefix(_BYTE_ORDER_MARK))
    # Also a number of more than 4300 digits, and lists that lie too deep within each other.
    except (ValueError, RecursionError) as exc:
        position = _POSITION.search(str(exc))
        place = f"{position[1]}: " if position else ""
        raise ConfigError(
            f"{source}: {place}{_POSITION.sub('', str(exc))}",
            hint="strings need quotes, lists brackets, and a table's keys are below its name",
        ) from exc
    return data


def get_table(data: Table, *keys: str) -> Table:
    """Return the table at a path of keys; an empty one where there is none."""
    value: object = data
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value if isinstance(value, Mapping) else {}


def get_list(data: Table, key: str) -> list[Any]:
    """Return the list at a key; an empty one where there is none."""
    value = data.get(key)
    return value if isinstance(value, list) else []


def dumps(data: Table) -> str:
    """Write a mapping as TOML; the same mapping always gives the same bytes."""
    return "\n".join(_table_lines(data, "")).strip("\n") + "\n"


def dump_inline(value: object) -> str:
    """Write a value as it may stand behind a key; a long list has several lines."""
    if isinstance(value, str | int | float):  # as in JSON, but for the one character
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, Mapping):
        return f"{{ {', '.join(_key_lines(value))} }}" if value else "{}"
    if isinstance(value, Sequence):
        items = [dump_inline(one) for one in value]
        short = f"[{', '.join(items)}]"
        if len(short) <= 80:
            return short
        return "[\n" + "".join(f"    {item},\n" for item in items) + "]"
    raise TypeError(f"TOML has no type for {type(value).__name__}")


def _table_lines(data: Table, prefix: str) -> Iterator[str]:
    plain = {key: value for key, value in data.items() if not _has_header(value)}
    yield from _key_lines(plain)
    for key, value in data.items():
        if key in plain:
            continue
        path = f"{prefix}{_key(key)}"
        if isinstance(value, list | tuple):
            for entry in value:
                yield from ("", f"[[{path}]]", *_key_lines(entry))
            continue
        table = get_table(data, key)
        if not table or not all(isinstance(one, Mapping) for one in table.values()):
            yield from ("", f"[{path}]")
        yield from _table_lines(table, f"{path}.")


def _key_lines(data: Table) -> list[str]:
    return [f"{_key(key)} = {dump_inline(value)}" for key, value in data.items()]


def _has_header(value: object) -> bool:
    first = value[0] if isinstance(value, list | tuple) and value else value
    return isinstance(first, Mapping)


def _key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else dump_inline(key)
