"""The outputs of a job as its author writes them: paths and patterns below the run directory.

``*``, ``?`` and ``[...]`` match within one name, ``**`` stands for any number of directories, and
``.`` for everything. A name that begins with a dot is matched only by a pattern that does too, so
nobody asks for ``.ssh`` by accident.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase

Pattern = tuple[str, ...]  # the parts of an output's path or pattern; none for everything

_MAGIC = frozenset("*?[")
_ANY_DIRECTORIES = "**"


def split_pattern(output: str) -> Pattern | None:
    """Split an output into its parts; None if it could stand for something outside."""
    if not output or "\0" in output or output.startswith("/"):
        return None
    names = output.split("/")
    if ".." in names:
        return None
    parts = tuple(name for name in names if name not in ("", "."))
    # All that "**" matches at the end lies in what "*" matches.
    return (*parts[:-1], "*") if parts[-1:] == (_ANY_DIRECTORIES,) else parts


def is_wanted(name: str, outputs: Sequence[str]) -> bool:
    """Tell whether one of the outputs stands for a path."""
    parts = name.split("/")
    patterns = (split_pattern(output) for output in outputs)
    return any(_is_match(parts, pattern) for pattern in patterns if pattern is not None)


def expand_pattern(base: str, pattern: Pattern) -> set[str]:
    """Find the paths below ``base`` that match; a name that exists matches itself literally."""
    if not pattern:
        return set(_list_names(base, ""))
    literal = "/".join(pattern)
    if os.path.lexists(os.path.join(base, literal)):
        return {literal}
    prefixes = {""}
    for part in pattern:
        prefixes = {longer for prefix in prefixes for longer in _extend_prefix(base, prefix, part)}
    return {prefix[:-1] for prefix in prefixes}


def list_parents(name: str) -> Iterator[str]:
    """Yield the directories that a path lies in, from the outermost."""
    parts = name.split("/")
    return ("/".join(parts[:count]) for count in range(1, len(parts)))


def _extend_prefix(base: str, prefix: str, part: str) -> Iterable[str]:
    """Extend a prefix, empty or with a slash at its end, by one part of a pattern."""
    if part == _ANY_DIRECTORIES:
        return _list_directories(base, prefix)
    if _MAGIC.isdisjoint(part):
        return [f"{prefix}{part}/"] if os.path.lexists(os.path.join(base, prefix + part)) else []
    names = _list_names(base, prefix)
    return [f"{prefix}{name}/" for name in names if _is_part_match(name, part)]


def _list_directories(base: str, prefix: str) -> Iterator[str]:
    for folder, folders, _ in os.walk(os.path.join(base, prefix)):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield f"{os.path.relpath(folder, base)}/".removeprefix("./")


def _list_names(base: str, prefix: str) -> list[str]:
    with suppress(OSError):  # not a directory, or not readable: nothing in it can be an output
        return os.listdir(os.path.join(base, prefix))
    return []


def _is_part_match(name: str, part: str) -> bool:
    """Match one name with one part of a pattern; only a leading dot matches hidden names."""
    return fnmatchcase(name, part) and (part.startswith(".") or not name.startswith("."))


def _is_match(parts: Sequence[str], pattern: Pattern) -> bool:
    if not pattern:
        return len(parts) == 1
    if tuple(parts) == pattern:
        return True
    ends = {0}  # how many names the parts of the pattern so far may stand for
    for part in pattern:
        if part == _ANY_DIRECTORIES:
            for end, name in enumerate(parts):
                if end in ends and not name.startswith("."):
                    ends.add(end + 1)
        else:
            ends = {end + 1 for end in ends - {len(parts)} if _is_part_match(parts[end], part)}
    return len(parts) in ends
