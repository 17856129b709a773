"""The shared libraries that a Python needs: those that go with it, those left to the nodes."""

from __future__ import annotations

import os
import re
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..core import elf
from ..core.errors import ConfigError
from ..layers.interpreter import RunPath

_OF_GLIBC = re.compile(
    r"(ld-linux.*|libc|libm|libmvec|libdl|libpthread|librt|libutil|libresolv|libanl)\.so\.\d+"
)
"""The libraries of every glibc."""
_ORIGIN = re.compile(r"\$ORIGIN\b|\$\{ORIGIN\}")


@dataclass(frozen=True, kw_only=True)
class Libraries:
    """The shared libraries that a Python needs, besides those of glibc."""

    own: tuple[str, ...]
    """Their paths in its folder, for those that lie there."""
    foreign: Mapping[str, Sequence[str]]
    """Names of those that are left to the nodes, with the files that need each."""
    run_paths: Mapping[str, RunPath]
    """What must be changed so that those in its folder are found elsewhere, by file."""
    glibc: tuple[int, int]
    """The oldest glibc with which all of it runs."""


@dataclass(kw_only=True)
class _Walk:
    """The findings so far."""

    prefix: Path
    own: dict[str, str] = field(default_factory=dict)
    """Paths of the libraries in the folder, by their names."""
    foreign: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    run_paths: dict[str, RunPath] = field(default_factory=dict)
    glibc: tuple[int, int] = (0, 0)


def libraries_of(prefix: Path, program: str, modules: Sequence[str]) -> Libraries:
    """Return the shared libraries that a Python and its extension modules need.

    Args:
        prefix: its folder, without links.
        program: its program, which loads libraries before any module does.
        modules: its extension modules.

    Raises:
        ConfigError: it finds its own libraries only in this place; all such files are named.
    """
    walk = _Walk(prefix=prefix)
    queue = deque([program, *modules])
    faults: list[str] = []
    while queue:
        path = queue.popleft()
        header = elf.read(prefix / path)
        if header is None:
            continue
        walk.glibc = max(walk.glibc, header.glibc)
        before = set(walk.own)
        if _needs_own(walk, path, header):
            faults += _make_relative(walk, path, header)
        queue.extend(walk.own[name] for name in walk.own if name not in before)
    if faults:
        raise ConfigError(
            f"environment.interpreter: the Python in {prefix} is not relocatable: it finds its "
            "libraries only in this place",
            hint="name one that can be moved, such as those of uv: uv python install",
            context=faults,
        )
    return Libraries(
        own=tuple(sorted(walk.own.values())),
        foreign={name: tuple(sorted(walk.foreign[name])) for name in sorted(walk.foreign)},
        run_paths=walk.run_paths,
        glibc=walk.glibc,
    )


def _needs_own(walk: _Walk, path: str, header: elf.Elf) -> bool:
    """Note each library that a file needs; return whether its run path must lead to one."""
    needs_own = False
    for name in header.needed:
        if _OF_GLIBC.fullmatch(name):
            continue
        found = _by_run_path(walk.prefix, path, header, name)
        if found:
            walk.own.setdefault(name, found)
            needs_own = True
        elif name not in walk.own:  # else what needs this file has loaded it
            walk.foreign[name].append(path.rpartition("/")[2])
    return needs_own


def _by_run_path(prefix: Path, path: str, header: elf.Elf, name: str) -> str:
    """Return the path in the folder at which the loader finds a library; empty for elsewhere."""
    for _, folder in _folders(prefix, path, header):
        if (folder / name).is_file():
            inside = folder.is_relative_to(prefix)
            return str(folder.relative_to(prefix) / name) if inside else ""
    return ""


def _folders(prefix: Path, path: str, header: elf.Elf) -> Iterator[tuple[str, Path]]:
    """Yield each entry of a run path, with the directory it means."""
    origin = str((prefix / path).parent)
    for entry in filter(None, header.run_path.split(":")):
        yield entry, Path(os.path.realpath(_ORIGIN.sub(lambda _: origin, entry)))


def _make_relative(walk: _Walk, path: str, header: elf.Elf) -> list[str]:
    """Note a run path that leads to the folder from wherever it is; return why there is none."""
    entries = []
    parent = (walk.prefix / path).parent
    for entry, folder in _folders(walk.prefix, path, header):
        if folder.is_relative_to(walk.prefix) and not _ORIGIN.search(entry):
            entries.append(f"$ORIGIN/{os.path.relpath(folder, parent)}")
        else:
            entries.append(entry)
    new = ":".join(dict.fromkeys(entries))
    old = header.run_path
    if new == old:
        return []
    if len(os.fsencode(new)) > len(os.fsencode(old)):
        return [f"{path}: its run path {old} has no room for {new}"]
    walk.run_paths[path] = RunPath(
        at=header.run_path_at, old=os.fsencode(old), new=os.fsencode(new)
    )
    return []
