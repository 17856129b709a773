"""Checks for single values of the settings: each returns the value to use, or raises ValueError.

They are passed to :meth:`stager.config.table.Table.take`, which knows the key path and writes
the message.
"""

from __future__ import annotations

import datetime
import re
import shlex
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from bundle.node.node_root import AUTO, AUTO_WITH_MEMORY
from bundle.protocol.enumerations import TextEnum

T = TypeVar("T")
R_co = TypeVar("R_co", covariant=True)
EnumT = TypeVar("EnumT", bound=TextEnum)

VARIABLE = r"[A-Za-z_][A-Za-z0-9_]*"
"""The name of an environment variable, as a regular expression."""

MOST = 65_535
"""Most nodes, CPUs, ranks, restarts or seconds: Slurm has 16 bits for the CPUs of a task."""
COUNT = f"a whole number from 1 to {MOST}"
"""The values that ``whole(1)`` allows, in words."""

MEMORY = 'memory on each node, for example "64G"; 0 for all of it'
"""The values that ``memory`` allows, in words."""

SIZE = 'a size, for example "500MB" or "1.5TB"; 0 for none'
"""The values that ``size`` allows, in words."""

GPUS = f'{COUNT}, or "TYPE:NUMBER", also several with commas'
"""The values that ``gpus`` allows, in words."""

RANKS = f'{COUNT}, "auto", "gpu" or "cpu"'
"""The values that ``ranks`` allows, in words."""

TIME = 'a time limit, for example "00:30:00", "1-12:00" or "UNLIMITED"'
"""The values that ``slurm_time`` allows, in words."""

COMMAND = "a command and its arguments, with closed quotes"
"""The values that ``command`` allows, in words."""

# The forms sbatch(1) documents for --time.
_TIME = re.compile(
    r"UNLIMITED|INFINITE|\d+|\d+:\d+|\d+:\d+:\d+|\d+-\d+|\d+-\d+:\d+|\d+-\d+:\d+:\d+"
)
_NODE_RANGE = re.compile(r"(\d{1,6})(?:[:-](\d{1,6}))?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_TORCH = re.compile(r"none|auto|cpu|xpu|cu\d{2,3}|rocm\d+(\.\d+)*")
_INTERFACE = re.compile(r"[^\s/,=^]{1,15}")  # IFNAMSIZ is 16 with the closing zero byte


@dataclass(frozen=True, kw_only=True)
class Check(Generic[R_co]):
    """A check, and the values that it allows as JSON Schema says it."""

    read: Callable[[object], R_co]
    """Returns the value to use, or raises ValueError."""
    schema: Mapping[str, Any]
    """The allowed values: for a value that is written in TOML, and no narrower than the check."""

    def __call__(self, value: object) -> R_co:
        """Return the value to use.

        Raises:
            ValueError: it is not allowed.
        """
        return self.read(value)


def described(**schema: object) -> Callable[[Callable[[object], T]], Check[T]]:
    """Make a check of a function, with the JSON Schema of what it allows."""

    def made(read: Callable[[object], T]) -> Check[T]:
        return Check(read=read, schema=schema)

    return made


def schema_of(check: Callable[[object], object]) -> Mapping[str, Any]:
    """Return what a check allows as JSON Schema; anything, for a plain function."""
    return check.schema if isinstance(check, Check) else {}


def _either(*schemas: Mapping[str, Any]) -> dict[str, object]:
    return {"anyOf": list(schemas)}


@described(type="string", minLength=1)
def text(value: object) -> str:
    """Any string but the empty one."""
    if not isinstance(value, str) or not value:
        raise ValueError
    return value


@described(type="string", pattern=r"^\S+$")
def word(value: object) -> str:
    """A string without white space."""
    string = text(value)
    if re.search(r"\s", string):
        raise ValueError
    return string


@described(type="array", items={"type": ["string", "object"]})
def listed(value: object) -> tuple[object, ...]:
    """A list of strings and tables, which are checked one by one."""
    if not isinstance(value, list):
        raise ValueError
    return tuple(value)


def each(check: Callable[[object], T]) -> Check[tuple[T, ...]]:
    """A list whose every item passes a check."""

    @described(type="array", items=schema_of(check))
    def listed(value: object) -> tuple[T, ...]:
        if not isinstance(value, list):
            raise ValueError
        return tuple(check(item) for item in value)

    return listed


texts = each(text)
"""A list of strings that are not empty."""


def matching(pattern: str) -> Check[str]:
    """A string that a regular expression matches as a whole."""
    compiled = re.compile(pattern)

    @described(type="string", pattern=f"^({pattern})$")
    def matched(value: object) -> str:
        return _full_match(compiled, value)

    return matched


def _full_match(pattern: re.Pattern[str], value: object) -> str:
    string = text(value)
    if not pattern.fullmatch(string):
        raise ValueError
    return string


def member_of(kind: type[EnumT]) -> Check[EnumT]:
    """A word of an enumeration."""

    @described(enum=[str(word) for word in kind])
    def chosen(value: object) -> EnumT:
        return kind(text(value))

    return chosen


@described(type="boolean")
def boolean(value: object) -> bool:
    """Either true or false."""
    if not isinstance(value, bool):
        raise ValueError
    return value


@described(type="string", minLength=1)
def command(value: object) -> tuple[str, ...]:
    """A command as a shell would split it; no shell runs it."""
    string = text(value)
    argv = tuple(shlex.split(string))
    if not argv or not argv[0] or "\0" in string:
        raise ValueError
    return argv


def whole(least: int) -> Check[int]:
    """A whole number from ``least`` to ``MOST``; true and false are not numbers."""

    @described(type="integer", minimum=least, maximum=MOST)
    def number(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError
        if not least <= value <= MOST:
            raise ValueError
        return value

    return number


@described(
    **_either({"type": "integer", "minimum": 1, "maximum": MOST}, {"enum": ["auto", "gpu", "cpu"]})
)
def ranks(value: object) -> int | str:
    """A number of ranks, or one of torchrun's words for it."""
    if value in ("auto", "gpu", "cpu"):
        return str(value)
    return whole(1)(value)


def whole_or_auto(least: int) -> Check[int | None]:
    """A whole number, or ``auto``, which becomes None."""

    @described(**_either(whole(least).schema, {"const": "auto"}))
    def number(value: object) -> int | None:
        if value == "auto":
            return None
        return whole(least)(value)

    return number


@described(
    **_either(
        {"type": "integer", "minimum": 1, "maximum": MOST},
        {"type": "string", "pattern": r"^\d{1,6}([:-]\d{1,6})?$"},
    )
)
def node_range(value: object) -> tuple[int, int]:
    """A number of nodes, twice, or fewest and most as ``MIN:MAX`` or Slurm's ``MIN-MAX``."""
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


_GPUS = r"(gpu:)?([\w.-]+:)?[1-9]\d{0,4}"


@described(
    **_either(
        {"type": "integer", "minimum": 1, "maximum": MOST},
        {"type": "string", "pattern": f"^{_GPUS}(,{_GPUS})*$"},
    )
)
def gpus(value: object) -> str:
    """GPUs of one node: a number, or types and numbers, as Slurm's --gres has them without gpu:."""
    if isinstance(value, int):
        return str(whole(1)(value))
    return matching(f"{_GPUS}(,{_GPUS})*")(value).replace("gpu:", "")


@described(
    **_either(
        {"type": "integer", "minimum": 0},
        {"type": "string", "pattern": "^(0|[1-9][0-9]{0,11})([KMGTkmgt][Bb]?)?$"},
    )
)
def memory(value: object) -> str:
    """Memory of one node as Slurm writes it: megabytes, a number with K, M, G or T, or 0 for all.

    ``64GB`` becomes ``64G``, which every version of Slurm reads.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return str(value)
    return matching(r"(0|[1-9]\d{0,11})([KMGTkmgt][Bb]?)?")(value).rstrip("Bb")


_SIZE = r"(\d{1,9}(?:\.\d{1,3})?) ?([kKMGT]?)B"


@described(**_either({"type": "integer", "const": 0}, {"type": "string", "pattern": f"^{_SIZE}$"}))
def size(value: object) -> int:
    """A number of bytes with a unit, ``2GB``, or 0."""
    if value == 0 and not isinstance(value, bool):
        return 0
    words = matching(_SIZE)(value).rstrip("B").strip()
    unit = " KMGT".find(words[-1].upper())
    return int(float(words[:-1] if unit > 0 else words) * 1000 ** max(0, unit))


@described(type="string", pattern=r"^[^\s:,]+:[^\s:,]+(:[^\s:,]+)?$")
def mount(value: object) -> str:
    """A place on the node and a place in the container, as ``SOURCE:TARGET[:FLAGS]``."""
    return matching(r"[^\s:,]+:[^\s:,]+(:[^\s:,]+)?")(value)


def path(root: Path) -> Check[Path]:
    """A path, made absolute: ``~`` is the home directory, others start at ``root``."""

    @described(type="string", minLength=1)
    def absolute(value: object) -> Path:
        try:
            expanded = Path(text(value)).expanduser()
        except RuntimeError as exc:  # no such user
            raise ValueError from exc
        return Path(*(root / expanded).parts)

    return absolute


def path_or_false(root: Path) -> Check[Path | None]:
    """A path, or false, which becomes None."""

    @described(**_either({"type": "string", "minLength": 1}, {"const": False}))
    def absolute(value: object) -> Path | None:
        if value is False:
            return None
        return path(root)(value)

    return absolute


@described(type="string", pattern="^(auto$|auto-memory$|/|\\$)")
def node_path(value: object) -> str:
    """``auto``, or a path that means the same wherever a process on the node starts."""
    string = text(value)
    if string not in (AUTO, AUTO_WITH_MEMORY) and not string.startswith(("/", "$")):
        raise ValueError
    return string


def place(root: Path) -> Callable[[object], str]:
    """A URL, or a path that starts at a folder and becomes absolute."""
    local = path(root)

    def checked(value: object) -> str:
        return word(value) if "://" in text(value) else str(local(value))

    return checked


def interpreter(root: Path, words: Collection[str]) -> Check[str]:
    """One of some words, or a path, which has a slash and becomes absolute."""

    @described(type="string", pattern=f"^({'|'.join(words)})$|/")
    def checked(value: object) -> str:
        string = text(value)
        if string in words:
            return string
        if "/" not in string:
            raise ValueError
        return str(path(root)(string))

    return checked


def variables(value: object) -> tuple[tuple[str, str], ...]:
    """A table of environment variables with their values; numbers become text."""
    if not isinstance(value, dict):
        raise ValueError
    pairs = []
    for name, held in value.items():
        if isinstance(held, bool) or not isinstance(held, (str, int)) or "\0" in str(held):
            raise ValueError
        pairs.append((_full_match(_VARIABLE, name), str(held)))
    return tuple(pairs)


@described(type="string", pattern=f"^({_TORCH.pattern})$")
def torch_backend(value: object) -> str | None:
    """The name of one of PyTorch's indexes, or ``auto``; ``none`` becomes None."""
    backend = _full_match(_TORCH, value)
    if backend == "none":
        return None
    return backend


@described(
    **_either(
        {"type": "integer", "minimum": 1},
        {"type": "string", "pattern": r"^([\d:-]+|UNLIMITED|INFINITE)$"},
    )
)
def slurm_time(value: object) -> str:
    """A time limit in one of Slurm's forms; a TOML time and a number of minutes are one too."""
    if isinstance(value, datetime.time) and not value.microsecond:
        return value.isoformat()
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return str(value)
    return _full_match(_TIME, value)


@described(**_either({"type": "string", "pattern": r"^\S+$"}, {"type": "array", "minItems": 1}))
def node_list(value: object) -> str:
    """Nodes in Slurm's notation, as one string or a list of them."""
    if isinstance(value, list) and value:
        return ",".join(word(item) for item in value)
    return word(value)


@described(**_either({"type": "string"}, {"type": "object", "minProperties": 1}))
def interface(value: object) -> str | tuple[tuple[str, str], ...]:
    """One network interface for all nodes, or one for each pattern of node names."""
    if not isinstance(value, dict):
        return interface_name(value)
    if not value:
        raise ValueError
    return tuple((word(nodes), interface_name(name)) for nodes, name in value.items())


@described(type="string", pattern=f"^{_INTERFACE.pattern}$")
def interface_name(value: object) -> str:
    """The name of a network interface, or ``auto``."""
    return _full_match(_INTERFACE, value)
