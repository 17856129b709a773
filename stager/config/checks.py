"""Checks of single values of the settings: each returns the value to use, or raises ValueError.

A check that knows more about what is wrong raises :class:`RefusedValue`.
"""

from __future__ import annotations

import datetime
import re
import shlex
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from bundle.protocol.dataclass import dataclass
from bundle.protocol.enumerations import TextEnum

S = TypeVar("S")
T = TypeVar("T")
Schema = Mapping[str, Any]  # the values that a check allows, as JSON Schema says it
T_co = TypeVar("T_co", covariant=True)
EnumT = TypeVar("EnumT", bound=TextEnum)

VARIABLE = r"[A-Za-z_][A-Za-z0-9_]*"  # the name of an environment variable, as a regular expression

MOST = 65_535
"""Most nodes, CPUs, ranks, restarts or seconds: Slurm has 16 bits for the CPUs of a task."""

COUNT = f"a whole number from 1 to {MOST}"

_GPUS = r"(gpu:)?([\w.-]+:)?[1-9]\d{0,4}"
_SIZE = r"(\d{1,9}(?:\.\d{1,3})?) ?([kKMGT]?)B"
# The forms sbatch(1) documents for --time.
_TIME = r"UNLIMITED|INFINITE|\d+|\d+:\d+|\d+:\d+:\d+|\d+-\d+|\d+-\d+:\d+|\d+-\d+:\d+:\d+"
_YEAR = 366 * 86_400  # seconds; no job is silent for longer
_INTERFACE = r"[^\s/,=^]{1,15}"  # IFNAMSIZ is 16 with the closing zero byte


class RefusedValue(ValueError):
    """Pairs of a place in a value as it follows its key (``[2]``, ``.NAME``), and what is wrong."""

    def __init__(self, *problems: tuple[str, str]) -> None:
        super().__init__("; ".join(problem for _, problem in problems))
        self.problems = problems


@dataclass(frozen=True, kw_only=True)
class Check(Generic[T_co]):
    """A check, and the values that it allows as JSON Schema says it, and in words."""

    read: Callable[[object], T_co]
    schema: Schema
    item: Callable[[object], object] | None = None
    """The check of an item of a list."""
    allowed: str = ""
    """Empty where the setting has words of its own."""

    def __call__(self, value: object) -> T_co:
        """Return the value to use."""
        return self.read(value)


def check(allowed: str = "", /, **schema: object) -> Callable[[Callable[[object], T]], Check[T]]:
    """Make a check of a function, with what it allows in words and as JSON Schema."""

    def make(read: Callable[[object], T]) -> Check[T]:
        return Check(read=read, schema=schema, allowed=allowed)

    return make


def read_each(items: Iterable[tuple[str, S]], read: Callable[[S], T]) -> tuple[T, ...]:
    """Return what is read of each item, all of whose problems are named with their places."""
    values: list[T] = []
    problems: list[tuple[str, str]] = []
    for place, item in items:
        try:
            values.append(read(item))
        except ValueError as exc:
            problems.append((place, str(exc)))
    if problems:
        raise RefusedValue(*problems)
    return tuple(values)


def get_schema(check: Callable[[object], object]) -> Schema:
    """Return what a check allows as JSON Schema; anything, for a plain function."""
    return check.schema if isinstance(check, Check) else {}


def _either(*schemas: Schema) -> dict[str, object]:
    return {"anyOf": list(schemas)}


@check(type="string", minLength=1)
def text(value: object) -> str:
    """Any string but the empty one."""
    if not isinstance(value, str) or not value:
        raise ValueError
    return value


def _full_match(pattern: str, value: object) -> str:
    string = text(value)
    if not re.fullmatch(pattern, string):
        raise ValueError
    return string


def make_pattern_check(pattern: str) -> Check[str]:
    """A string that a regular expression matches as a whole."""
    return Check(
        read=lambda value: _full_match(pattern, value),
        schema={"type": "string", "pattern": f"^({pattern})$"},
    )


word = make_pattern_check(r"\S+")  # a string without white space


def make_list_check(item: Callable[[object], T]) -> Check[tuple[T, ...]]:
    """A list whose every item passes a check."""

    def read(value: object) -> tuple[T, ...]:
        if not isinstance(value, list):
            raise ValueError
        return tuple(item(one) for one in value)

    return Check(read=read, schema={"type": "array", "items": get_schema(item)}, item=item)


texts = replace(make_list_check(text), allowed="a list of strings")
"""A list of strings that are not empty."""


def make_enum_check(kind: type[EnumT]) -> Check[EnumT]:
    """A word of an enumeration."""
    words = [str(member) for member in kind]
    *first, last = (f'"{word}"' for word in words)
    allowed = f"{', '.join(first)} or {last}"
    return Check(read=lambda value: kind(text(value)), schema={"enum": words}, allowed=allowed)


def make_choice_check(words: Collection[str]) -> Check[str]:
    """One of some words."""
    check = make_pattern_check("|".join(map(re.escape, words)))
    return replace(check, schema={"enum": list(words)})


@check("true or false", type="boolean")
def boolean(value: object) -> bool:
    """Either true or false."""
    if not isinstance(value, bool):
        raise ValueError
    return value


@check("a command and its arguments, with closed quotes", type="string", minLength=1)
def command(value: object) -> tuple[str, ...]:
    """A command as a shell would split it; no shell runs it."""
    string = text(value)
    argv = tuple(shlex.split(string))
    if not argv or not argv[0] or "\0" in string:
        raise ValueError
    return argv


def _is_number(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def make_number_check(least: int) -> Check[int]:
    """A whole number from ``least`` to ``MOST``; true and false are not numbers."""

    def read(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MOST:
            raise ValueError
        return value

    schema = {"type": "integer", "minimum": least, "maximum": MOST}
    return Check(read=read, schema=schema, allowed=f"a whole number from {least} to {MOST}")


count = make_number_check(1)
_rank_word = make_choice_check(("auto", "gpu", "cpu"))


@check(f'{COUNT}, "auto", "gpu" or "cpu"', **_either(count.schema, _rank_word.schema))
def ranks(value: object) -> int | str:
    """A number of ranks, or one of torchrun's words for it."""
    return _rank_word(value) if isinstance(value, str) else count(value)


@check(f'{COUNT}, or "auto"', **_either(count.schema, {"const": "auto"}))
def count_or_auto(value: object) -> int | None:
    """A number, or ``auto``, which becomes None."""
    return None if value == "auto" else count(value)


@check(
    f'{COUNT}, or "MIN:MAX" in quotes',
    **_either(count.schema, {"type": "string", "pattern": r"^\d{1,6}([:-]\d{1,6})?$"}),
)
def node_range(value: object) -> tuple[int, int]:
    """A number of nodes, twice, or fewest and most as ``MIN:MAX`` or Slurm's ``MIN-MAX``."""
    if not isinstance(value, str):
        return count(value), count(value)
    match = re.fullmatch(r"(\d{1,6})(?:[:-](\d{1,6}))?", value)
    least, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= least <= most <= MOST:
        raise ValueError
    return least, most


@check(
    f'{COUNT}, or "TYPE:NUMBER", also several with commas',
    **_either(count.schema, {"type": "string", "pattern": f"^{_GPUS}(,{_GPUS})*$"}),
)
def gpus(value: object) -> str:
    """GPUs of one node: a number, or types and numbers, as Slurm's --gres has them without gpu:."""
    if isinstance(value, int):
        return str(count(value))
    return _full_match(f"{_GPUS}(,{_GPUS})*", value).replace("gpu:", "")


@check(
    'memory on each node, for example "64G"; 0 for all of it',
    **_either(
        {"type": "integer", "minimum": 0},
        {"type": "string", "pattern": "^(0|[1-9][0-9]{0,11})([KMGTkmgt][Bb]?)?$"},
    ),
)
def memory(value: object) -> str:
    """Memory of one node as every version of Slurm reads it: ``64GB`` becomes ``64G``."""
    if _is_number(value, 0):
        return str(value)
    return _full_match(r"(0|[1-9]\d{0,11})([KMGTkmgt][Bb]?)?", value).rstrip("Bb")


@check(
    'a size, for example "500MB" or "1.5TB"; 0 for none',
    **_either({"type": "integer", "const": 0}, {"type": "string", "pattern": f"^{_SIZE}$"}),
)
def size(value: object) -> int:
    """A number of bytes with a unit, ``2GB``, or 0."""
    if value == 0 and not isinstance(value, bool):
        return 0
    words = _full_match(_SIZE, value).rstrip("B").strip()
    unit = " KMGT".find(words[-1].upper())
    return int(float(words[:-1] if unit > 0 else words) * 1000 ** max(0, unit))


mount = make_pattern_check(r"[^\s:,]+:[^\s:,]+(:[^\s:,]+)?")  # SOURCE:TARGET[:FLAGS]
node_path = make_pattern_check(r"auto|auto-memory|(/|\$)(.|\n)*")
"""``auto``, or a path that means the same wherever a process on the node starts."""


def variables(value: object) -> tuple[tuple[str, str], ...]:
    """A table of environment variables with their values; numbers become text."""
    if not isinstance(value, dict):
        raise ValueError
    for held in value.values():
        if isinstance(held, bool) or not isinstance(held, (str, int)):
            raise ValueError
    return tuple((_full_match(VARIABLE, name), str(held)) for name, held in value.items())


@check(
    'a time limit, for example "00:30:00", "1-12:00" or "UNLIMITED"',
    **_either(
        {"type": "integer", "minimum": 1},
        {"type": "string", "pattern": r"^([\d:-]+|UNLIMITED|INFINITE)$"},
    ),
)
def slurm_time(value: object) -> str:
    """A time limit in one of Slurm's forms; a TOML time and a number of minutes are one too."""
    if isinstance(value, datetime.time) and not value.microsecond:
        return value.isoformat()
    if _is_number(value, 1):
        return str(value)
    return _full_match(_TIME, value)


@check(
    'a time as for --time, for example "00:30:00"; 0 for never',
    **_either({"type": "integer", "minimum": 0}, {"type": "string", "pattern": r"^[\d:-]+$"}),
)
def seconds_or_never(value: object) -> float:
    """A time in one of Slurm's forms, where a number is minutes, as seconds; 0 for never."""
    if value == 0 and not isinstance(value, bool):
        return 0.0
    days, dash, rest = slurm_time(value).rpartition("-")
    fields = [int(part) for part in rest.split(":")]
    if not dash and len(fields) < 3:  # minutes, or minutes and seconds
        fields.insert(0, 0)
    hours, minutes, seconds = (*fields, 0, 0)[:3]
    total = int(days or 0) * 86_400 + hours * 3_600 + minutes * 60 + seconds
    if total > _YEAR:
        raise ValueError
    return float(total)


@check(**_either({"type": "string", "pattern": r"^\S+$"}, {"type": "array", "minItems": 1}))
def node_list(value: object) -> str:
    """Nodes in Slurm's notation, as one string or a list of them."""
    if isinstance(value, list) and value:
        return ",".join(word(item) for item in value)
    return word(value)


@check(**_either({"type": "string"}, {"type": "object", "minProperties": 1}))
def interface(value: object) -> str | tuple[tuple[str, str], ...]:
    """One network interface for all nodes (or ``auto``), or one for each pattern of node names."""
    if not isinstance(value, dict):
        return _full_match(_INTERFACE, value)
    if not value:
        raise ValueError
    return tuple((word(nodes), _full_match(_INTERFACE, name)) for nodes, name in value.items())


def output(value: object) -> str:
    """The path or pattern of an output, inside the folder that a job runs in."""
    from bundle.results import patterns  # not before: the command line has no use for it

    path = text(value)
    if patterns.split_pattern(path) is None:
        raise RefusedValue(("", f"{path!r} lies outside the folder that a job runs in"))
    return path


outputs = replace(make_list_check(output), schema=texts.schema, allowed=texts.allowed)


def bundle_id(value: object) -> str:
    """A bundle's id or 12 or more of its first digits; other tools write ``sha256:`` before it."""
    digits = text(value).lower().removeprefix("sha256:")
    return _full_match(r"[0-9a-f]{12,64}", digits)


# --- Checks of paths: each is made for the folder that relative paths start at -------------------


def path(root: Path) -> Check[Path]:
    """A path, made absolute: ``~`` is the home directory, others start at ``root``."""

    @check(**text.schema)
    def read(value: object) -> Path:
        try:
            expanded = Path(text(value)).expanduser()
        except RuntimeError as exc:  # no such user
            raise ValueError from exc
        return Path(*(root / expanded).parts)

    return read


def path_or_false(root: Path) -> Check[Path | None]:
    """A path, or false, which becomes None."""

    @check(**_either(text.schema, {"const": False}))
    def read(value: object) -> Path | None:
        return None if value is False else path(root)(value)

    return read


def paths(root: Path) -> Check[tuple[Path, ...]]:
    """A list of paths."""
    return make_list_check(path(root))


def places(root: Path) -> Check[tuple[str, ...]]:
    """A list of URLs, and of paths that become absolute."""

    def read(value: object) -> str:
        return word(value) if "://" in text(value) else str(path(root)(value))

    return make_list_check(read)
