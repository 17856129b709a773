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
from ..layers.source import RunPath

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
    prefix: Path
    own: dict[str, str] = field(default_factory=dict)
    """Paths of the libraries in the folder, by their names."""
    foreign: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    run_paths: dict[str, RunPath] = field(default_factory=dict)
    glibc: tuple[int, int] = (0, 0)
    faults: list[str] = field(default_factory=list)
    """Why it cannot be moved."""


def libraries_of(prefix: Path, program: str, modules: Sequence[str]) -> Libraries:
    """Return the shared libraries that a Python and its extension modules need.

    Raises:
        ConfigError: it finds its own libraries only in this place; all such files are named.
    """
    walk = _Walk(prefix=prefix)
    queue = deque([program, *modules])
    while queue:
        path = queue.popleft()
        header = elf.read(prefix / path)
        if header is None:
            continue
        walk.glibc = max(walk.glibc, header.glibc)
        before = set(walk.own)
        if _needs_own(walk, path, header):
            _make_relative(walk, path, header)
        queue.extend(walk.own[name] for name in walk.own if name not in before)
    if walk.faults:
        raise ConfigError(
            f"environment.interpreter: the Python in {prefix} is not relocatable: it does not find "
            "its libraries in another place",
            hint="name one that can be moved, such as those of uv: uv python install",
            context=walk.faults,
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
    for needed in header.needed:
        name = needed.rpartition("/")[2]
        if _OF_GLIBC.fullmatch(name):
            continue
        found = _by_path if "/" in needed else _by_run_path
        place = found(walk.prefix, path, header, needed)
        if place:
            walk.own.setdefault(name, place)
            needs_own = needs_own or name == needed
        elif name not in walk.own:  # else what needs this file has loaded it
            walk.foreign[needed].append(path.rpartition("/")[2])
            if name.startswith("libpython3"):
                walk.faults.append(f"{path}: it finds {name} by LD_LIBRARY_PATH, or in the system")
        if needed.startswith(f"{walk.prefix}/"):
            walk.faults.append(f"{path}: it needs {needed}")
    return needs_own


def _by_path(prefix: Path, path: str, header: elf.Elf, needed: str) -> str:
    """Return the path in the folder of a library that is needed by its path; empty for elsewhere.

    Until 2025, a program of python-build-standalone needed ``$ORIGIN/../lib/libpython3.12.so.1.0``.
    """
    folder, _, name = _meant(prefix, path, needed).rpartition("/")
    place = Path(os.path.realpath(folder), name)
    inside = place.is_file() and place.is_relative_to(prefix)
    return str(place.relative_to(prefix)) if inside else ""


def _by_run_path(prefix: Path, path: str, header: elf.Elf, name: str) -> str:
    for _, folder in _folders(prefix, path, header):
        if (folder / name).is_file():
            inside = folder.is_relative_to(prefix)
            return str(folder.relative_to(prefix) / name) if inside else ""
    return ""


def _folders(prefix: Path, path: str, header: elf.Elf) -> Iterator[tuple[str, Path]]:
    for entry in filter(None, header.run_path.split(":")):
        yield entry, Path(os.path.realpath(_meant(prefix, path, entry)))


def _meant(prefix: Path, path: str, entry: str) -> str:
    """Replace ``$ORIGIN`` in an entry of a run path."""
    origin = str((prefix / path).parent)
    return _ORIGIN.sub(lambda _: origin, entry)


def _make_relative(walk: _Walk, path: str, header: elf.Elf) -> None:
    """Note a run path made relative to ``$ORIGIN``, or a fault if there is no room for it."""
    entries = []
    parent = (walk.prefix / path).parent
    for entry, folder in _folders(walk.prefix, path, header):
        if folder.is_relative_to(walk.prefix) and not _ORIGIN.search(entry):
            entries.append(f"$ORIGIN/{os.path.relpath(folder, parent)}")
        else:
            entries.append(entry)
    new = ":".join(dict.fromkeys(entries))
    old = header.run_path
    if len(os.fsencode(new)) > len(os.fsencode(old)):
        walk.faults.append(f"{path}: its run path {old} has no room for {new}")
    elif new != old:
        walk.run_paths[path] = RunPath(
            at=header.run_path_at, old=os.fsencode(old), new=os.fsencode(new)
        )
