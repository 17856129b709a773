"""Checks for single values of the settings: each returns the value to use, or raises ValueError.

They are passed to :meth:`stager.config.table.Table.take`, which knows the key path and writes
the message.
"""

from __future__ import annotations

import datetime
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from bundle.protocol.enumerations import TextEnum

T = TypeVar("T")
EnumT = TypeVar("EnumT", bound=TextEnum)

VARIABLE = r"[A-Za-z_][A-Za-z0-9_]*"
"""The name of an environment variable, as a regular expression."""

MOST = 65_535
"""Most nodes, CPUs, ranks, restarts or seconds: Slurm has 16 bits for the CPUs of a task."""
COUNT = f"a whole number from 1 to {MOST}"
"""The values that ``whole(1)`` allows, in words."""

COMMAND = "a command and its arguments, with closed quotes"
"""The values that ``command`` allows, in words."""

# The forms sbatch(1) documents for --time.
_TIME = re.compile(r"\d+|\d+:\d+|\d+:\d+:\d+|\d+-\d+|\d+-\d+:\d+|\d+-\d+:\d+:\d+")
_NODE_RANGE = re.compile(r"(\d{1,6})(?::(\d{1,6}))?")
_TORCH = re.compile(r"none|cpu|xpu|cu\d{2,3}|rocm\d+(\.\d+)*")
_INTERFACE = re.compile(r"[^\s/,=^]{1,15}")  # IFNAMSIZ is 16 with the closing zero byte


def text(value: object) -> str:
    """Any string but the empty one."""
    if not isinstance(value, str) or not value:
        raise ValueError
    return value


def word(value: object) -> str:
    """A string without white space."""
    string = text(value)
    if re.search(r"\s", string):
        raise ValueError
    return string


def texts(value: object) -> tuple[str, ...]:
    """A list of strings that are not empty."""
    return each(text)(value)


def each(check: Callable[[object], T]) -> Callable[[object], tuple[T, ...]]:
    """A list whose every item passes a check."""

    def listed(value: object) -> tuple[T, ...]:
        if not isinstance(value, list):
            raise ValueError
        return tuple(check(item) for item in value)

    return listed


def matching(pattern: str) -> Callable[[object], str]:
    """A string that a regular expression matches as a whole."""
    compiled = re.compile(pattern)

    def matched(value: object) -> str:
        return _full_match(compiled, value)

    return matched


def _full_match(pattern: re.Pattern[str], value: object) -> str:
    string = text(value)
    if not pattern.fullmatch(string):
        raise ValueError
    return string


def member_of(kind: type[EnumT]) -> Callable[[object], EnumT]:
    """A word of an enumeration."""

    def chosen(value: object) -> EnumT:
        return kind(text(value))

    return chosen


def boolean(value: object) -> bool:
    """Either true or false."""
    if not isinstance(value, bool):
        raise ValueError
    return value


def command(value: object) -> tuple[str, ...]:
    """A command as a shell would split it; no shell runs it."""
    string = text(value)
    argv = tuple(shlex.split(string))
    if not argv or not argv[0] or "\0" in string:
        raise ValueError
    return argv


def whole(least: int) -> Callable[[object], int]:
    """A whole number from ``least`` to ``MOST``; true and false are not numbers."""

    def number(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError
        if not least <= value <= MOST:
            raise ValueError
        return value

    return number


def whole_or_auto(least: int) -> Callable[[object], int | None]:
    """A whole number, or ``auto``, which becomes None."""

    def number(value: object) -> int | None:
        if value == "auto":
            return None
        return whole(least)(value)

    return number


def node_range(value: object) -> tuple[int, int]:
    """A number of nodes, or fewest and most as ``MIN:MAX``; the same twice for a fixed number."""
    if not isinstance(value, str):
        count = whole(1)(value)
        return count, count
    match = _NODE_RANGE.fullmatch(value)
    if not match:
        raise ValueError
    least, most = int(match[1]), int(match[2] or match[1])
    if not 1 <= least <= most <= MOST:
        raise ValueError
    return least, most


def gpus(value: object) -> str:
    """GPUs of one node: a number, or a type and a number, as Slurm's --gpus-per-node has them."""
    if isinstance(value, int):
        return str(whole(1)(value))
    return matching(r"([\w.-]+:)?[1-9]\d{0,4}")(value)


def mount(value: object) -> str:
    """A place on the node and a place in the container, as ``SOURCE:TARGET[:FLAGS]``."""
    return matching(r"[^\s:,]+:[^\s:,]+(:[^\s:,]+)?")(value)


def path(root: Path) -> Callable[[object], Path]:
    """A path, made absolute: ``~`` is the home directory, others start at ``root``."""

    def absolute(value: object) -> Path:
        try:
            expanded = Path(text(value)).expanduser()
        except RuntimeError as exc:  # no such user
            raise ValueError from exc
        return Path(*(root / expanded).parts)

    return absolute


def path_or_false(root: Path) -> Callable[[object], Path | None]:
    """A path, or false, which becomes None."""

    def absolute(value: object) -> Path | None:
        if value is False:
            return None
        return path(root)(value)

    return absolute


def node_path(value: object) -> str:
    """``auto``, or a path that means the same wherever a process on the node starts."""
    string = text(value)
    if string != "auto" and not string.startswith(("/", "$")):
        raise ValueError
    return string


def torch_backend(value: object) -> str | None:
    """The name of one of PyTorch's indexes; ``none`` becomes None."""
    backend = _full_match(_TORCH, value)
    if backend == "none":
        return None
    return backend


def slurm_time(value: object) -> str:
    """A time limit in one of Slurm's forms; a TOML time and a number of minutes are one too."""
    if isinstance(value, datetime.time) and not value.microsecond:
        return value.isoformat()
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return str(value)
    return _full_match(_TIME, value)


def node_list(value: object) -> str:
    """Nodes in Slurm's notation, as one string or a list of them."""
    if isinstance(value, list) and value:
        return ",".join(word(item) for item in value)
    return word(value)


def interface(value: object) -> str | tuple[tuple[str, str], ...]:
    """One network interface for all nodes, or one for each pattern of node names."""
    if not isinstance(value, dict):
        return interface_name(value)
    if not value:
        raise ValueError
    return tuple((word(nodes), interface_name(name)) for nodes, name in value.items())


def interface_name(value: object) -> str:
    """The name of a network interface, or ``auto``."""
    return _full_match(_INTERFACE, value)
