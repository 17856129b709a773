"""The part of a ``uv.lock`` that a project takes; :mod:`stager.lock.uv_export` reads it.

An entry of ``environment.requirements`` is ``uv.lock``, ``uv.lock[extra1,extra2]`` or
``uv.lock:group1,group2``, as for ``pyproject.toml``; several may name the same lock. A group alone
stands for itself, and the group ``dev`` counts only where it is named.

A script (PEP 723) that was locked with ``uv lock --script`` has its lock beside it, and is alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from ..config import inline_script
from ..core import toml
from ..core.store import sha256_of
from . import uv_settings
from .requirement_line import expand_user, relative
from .uv_project import UvProject, parse_entry, script_project

NAME = "uv.lock"
_OF_SCRIPT = ".lock"


@dataclass(frozen=True, kw_only=True)
class UvLock:
    """The part of a ``uv.lock`` that a project takes."""

    file: Path
    """The lock."""
    project: UvProject
    """The part of the project, or the script, that it is read for."""
    itself: bool = False
    """True if the project itself is installed as well."""

    @property
    def command(self) -> str:
        """Return the command that makes the lock again, as messages name it."""
        script = f" --script {self.project.file.name}" if self.project.is_script else ""
        return f"uv lock{script}"

    def identity(self, root: Path) -> list[object]:
        """Return all that determines the answer, except the content of local sources."""
        file, folder = self.project.file, self.project.file.parent
        places = [os.path.relpath(path, root) for path in (self.file, folder)]
        chosen = [self.project.extras, self.project.groups, self.project.dependencies, self.itself]
        if self.project.is_script:
            block = inline_script.read(file) or {}
            own = [block.get(key) for key in ("dependencies", "requires-python")]
            asks = uv_settings.as_json([*own, toml.table(block, "tool", "uv")])
        else:
            asks = uv_settings.describe_workspace(self.file.parent, folder)
        return [sha256_of(self.file), places, chosen, asks]

    def local_sources(self) -> list[Path]:
        """Return the folders and files on this machine that the project's packages come from."""
        packages = _packages(self.file)
        found = set()
        for name in self._reached(packages):
            for package in packages.get(name, ()):
                for key in ("directory", "editable", "path"):
                    place = toml.table(package, "source").get(key)
                    if isinstance(place, str):
                        found.add(Path(os.path.normpath(self.file.parent / place)))
        own = () if self.itself or self.project.is_script else (self.project.file.parent,)
        return sorted(found.difference(own))

    def direct(self) -> tuple[str, ...]:
        """Return the packages that the project or the script itself asks for."""
        if self.project.is_script:
            manifest = toml.table(toml.read(self.file), "manifest")
            return tuple(_names(toml.listed(manifest, "requirements")))
        lists: list[Sequence[object]] = []
        for package in _packages(self.file).get(self._root(), ()):
            lists += _list_parts(package, self.project)
        return tuple(dict.fromkeys(name for listed in lists for name in _names(listed)))

    @property
    def overridden(self) -> frozenset[str]:
        """Return the packages that the lock has against what other packages ask for."""
        manifest = toml.table(toml.read(self.file), "manifest")
        names = set()
        for key in ("overrides", "excludes", "dependency-metadata"):
            for entry in toml.listed(manifest, key):
                name = entry.get("name", "") if isinstance(entry, Mapping) else entry
                names.add(str(canonicalize_name(str(name))))
        return frozenset(names)

    def is_virtual(self) -> bool:
        """Return whether uv takes the project for one that is never installed itself."""
        entries = _packages(self.file).get(self._root(), ())
        return any("virtual" in toml.table(entry, "source") for entry in entries)

    def _root(self) -> str:
        name = toml.table(toml.read(self.project.file), "project").get("name", "")
        return str(canonicalize_name(str(name)))

    def _reached(self, packages: Mapping[str, Sequence[Mapping[str, Any]]]) -> set[str]:
        """Return the packages that the project needs, on any platform and with all extras."""
        reached = {*self.direct()} if self.project.is_script else {self._root()}
        pending = [*reached]
        while pending:
            for package in packages.get(pending.pop(), ()):
                lists = _list_parts(package, None)
                new = {name for listed in lists for name in _names(listed)} - reached
                reached |= new
                pending += new
        return reached


def read_entries(entries: Sequence[str], root: Path) -> tuple[UvLock | None, list[str]]:
    """Return what entries of ``environment.requirements`` take of a ``uv.lock``, and problems."""
    named = {entry: parse_entry(entry, root) for entry in entries}
    parts = {entry: part for entry, part in named.items() if part and part.file.name == NAME}
    if not parts:
        return None, []
    first, *more = parts.values()
    file, folder = first.file, _find_project(first.file, root)
    for part in more:
        first = first.plus(part)
    others = [entry for entry in entries if entry not in parts or parts[entry].file != file]
    strangers = [one for one in others if os.path.normpath(root / expand_user(one)) != str(folder)]
    project = folder / "pyproject.toml"
    lock = UvLock(
        file=file,
        project=replace(first, file=project, document=toml.read(project) if file.is_file() else {}),
        itself=len(strangers) < len(others),
    )
    problems = [
        f"environment.requirements: {entry} beside {relative(file, root)}, which is a complete "
        "lock: only parts of it and the folder of its project may stand there; add the package to "
        "that project (`uv add`)"
        for entry in strangers
    ]
    return lock, [*problems, *_list_faults(lock)]


def _list_faults(lock: UvLock) -> Iterator[str]:
    if not lock.file.is_file():
        yield f"environment.requirements: no such file: {lock.file}"
    elif lock.itself and lock.is_virtual():
        yield (
            f"environment.requirements: {lock.project.file.parent} is no package for uv, so it "
            "cannot be installed: give it a [build-system], or leave out the folder"
        )


def read_script_lock(script: Path, block: Mapping[str, Any]) -> UvLock | None:
    """Return the lock that ``uv lock --script`` has put beside a script; None if there is none."""
    file = Path(f"{script}{_OF_SCRIPT}")
    return UvLock(file=file, project=script_project(script, block)) if file.is_file() else None


def _find_project(file: Path, root: Path) -> Path:
    """Return the project that a lock is read for: this one, if it is a member of the workspace."""
    if root.is_relative_to(file.parent) and (root / "pyproject.toml").is_file():
        return root
    return file.parent


def _packages(file: Path) -> dict[str, list[Mapping[str, Any]]]:
    packages: dict[str, list[Mapping[str, Any]]] = {}
    for package in toml.listed(toml.read(file), "package"):
        if isinstance(package, Mapping):  # uv itself says what is wrong with any other
            packages.setdefault(str(package.get("name", "")), []).append(package)
    return packages


def _list_parts(package: Mapping[str, Any], taken: UvProject | None) -> Iterator[Sequence[object]]:
    """Yield the lists of requirements of a package that a project takes; None for all of them."""
    if taken is None or taken.dependencies:
        yield toml.listed(package, "dependencies")
    extras, groups = (taken.extras, taken.groups) if taken else (None, None)
    for key, chosen in (("optional-dependencies", extras), ("dev-dependencies", groups)):
        table = toml.table(package, key)
        yield from (toml.listed(table, name) for name in (table if chosen is None else chosen))


def _names(listed: Sequence[object]) -> Iterator[str]:
    for entry in listed:
        if isinstance(entry, Mapping):
            yield str(entry.get("name", ""))
