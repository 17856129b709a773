"""Projects with settings that only uv honours: uv itself reads them when it resolves.

``[tool.uv.sources]``, indexes, overrides and constraints of a ``pyproject.toml`` mean what uv takes
them to mean, so the file is handed to ``uv pip compile`` as it is, from where it lies. A script's
block (PEP 723) is written as a project first: uv reads the indexes of projects only.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from packaging.utils import canonicalize_name

from ..config import script_block
from ..core import toml
from . import tool_settings
from .uv_workspace import as_json, members, read, uv_table


@dataclass(frozen=True, kw_only=True)
class UvProject:
    """A file whose requirements uv resolves with the settings that stand in it."""

    file: Path
    """A ``pyproject.toml``, or a script."""
    keys: tuple[str, ...]
    """The settings, with their file, as messages name them."""
    document: Mapping[str, Any]
    """The file, or a project in place of a script's block."""
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

    def plus(self, other: UvProject) -> UvProject:
        """Return the same file with what another entry takes of it."""
        return replace(
            self,
            keys=tuple(dict.fromkeys((*self.keys, *other.keys))),
            requirements=tuple(dict.fromkeys((*self.requirements, *other.requirements))),
            dependencies=self.dependencies or other.dependencies,
            extras=tuple(dict.fromkeys((*self.extras, *other.extras))),
            groups=tuple(dict.fromkeys((*self.groups, *other.groups))),
            excluded=tuple(dict.fromkeys((*self.excluded, *other.excluded))),
        )

    def arguments(self, scratch: Path) -> list[str]:
        """Return the arguments that make uv read the file.

        Args:
            scratch: a private folder, where a script's project is written.
        """
        file = self.file
        if self.is_script:
            file = scratch / "script" / "pyproject.toml"
            file.parent.mkdir(exist_ok=True)
            file.write_text(toml.dumps(self.document), encoding="utf-8")
        argv = ["--project", str(file.parent)]
        if self.dependencies:
            argv.append(str(file))
        for extra in self.extras:
            argv += ["--extra", extra]
        for group in self.groups:
            argv += ["--group", f"{file}:{group}"]
        if self.excluded:
            names = scratch / "excluded.txt"
            names.write_text("".join(f"{name}\n" for name in self.excluded), encoding="utf-8")
            argv += ["--excludes", str(names)]
        return argv

    def identity(self, root: Path) -> list[object]:
        """Return all that determines the answer, except requirements and local sources."""
        settings = [uv_table(self.document), *(list(tables) for tables in self._elsewhere())]
        chosen = [self.extras, self.groups, self.dependencies]
        return [os.path.relpath(self.file, root), as_json(settings), chosen]

    def _elsewhere(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Yield the settings in other files, each with the file's name."""
        if self.is_script:
            return
        beside = self.file.with_name("uv.toml")
        if beside.is_file():
            yield beside.name, toml.read(beside)
        root = tool_settings.workspace(self.file)
        if root:
            yield os.path.relpath(root, self.file.parent), uv_table(toml.read(root))

    @property
    def has_default_index(self) -> bool:
        """Return whether it has an index of its own in place of the usual one."""
        return any(
            "index-url" in table or any(index.get("default") for index in _listed_indexes(table))
            for table in self._tables()
        )

    @property
    def indexes(self) -> tuple[str, ...]:
        """Return the addresses of its named indexes, with the credentials that uv takes."""
        return tuple(url for table in self._tables() for url in index_urls(table))

    @property
    def overridden(self) -> set[str]:
        """Return the packages whose versions uv takes against what other packages ask for."""
        return set().union(*map(overridden_by, self._tables()))

    def _tables(self) -> list[Mapping[str, Any]]:
        """Return all tables with settings of uv that count."""
        return [uv_table(self.document), *(table for _, table in self._elsewhere())]

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
                    pending.append((inner, read(inner)))
        return sorted(found)


def merge_projects(projects: Sequence[UvProject]) -> tuple[UvProject | None, str]:
    """Return the one project with settings of uv, and why several cannot be honoured together."""
    merged: dict[Path, UvProject] = {}
    for project in projects:
        earlier = merged.get(project.file)
        merged[project.file] = earlier.plus(project) if earlier else project
    if len(merged) > 1:
        keys = "; ".join(key for project in merged.values() for key in project.keys)
        return None, (
            f"several projects have settings that only uv honours, and each means its own: {keys}; "
            "make them one project or one workspace of uv"
        )
    return next(iter(merged.values()), None), ""


def settings_around(folder: Path) -> list[Mapping[str, Any]]:
    """Return the settings of uv that hold in a project's folder."""
    file = folder / "pyproject.toml"
    return UvProject(file=file, keys=(), document=read(file))._tables()


def script_project(script: Path, block: Mapping[str, Any]) -> dict[str, Any]:
    """Return a script's block (PEP 723) as a ``pyproject.toml`` that may lie anywhere."""
    project: dict[str, Any] = {"name": "script", "version": "0"}
    project["dependencies"] = block.get("dependencies", [])
    if "requires-python" in block:
        project["requires-python"] = block["requires-python"]
    document: dict[str, Any] = {"project": project}
    settings = dict(uv_table(block))
    folder = script.parent.absolute()
    if isinstance(settings.get("sources"), Mapping):
        settings["sources"] = _absolute_sources(settings["sources"], folder)
    if isinstance(settings.get("index"), list):
        settings["index"] = [_absolute(index, "url", folder) for index in settings["index"]]
    if isinstance(settings.get("find-links"), list):
        links = settings["find-links"]
        settings["find-links"] = [_absolute({"url": link}, "url", folder)["url"] for link in links]
    if settings:
        document["tool"] = {"uv": settings}
    return document


def script_settings(script: Path) -> Mapping[str, Any]:
    """Return the settings of uv in a script's block, with places that start anywhere."""
    return uv_table(script_project(script, script_block.read(script) or {}))


def script_identity(script: Path) -> list[object]:
    """Return all in a script's block that a lock of it depends on."""
    block = script_block.read(script) or {}
    return as_json([block.get("dependencies"), block.get("requires-python"), uv_table(block)])


def index_urls(table: Mapping[str, Any]) -> Iterator[str]:
    """Yield the address of each named index in settings of uv.

    It has the credentials of ``UV_INDEX_NAME_USERNAME`` and ``UV_INDEX_NAME_PASSWORD``, if set.
    """
    for index in _listed_indexes(table):
        url = index.get("url")
        if not isinstance(url, str) or "://" not in url:
            continue
        variable = "UV_INDEX_" + re.sub("[^A-Z0-9]", "_", str(index.get("name", "")).upper())
        user = os.environ.get(f"{variable}_USERNAME", "")
        password = os.environ.get(f"{variable}_PASSWORD", "")
        scheme, _, rest = url.partition("://")
        if (user or password) and "@" not in rest.partition("/")[0]:
            rest = f"{quote(user, safe='')}:{quote(password, safe='')}@{rest}"
        yield f"{scheme}://{rest}"


def _listed_indexes(table: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    indexes = table.get("index")
    listed = indexes if isinstance(indexes, list) else []
    return [index for index in listed if isinstance(index, Mapping)]


def overridden_by(table: Mapping[str, Any]) -> set[str]:
    """Return the packages that uv takes against other packages' metadata, by its settings."""
    texts = table.get("override-dependencies", [])
    names = tool_settings.names(map(str, texts)) if isinstance(texts, list) else set()
    excluded = table.get("exclude-dependencies", [])
    names |= tool_settings.names(map(str, excluded)) if isinstance(excluded, list) else set()
    metadata = table.get("dependency-metadata", [])
    for entry in metadata if isinstance(metadata, list) else ():
        if isinstance(entry, Mapping) and "name" in entry:
            names.add(str(canonicalize_name(str(entry["name"]))))
    return names


def _absolute_sources(sources: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    absolute: dict[str, Any] = {}
    for name, source in sources.items():
        if isinstance(source, list):
            absolute[name] = [_absolute(one, "path", folder) for one in source]
        else:
            absolute[name] = _absolute(source, "path", folder)
    return absolute


def _absolute(table: Mapping[str, Any], key: str, folder: Path) -> dict[str, Any]:
    """Return a table with a relative path in one key made absolute."""
    place = table.get(key)
    if not isinstance(place, str) or "://" in place:
        return dict(table)
    return {**table, key: os.path.normpath(folder / place)}


def _local_sources(file: Path, document: Mapping[str, Any]) -> Iterator[Path]:
    """Yield the folders and files that ``[tool.uv.sources]`` names, here or in the workspace."""
    root = tool_settings.workspace(file) or file
    for place in dict.fromkeys((file, root)):
        table = uv_table(document if place == file else read(place))
        sources = table.get("sources")
        for name, source in sources.items() if isinstance(sources, Mapping) else ():
            choices = source if isinstance(source, list) else [source]
            for choice in filter(_is_table, choices):
                if isinstance(choice.get("path"), str):
                    yield Path(os.path.normpath(place.parent / choice["path"]))
                elif choice.get("workspace"):
                    yield from _members_named(canonicalize_name(name), root.parent)


def _is_table(value: object) -> bool:
    return isinstance(value, Mapping)


def _members_named(name: str, workspace: Path) -> Iterator[Path]:
    """Yield the folder of a workspace whose project has this name."""
    for folder in sorted(members(workspace)):
        if _name_of(folder) == name:
            yield folder


def _name_of(folder: Path) -> str:
    """Return the name of a folder's project."""
    project = tool_settings.table(read(folder / "pyproject.toml"), "project")
    return str(canonicalize_name(str(project.get("name", ""))))
