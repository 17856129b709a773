"""The unread part of a package, as few directories and files as possible, and their patterns."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..layers.ignore import anchored
from ..layers.prune import is_metadata, is_top
from . import gpu_files
from .result import UnreadFiles

LEAST = 500_000
"""Bytes below which no pattern is proposed: a list that nobody reads helps nobody."""
SMALL = "each is small"
"""Why no pattern is proposed for what is below that."""
PROGRAMS = "programs, which may only be looked for"
"""Why none is proposed for a package's programs: torch does not import without one it may run."""
_PROGRAM = re.compile(r".+/bin/(?!test_)[^/]+")
_TEST = "test_"
_CACHE = "__pycache__"


@dataclass(frozen=True, kw_only=True)
class ReadFile:
    """One file of a package, after the smoke test."""

    path: str
    """Its path, relative to ``site-packages``."""
    size: int
    """Its length in bytes."""
    read: bool
    """Whether it was read."""


@dataclass
class Unit:
    """Files that stay or go together: a module is left out with its bytecode."""

    path: str
    """The path of the file that a pattern can name."""
    files: int = 0
    """Number of files."""
    size: int = 0
    """Their lengths in bytes."""
    read: bool = False
    """Whether any of them was read: of a module with bytecode, the source is not."""


def units(files: Iterable[ReadFile]) -> list[Unit]:
    """Return the files of a package, each module with its bytecode."""
    made: dict[str, Unit] = {}
    for file in files:
        path = _named_by(file.path)
        unit = made.setdefault(path, Unit(path))
        unit.files += 1
        unit.size += file.size
        unit.read |= file.read
    return list(made.values())


def _named_by(path: str) -> str:
    folder, name = posixpath.split(path)
    if posixpath.basename(folder) != _CACHE or not name.endswith(".pyc"):
        return path
    return posixpath.join(posixpath.dirname(folder), name.partition(".")[0] + ".py")


def unread(package: str, made: Sequence[Unit], *, gpus: int) -> Iterator[UnreadFiles]:
    """Yield unread topmost directories and files; without a GPU, set files for GPUs apart."""
    apart = _set_apart(package, made, gpus=gpus)
    small: list[Unit] = []
    for path, members in _left_out(made, apart).items():
        if sum(unit.size for unit in members) < LEAST or not path.isprintable():
            small += members
            continue
        pattern = f"{package}:{_pattern(path)}"
        yield _unread(package, members, path=path, pattern=pattern)
    for reason, members in {SMALL: small, **apart}.items():
        if members:
            yield _unread(package, members, reason=reason)


def _set_apart(package: str, made: Sequence[Unit], *, gpus: int) -> Mapping[str, list[Unit]]:
    apart: dict[str, list[Unit]] = {PROGRAMS: [], gpu_files.REASON: []}
    for unit in made:
        if unit.read or is_metadata(unit.path):
            continue
        if not gpus and gpu_files.needs_gpu(package, unit.path):
            apart[gpu_files.REASON].append(unit)
        elif _PROGRAM.fullmatch(unit.path):
            apart[PROGRAMS].append(unit)
    return apart


def _left_out(
    made: Sequence[Unit], apart: Mapping[str, Sequence[Unit]]
) -> Mapping[str, Sequence[Unit]]:
    kept = {unit.path for unit in made if unit.read or is_metadata(unit.path)}
    kept.update(unit.path for units_apart in apart.values() for unit in units_apart)
    left = [unit for unit in made if unit.path not in kept and not is_top(unit.path)]
    return _groups(left, _holding(kept) | _tests_in(kept), {unit.path for unit in made})


def _unread(
    package: str,
    members: Sequence[Unit],
    *,
    path: str = "",
    pattern: str | None = None,
    reason: str = "",
) -> UnreadFiles:
    return UnreadFiles(
        package=package,
        path=path,
        files=sum(unit.files for unit in members),
        bytes=sum(unit.size for unit in members),
        pattern=pattern,
        reason=reason,
    )


def _holding(paths: Iterable[str]) -> set[str]:
    return {folder for path in paths for folder in _above(path)}


def _tests_in(paths: Iterable[str]) -> set[str]:
    found = set()
    for path in paths:
        for part in (*_above(path), path):
            folder, _, name = part.rpartition("/")
            if name.startswith(_TEST):
                found.add(f"{folder}/{_TEST}*")
    return found


def _above(path: str) -> list[str]:
    parts = path.split("/")[:-1]
    return ["/".join(parts[:count]) for count in range(1, len(parts) + 1)]


def _groups(
    left: Iterable[Unit], kept: set[str], everything: set[str]
) -> Mapping[str, Sequence[Unit]]:
    groups: dict[str, list[Unit]] = {}
    for unit in left:
        groups.setdefault(_group(unit.path, kept, everything), []).append(unit)
    return groups


def _group(path: str, kept: set[str], everything: set[str]) -> str:
    """Return the topmost directory of which nothing was read, with a slash; else the file.

    Files called ``test_...`` go together if no such file stays: compiled tests lie beside programs.
    The top of a package stays, so that what imports it fails with the name of what is missing:
    ``sympy/*/`` stands for all directories in it.
    """
    folders = _above(path)
    for folder in folders:
        if folder in kept:
            continue
        if "/" not in folder and f"{folder}/__init__.py" in everything:
            return f"{folder}/*/" if len(folders) > 1 else path
        return f"{folder}/"
    folder, _, name = path.rpartition("/")
    tests = f"{folder}/{_TEST}*"
    return tests if folder and name.startswith(_TEST) and tests not in kept else path


def _pattern(path: str) -> str:
    for wildcard in ("/*/", f"/{_TEST}*"):
        if path.endswith(wildcard):
            return anchored(path.removesuffix(wildcard)) + wildcard
    return anchored(path[:-1]) + "/" if path.endswith("/") else anchored(path)
