"""The part of a ``uv.lock`` that a project takes; :mod:`stager.lock.uv_export` reads it.

An entry of ``environment.requirements`` is ``uv.lock``, ``uv.lock[extra1,extra2]`` or
``uv.lock:group1,group2``, as for ``pyproject.toml``; several may name the same lock. A group alone
stands for itself, and the group ``dev`` counts only where it is named.

A script (PEP 723) that was locked with ``uv lock --script`` has its lock beside it, and is alone.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from ..core import toml
from ..core.store import sha256_of
from . import tool_settings
from .requirement_line import expand_user
from .uv_project import index_urls, script_identity, script_settings, settings_around
from .uv_workspace import declared

ENTRY = re.compile(r"(?P<path>(.*/)?uv\.lock)(\[(?P<extras>.*)\]|:(?P<groups>.*))?")
NAME = "uv.lock"
_OF_SCRIPT = ".lock"


@dataclass(frozen=True, kw_only=True)
class UvLock:
    """The part of a ``uv.lock`` that a project takes."""

    file: Path
    """The lock."""
    project: Path
    """The folder of the project it is read for: a member of the workspace, or its root."""
    extras: tuple[str, ...] = ()
    """Extras of the project."""
    groups: tuple[str, ...] = ()
    """Dependency groups of the project."""
    dependencies: bool = True
    """True if the project's own dependencies count, and not only groups."""
    itself: bool = False
    """True if the project itself is installed as well."""
    script: Path | None = None
    """The script that the lock is of; None for a project."""

    @property
    def command(self) -> str:
        """Return the command that makes the lock again, as messages name it."""
        return f"uv lock --script {self.script.name}" if self.script else "uv lock"

    def identity(self, root: Path) -> list[object]:
        """Return all that determines the answer, except the content of local sources."""
        places = [os.path.relpath(path, root) for path in (self.file, self.project)]
        chosen = [self.extras, self.groups, self.dependencies, self.itself]
        if self.script:
            asks = script_identity(self.script)
        else:
            asks = declared(self.file.parent, self.project)
        return [sha256_of(self.file), places, chosen, asks]

    def local_sources(self) -> list[Path]:
        """Return the folders and files on this machine that the project's packages come from."""
        packages = _packages(self.file)
        found = set()
        for name in self._reached(packages):
            for package in packages.get(name, ()):
                for key in ("directory", "editable", "path"):
                    place = tool_settings.table(package, "source").get(key)
                    if isinstance(place, str):
                        found.add(Path(os.path.normpath(self.file.parent / place)))
        return sorted(found if self.itself or self.script else found - {self.project})

    @property
    def indexes(self) -> tuple[str, ...]:
        """Return the addresses of the project's named indexes, with uv's credentials."""
        tables = [script_settings(self.script)] if self.script else settings_around(self.project)
        return tuple(url for table in tables for url in index_urls(table))

    def direct(self) -> tuple[str, ...]:
        """Return the packages that the project or the script itself asks for."""
        if self.script:
            manifest = toml.read(self.file).get("manifest", {})
            return tuple(_names(manifest.get("requirements")))
        names: dict[str, None] = {}
        for package in _packages(self.file).get(self._root(), ()):
            for listed in self._listed(package):
                names.update(dict.fromkeys(_names(listed)))
        return tuple(names)

    def overridden(self) -> set[str]:
        """Return the packages that the lock has against what other packages ask for."""
        manifest = tool_settings.table(toml.read(self.file), "manifest")
        names = set()
        for key in ("overrides", "excludes", "dependency-metadata"):
            for entry in _items(manifest.get(key)):
                name = entry.get("name", "") if isinstance(entry, Mapping) else entry
                names.add(str(canonicalize_name(str(name))))
        return names

    def is_virtual(self) -> bool:
        """Return whether uv takes the project for one that is never installed itself."""
        entries = _packages(self.file).get(self._root(), ())
        return any("virtual" in tool_settings.table(entry, "source") for entry in entries)

    def _root(self) -> str:
        """Return the name of the project."""
        data = toml.read(self.project / "pyproject.toml")
        return str(canonicalize_name(str(tool_settings.table(data, "project").get("name", ""))))

    def _listed(self, package: Mapping[str, Any]) -> Iterator[object]:
        """Yield the lists of requirements of the project that are taken."""
        if self.dependencies:
            yield package.get("dependencies")
        for key, chosen in (
            ("optional-dependencies", self.extras),
            ("dev-dependencies", self.groups),
        ):
            table = tool_settings.table(package, key)
            for name in chosen:
                yield table.get(name)

    def _reached(self, packages: Mapping[str, Sequence[Mapping[str, Any]]]) -> set[str]:
        """Return the packages that the project needs, on any platform and with all extras."""
        reached = {*self.direct()} if self.script else {self._root()}
        pending = [*reached]
        while pending:
            for package in packages.get(pending.pop(), ()):
                lists = [package.get("dependencies")]
                for key in ("optional-dependencies", "dev-dependencies"):
                    lists += tool_settings.table(package, key).values()
                for name in {name for listed in lists for name in _names(listed)} - reached:
                    reached.add(name)
                    pending.append(name)
        return reached


def read_entries(entries: Sequence[str], root: Path) -> tuple[UvLock, list[str]]:
    """Return what entries of ``environment.requirements`` take of a ``uv.lock``, and problems.

    Args:
        entries: all entries; one of them names a ``uv.lock``.
        root: the folder that relative paths start from.
    """
    named = [entry for entry in entries if ENTRY.fullmatch(entry)]
    file = _place(named[0], root)
    project = _project_of(file, root)
    parts = [entry for entry in named if _place(entry, root) == file]
    others = [entry for entry in entries if entry not in parts]
    strangers = [entry for entry in others if _place(entry, root) != project]
    lock = _taken(parts, file, project, itself=len(strangers) < len(others))
    problems = [
        f"environment.requirements: {entry} beside {_path(named[0])}, which is a complete lock: "
        "only parts of it and the folder of its project may stand there; add the package to that "
        "project (`uv add`)"
        for entry in strangers
    ]
    return lock, [*problems, *_faults(lock)]


def _taken(parts: Sequence[str], file: Path, project: Path, *, itself: bool) -> UvLock:
    """Return what entries that name parts of one lock take of it."""
    matches = [match for match in map(ENTRY.fullmatch, parts) if match]
    return UvLock(
        file=file,
        project=project,
        extras=_split(match["extras"] for match in matches),
        groups=_split(match["groups"] for match in matches),
        dependencies=any(match["groups"] is None for match in matches),
        itself=itself,
    )


def _faults(lock: UvLock) -> Iterator[str]:
    """Yield why a lock cannot be used."""
    if not lock.file.is_file():
        yield f"environment.requirements: no such file: {lock.file}"
    elif lock.itself and lock.is_virtual():
        yield (
            f"environment.requirements: {lock.project} is no package for uv, so it cannot be "
            "installed: give it a [build-system], or leave out the folder"
        )


def beside_script(script: Path) -> Path | None:
    """Return the lock that ``uv lock --script`` has put beside a script; None if there is none."""
    file = Path(f"{script}{_OF_SCRIPT}")
    try:
        return file if file.is_file() else None
    except OSError:  # such as a name that is too long for a file
        return None


def of_script(script: Path, file: Path) -> UvLock:
    """Return the lock of a script, all of which counts."""
    return UvLock(file=file, project=script.parent, script=script)


def _project_of(file: Path, root: Path) -> Path:
    """Return the project that a lock is read for: this one, if it is a member of the workspace."""
    if root.is_relative_to(file.parent) and (root / "pyproject.toml").is_file():
        return root
    return file.parent


def _path(entry: str) -> str:
    """Return the path in an entry, without the parts of a lock that it names."""
    match = ENTRY.fullmatch(entry)
    return match["path"] if match else entry


def _place(entry: str, root: Path) -> Path:
    """Return the lock or the folder that an entry names."""
    return Path(os.path.normpath(root / expand_user(_path(entry))))


def _split(lists: Iterable[str | None]) -> tuple[str, ...]:
    names = (name.strip() for listed in lists for name in (listed or "").split(","))
    return tuple(dict.fromkeys(name for name in names if name))


def _packages(file: Path) -> dict[str, list[Mapping[str, Any]]]:
    """Return the entries of a ``uv.lock`` by name; some names have several."""
    packages: dict[str, list[Mapping[str, Any]]] = {}
    for package in _items(toml.read(file).get("package")):
        if isinstance(package, Mapping):  # uv itself says what is wrong with any other
            packages.setdefault(str(package.get("name", "")), []).append(package)
    return packages


def _names(listed: object) -> Iterator[str]:
    for entry in _items(listed):
        if isinstance(entry, Mapping):
            yield str(entry.get("name", ""))


def _items(value: object) -> list[Any]:
    """Return a list of a document; an empty one where there is none."""
    return value if isinstance(value, list) else []
