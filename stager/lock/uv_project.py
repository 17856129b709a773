"""Projects with settings that only uv honours: uv itself reads them when it resolves.

``[tool.uv.sources]``, indexes, overrides and constraints of a ``pyproject.toml`` mean what uv takes
them to mean, so the file is handed to ``uv pip compile`` as it is, from where it lies. A script's
block (PEP 723) is written as a project first: of a script, uv reads no sources (0.13).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from ..core import toml
from . import uv_settings
from .requirement_line import expand_user, write_lines

_ENTRY = re.compile(
    r"(?P<path>.*pyproject\.toml|(.*/)?uv\.lock)(\[(?P<extras>.*)\]|:(?P<groups>.*))?"
)


@dataclass(frozen=True, kw_only=True)
class UvProject:
    """The part of a project or a script that is asked for, with the settings of uv that hold."""

    file: Path
    """A ``pyproject.toml``, or a script."""
    document: Mapping[str, Any]
    """The file, or a project in place of a script's block."""
    keys: tuple[str, ...] = ()
    """The settings that only uv honours, with their file, as messages name them."""
    requirements: tuple[str, ...] = ()
    """What it asks for, as PEP 508 requirements."""
    dependencies: bool = True
    """True if its own dependencies count, and not only groups."""
    extras: tuple[str, ...] = ()
    """Extras of it."""
    groups: tuple[str, ...] = ()
    """Dependency groups of it."""
    excluded: tuple[str, ...] = ()
    """Its own name where it refers to itself: uv would look for that in an index."""

    @property
    def is_script(self) -> bool:
        """Return whether the file is a script."""
        return self.file.suffix == ".py"

    @property
    def tables(self) -> uv_settings.Tables:
        """Return all settings of uv that hold."""
        return uv_settings.read_tables(self.file, self.document)

    def plus(self, other: UvProject) -> UvProject:
        """Return the same file with what another entry takes of it."""
        lists = ("keys", "requirements", "extras", "groups", "excluded")
        both = {name: (*getattr(self, name), *getattr(other, name)) for name in lists}
        unique: dict[str, Any] = {name: tuple(dict.fromkeys(both[name])) for name in lists}
        return replace(self, dependencies=self.dependencies or other.dependencies, **unique)

    def arguments(self, scratch: Path) -> list[str]:
        """Return uv's arguments for the file; write a script's project into ``scratch`` first."""
        file = self.file
        if self.is_script:
            file = scratch / "script" / "pyproject.toml"
            file.parent.mkdir(exist_ok=True)
            file.write_text(toml.dumps(self.document), encoding="utf-8")
        argv = ["--project", str(file.parent)]
        if self.dependencies:
            argv.append(str(file))
        argv += [word for extra in self.extras for word in ("--extra", extra)]
        argv += [word for group in self.groups for word in ("--group", f"{file}:{group}")]
        if self.excluded:
            argv += ["--excludes", write_lines(scratch / "excluded.txt", self.excluded)]
        return argv

    def identity(self, root: Path) -> list[object]:
        """Return all that determines the answer, except requirements and local sources."""
        own, *others = self.tables.items()
        named = [[os.path.relpath(path, self.file.parent), table] for path, table in others]
        chosen = [self.extras, self.groups, self.dependencies]
        return [os.path.relpath(self.file, root), uv_settings.as_json([own[1], *named]), chosen]

    @property
    def has_default_index(self) -> bool:
        """Return whether it has an index of its own in place of the usual one."""
        tables = self.tables.values()
        indexes = [index for table in tables for index in uv_settings.list_indexes(table)]
        return any("index-url" in one for one in tables) or any(
            one.get("default") for one in indexes
        )

    @property
    def indexes(self) -> tuple[str, ...]:
        """Return the addresses of its named indexes, with the credentials that uv takes."""
        return tuple(url for one in self.tables.values() for url in uv_settings.index_urls(one))

    @property
    def overridden(self) -> frozenset[str]:
        """Return the packages whose versions uv takes against what other packages ask for."""
        return frozenset().union(*map(uv_settings.overridden_by, self.tables.values()))

    def local_sources(self) -> list[Path]:
        """Return the folders and files that its sources name, and those that these name."""
        found: dict[Path, None] = {}
        pending = [(self.file, self.document)]
        while pending:
            file, document = pending.pop()
            for path in _local_sources(file, document):
                if path in found or path == self.file.parent:
                    continue
                found[path] = None
                inner = path / "pyproject.toml"
                if inner.is_file():
                    pending.append((inner, uv_settings.read(inner)))
        return sorted(found)


def parse_entry(entry: str, root: Path) -> UvProject | None:
    """Return the part of a file that an entry of ``environment.requirements`` names.

    That is ``pyproject.toml``, ``pyproject.toml[extra,...]`` or ``pyproject.toml:group,...``, and
    the same with ``uv.lock``; None for any other entry.
    """
    match = _ENTRY.fullmatch(entry)
    if match is None:
        return None
    extras, groups = (
        tuple(filter(None, map(str.strip, (match[part] or "").split(","))))
        for part in ("extras", "groups")
    )
    file = Path(os.path.normpath(root / expand_user(match["path"])))
    return UvProject(file=file, document={}, dependencies=not groups, extras=extras, groups=groups)


def script_project(script: Path, block: Mapping[str, Any]) -> UvProject:
    """Return a script's block (PEP 723) as a project that may lie anywhere."""
    project: dict[str, Any] = {"name": "script", "version": "0"}
    project["dependencies"] = block.get("dependencies", [])
    if "requires-python" in block:
        project["requires-python"] = block["requires-python"]
    settings = dict(toml.table(block, "tool", "uv"))
    for key in ("sources", "index", "find-links"):
        if key in settings:
            settings[key] = _absolute(settings[key], key, script.parent.absolute())
    return UvProject(file=script, document={"project": project, "tool": {"uv": settings}})


def _absolute(value: object, key: str, folder: Path) -> object:
    if isinstance(value, Mapping):
        return {name: _absolute(inner, name, folder) for name, inner in value.items()}
    if isinstance(value, list):
        return [_absolute(one, key, folder) for one in value]
    if key in ("path", "url", "find-links") and isinstance(value, str) and "://" not in value:
        return os.path.normpath(folder / value)
    return value


def _local_sources(file: Path, document: Mapping[str, Any]) -> Iterator[Path]:
    root = uv_settings.find_workspace(file) or file
    for place in dict.fromkeys((file, root)):
        content = document if place == file else uv_settings.read(place)
        for name, source in toml.table(content, "tool", "uv", "sources").items():
            for choice in source if isinstance(source, list) else [source]:
                if not isinstance(choice, Mapping):
                    continue
                if isinstance(choice.get("path"), str):
                    yield Path(os.path.normpath(place.parent / choice["path"]))
                elif choice.get("workspace"):
                    yield from _members_named(canonicalize_name(name), root.parent)


def _members_named(name: str, workspace: Path) -> Iterator[Path]:
    for folder in sorted(uv_settings.list_members(workspace)):
        project = toml.table(uv_settings.read(folder / "pyproject.toml"), "project")
        if canonicalize_name(str(project.get("name", ""))) == name:
            yield folder
