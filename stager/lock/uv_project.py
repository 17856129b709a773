"""Projects with settings that only uv honours: uv reads the file itself, from where it lies.

A script's block (PEP 723) is written as a project: of a script, uv reads no sources (0.13).
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from packaging.utils import NormalizedName, canonicalize_name

from bundle.protocol.dataclass import dataclass

from ..config import inline_script
from ..core import toml
from ..core.errors import ConfigError
from ..core.store import digest_file
from .indexes import expand_user, list_names, shorten_path, write_lines

# --- The settings of uv that hold for a project: those in it, beside it and in its workspace -----

# uv reads them; here they matter for refusals, a spec's digest, and the indexes of wheels.

_KEYS = (  # of ``[tool.uv]`` and ``uv.toml``, that can change what is installed
    *("constraint-dependencies", "dependency-metadata", "exclude-dependencies", "exclude-newer"),
    *("exclude-newer-package", "extra-index-url", "find-links", "fork-strategy", "index"),
    *("index-strategy", "index-url", "no-binary", "no-binary-package", "no-build"),
    *("no-build-package", "no-index", "no-sources", "no-sources-package"),
    *("override-dependencies", "pip", "prerelease", "resolution", "sources", "torch-backend"),
)
_REFUSED = {
    "pip": "what stands there is for uv's own commands; move indexes and the like to [tool.uv]",
    "torch-backend": "set environment.torch-backend in stager's settings instead",
}
_UV_TOML = "uv.toml"
_PROJECT_KEYS = (  # of ``[project]``, that a ``uv.lock`` depends on
    *("dependencies", "dynamic", "name", "optional-dependencies", "requires-python", "version"),
)

Tables = Mapping[Path, toml.Table]  # the tables with settings of uv, by the file they stand in


def list_keys(tables: Tables, requested: Collection[str] | None, root: Path) -> tuple[str, ...]:
    """Return the settings that change what is installed, for ``requested`` packages or any."""
    keys = []
    for path, settings in tables.items():
        sources = {canonicalize_name(one) for one in toml.get_table(settings, "sources")}
        sources = sources if requested is None else sources.intersection(requested)
        values = {key: settings.get(key) for key in _KEYS} | {"sources": sources}
        if not sources:
            values |= {"index": [one for one in _list_indexes(settings) if not one.get("explicit")]}
        keys += [_name_key(path, key, root) for key, value in values.items() if value]
    return tuple(keys)


def refuse(tables: Tables, root: Path) -> Iterator[str]:
    """Yield one message for each setting that is not honoured."""
    for path, settings in tables.items():
        for key, remedy in _REFUSED.items():
            if settings.get(key):
                yield f"{_name_key(path, key, root)}: it is not honoured here; {remedy}"


def _name_key(path: Path, key: str, root: Path) -> str:
    table = "" if path.name == _UV_TOML else "tool.uv."
    return f"{shorten_path(path, root)}: {table}{key}"


def _list_indexes(settings: toml.Table) -> list[toml.Table]:
    return [index for index in toml.get_list(settings, "index") if isinstance(index, Mapping)]


def _index_urls(settings: toml.Table) -> Iterator[str]:
    """Yield the address of each named index, with the credentials of ``UV_INDEX_*`` variables."""
    for index in _list_indexes(settings):
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


def _list_overridden(settings: toml.Table) -> set[NormalizedName]:
    names: set[NormalizedName] = set()
    for key in ("override-dependencies", "exclude-dependencies"):
        names |= list_names(map(str, toml.get_list(settings, key)))
    for entry in toml.get_list(settings, "dependency-metadata"):
        if isinstance(entry, Mapping) and "name" in entry:
            names.add(canonicalize_name(str(entry["name"])))
    return names


def _find_workspace(path: Path) -> Path | None:
    for folder in path.absolute().parent.parents:
        file = folder / "pyproject.toml"
        if not os.access(file, os.R_OK) or not file.is_file():
            continue
        if b"tool.uv.workspace" in file.read_bytes():
            return file
    return None


def _list_members(root: Path) -> set[Path]:
    workspace = toml.get_table(read(root / "pyproject.toml"), "tool", "uv", "workspace")

    def find(key: str) -> Iterator[Path]:
        for pattern in toml.get_list(workspace, key):
            with suppress(ValueError, NotImplementedError):  # uv says what is wrong with it
                yield from (file.parent for file in root.glob(f"{pattern}/pyproject.toml"))

    return {*find("members")} - {*find("exclude")}


def _describe_workspace(root: Path, project: Path) -> list[object]:
    """Return what ``uv lock --check`` compares besides the lock, to notice when to ask uv."""
    described = []
    for folder in sorted({root, project, *_list_members(root)}):
        document = read(folder / "pyproject.toml")
        own = toml.get_table(document, "project")
        parts = [
            {key: own[key] for key in _PROJECT_KEYS if key in own},
            toml.get_table(document, "dependency-groups"),
            toml.get_table(document, "tool", "uv"),
            "build-system" in document,  # a project without one is not installed
        ]
        described.append([os.path.relpath(folder, root), parts])
    return _make_json([described, read(root / _UV_TOML)])


def read(path: Path) -> toml.Table:
    """Return a document; an empty one where there is none, or uv will say what is wrong with it."""
    try:
        return toml.read(path)
    except ConfigError:
        return {}


def _make_json(value: Sequence[object]) -> list[object]:
    return list(json.loads(json.dumps(value, default=str)))


_ENTRY = re.compile(
    r"(?P<path>.*pyproject\.toml|(.*/)?uv\.lock)(\[(?P<extras>.*)\]|:(?P<groups>.*))?"
)


@dataclass(frozen=True, kw_only=True)
class UvProject:
    """The part of a project or a script that is asked for, with the settings of uv that hold."""

    file: Path
    document: toml.Table  # the file, or a project in place of a script's block
    keys: tuple[str, ...] = ()  # settings that only uv honours, with their file
    requirements: tuple[str, ...] = ()
    dependencies: bool = True
    extras: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()  # its own name where it refers to itself

    @property
    def is_script(self) -> bool:
        """Return whether the file is a script."""
        return self.file.suffix == ".py"

    @functools.cached_property
    def tables(self) -> Tables:
        """All settings of uv that hold: its own; a project's beside it and of its workspace."""
        tables = {self.file: toml.get_table(self.document, "tool", "uv")}
        beside, workspace = self.file.with_name(_UV_TOML), _find_workspace(self.file)
        if beside.is_file() and not self.is_script:
            tables[beside] = toml.read(beside)
        if workspace and not self.is_script:
            tables[workspace] = toml.get_table(toml.read(workspace), "tool", "uv")
        return tables

    def merge(self, other: UvProject) -> UvProject:
        """Return the same file with what another entry takes of it."""
        lists = ("keys", "requirements", "extras", "groups", "excluded")
        unique: dict[str, Any] = {
            name: tuple(dict.fromkeys((*getattr(self, name), *getattr(other, name))))
            for name in lists
        }
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
        return [os.path.relpath(self.file, root), _make_json([own[1], *named]), chosen]

    @property
    def has_default_index(self) -> bool:
        """Return whether it has an index of its own in place of the usual one."""
        return any(
            "index-url" in table or any(index.get("default") for index in _list_indexes(table))
            for table in self.tables.values()
        )

    @property
    def indexes(self) -> tuple[str, ...]:
        """Return the addresses of its named indexes, with the credentials that uv takes."""
        return tuple(url for one in self.tables.values() for url in _index_urls(one))

    @property
    def overridden(self) -> frozenset[str]:
        """Return the packages whose versions uv takes against what other packages ask for."""
        return frozenset().union(*map(_list_overridden, self.tables.values()))

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


def parse_entry(entry: str, root: Path) -> UvProject | None:
    """Return the part of a ``pyproject.toml`` or ``uv.lock`` that an entry names; None for none."""
    match = _ENTRY.fullmatch(entry)
    if match is None:
        return None
    extras, groups = (
        tuple(filter(None, map(str.strip, (match[part] or "").split(","))))
        for part in ("extras", "groups")
    )
    file = Path(os.path.normpath(root / expand_user(match["path"])))
    return UvProject(file=file, document={}, dependencies=not groups, extras=extras, groups=groups)


def make_script_project(script: Path, block: toml.Table) -> UvProject:
    """Return a script's block (PEP 723) as a project that may lie anywhere."""
    asked = {key: block[key] for key in ("dependencies", "requires-python") if key in block}
    project = {"name": "script", "version": "0", "dependencies": [], **asked}
    settings = dict(toml.get_table(block, "tool", "uv"))
    for key in ("sources", "index", "find-links"):
        if key in settings:
            settings[key] = _make_absolute(settings[key], key, script.parent.absolute())
    return UvProject(file=script, document={"project": project, "tool": {"uv": settings}})


def _make_absolute(value: object, key: str, folder: Path) -> object:
    if isinstance(value, Mapping):
        return {name: _make_absolute(inner, name, folder) for name, inner in value.items()}
    if isinstance(value, list):
        return [_make_absolute(one, key, folder) for one in value]
    if key in ("path", "url", "find-links") and isinstance(value, str) and "://" not in value:
        return os.path.normpath(folder / value)
    return value


def _local_sources(file: Path, document: toml.Table) -> Iterator[Path]:
    root = _find_workspace(file) or file
    for place in dict.fromkeys((file, root)):
        content = document if place == file else read(place)
        for name, source in toml.get_table(content, "tool", "uv", "sources").items():
            for choice in source if isinstance(source, list) else [source]:
                match choice:
                    case {"path": str(path)}:
                        yield Path(os.path.normpath(place.parent / path))
                    case {"workspace": True}:
                        members = sorted(_list_members(root.parent))
                        yield from (
                            one for one in members if _read_name(one) == canonicalize_name(name)
                        )


def _read_name(folder: Path) -> str:
    project = toml.get_table(read(folder / "pyproject.toml"), "project")
    return canonicalize_name(str(project.get("name", "")))


# --- The part of a ``uv.lock`` that a project takes; :mod:`stager.lock.uv` reads it -------

NAME = "uv.lock"


@dataclass(frozen=True, kw_only=True)
class UvLock:
    """The part of a ``uv.lock`` that a project takes."""

    file: Path
    project: UvProject
    itself: bool = False  # True if the project itself is installed as well

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
            block = inline_script.read_block(file) or {}
            own = [block.get(key) for key in ("dependencies", "requires-python")]
            asks = _make_json([*own, toml.get_table(block, "tool", "uv")])
        else:
            asks = _describe_workspace(self.file.parent, folder)
        return [digest_file(self.file), places, chosen, asks]

    @functools.cached_property
    def _content(self) -> toml.Table:
        return toml.read(self.file)

    @functools.cached_property
    def _packages(self) -> Mapping[str, Sequence[toml.Table]]:
        packages: dict[str, list[toml.Table]] = {}
        for package in toml.get_list(self._content, "package"):
            if isinstance(package, Mapping):  # uv itself says what is wrong with any other
                packages.setdefault(str(package.get("name", "")), []).append(package)
        return packages

    @functools.cached_property
    def _own(self) -> str:
        return _read_name(self.project.file.parent)

    def local_sources(self) -> list[Path]:
        """Return the folders and files here that packages of the project and its extras lie in."""
        is_script = self.project.is_script
        found, reached = set(), list(self.direct() if is_script else [self._own])
        for name in reached:
            for package in self._packages.get(name, ()):
                needed = _list_names(_list_parts(package, None))
                reached += [other for other in needed if other not in reached]
                source = toml.get_table(package, "source")
                places = map(source.get, ("directory", "editable", "path"))
                found |= {
                    Path(os.path.normpath(self.file.parent / place))
                    for place in places
                    if isinstance(place, str)
                }
        own = {self.project.file.parent}
        return sorted(found if self.itself or is_script else found - own)

    def direct(self) -> tuple[str, ...]:
        """Return the packages that the project or the script itself asks for."""
        if self.project.is_script:
            manifest = toml.get_table(self._content, "manifest")
            return _list_names([toml.get_list(manifest, "requirements")])
        own = self._packages.get(self._own, ())
        return _list_names(part for one in own for part in _list_parts(one, self.project))

    @property
    def overridden(self) -> frozenset[str]:
        """The packages that the lock has against what other packages ask for."""
        manifest = toml.get_table(self._content, "manifest")
        keys = ("overrides", "excludes", "dependency-metadata")
        entries = [entry for key in keys for entry in toml.get_list(manifest, key)]
        names = (one.get("name", "") if isinstance(one, Mapping) else one for one in entries)
        return frozenset(canonicalize_name(str(name)) for name in names)

    def is_virtual(self) -> bool:
        """Return whether uv takes the project for one that is never installed itself."""
        entries = self._packages.get(self._own, ())
        return any("virtual" in toml.get_table(entry, "source") for entry in entries)


def read_entries(entries: Sequence[str], root: Path) -> tuple[UvLock | None, list[str]]:
    """Return what entries of ``environment.requirements`` take of a ``uv.lock``, and problems."""
    parts = _find_parts(entries, root)
    if not parts:
        return None, []
    first = functools.reduce(UvProject.merge, parts.values())
    file, folder = first.file, _find_project(first.file.parent, root)
    ours = {entry for entry, part in parts.items() if part.file == file}
    others = [entry for entry in entries if entry not in ours]
    strangers = [one for one in others if os.path.normpath(root / expand_user(one)) != str(folder)]
    project = folder / "pyproject.toml"
    document = toml.read(project) if file.is_file() else {}
    lock = UvLock(
        file=file,
        project=replace(first, file=project, document=document),
        itself=len(strangers) < len(others),
    )
    return lock, [*_list_faults(lock, strangers, shorten_path(file, root))]


def _find_project(folder: Path, root: Path) -> Path:
    """Return the project that a lock is read for: this one, if it is a member of the workspace."""
    is_member = root.is_relative_to(folder) and (root / "pyproject.toml").is_file()
    return root if is_member else folder


def _find_parts(entries: Sequence[str], root: Path) -> dict[str, UvProject]:
    parsed = ((entry, parse_entry(entry, root)) for entry in entries)
    return {entry: part for entry, part in parsed if part and part.file.name == NAME}


def _list_faults(lock: UvLock, strangers: Sequence[str], shown: str) -> Iterator[str]:
    for entry in strangers:
        yield (
            f"environment.requirements: {entry} beside {shown}, which is a complete lock: only "
            "parts of it and the folder of its project may stand there; add the package to that "
            "project (`uv add`)"
        )
    if not lock.file.is_file():
        yield f"environment.requirements: no such file: {lock.file}"
    elif lock.itself and lock.is_virtual():
        yield (
            f"environment.requirements: {lock.project.file.parent} is no package for uv, so it "
            "cannot be installed: give it a [build-system], or leave out the folder"
        )


def read_script_lock(script: Path, block: toml.Table) -> UvLock | None:
    """Return the lock that ``uv lock --script`` has put beside a script; None if there is none."""
    file = Path(f"{script}.lock")
    return UvLock(file=file, project=make_script_project(script, block)) if file.is_file() else None


def _list_parts(package: toml.Table, taken: UvProject | None) -> Iterator[Sequence[object]]:
    """Yield the lists of requirements of a package that a project takes; None for all of them."""
    if taken is None or taken.dependencies:
        yield toml.get_list(package, "dependencies")
    extras, groups = (taken.extras, taken.groups) if taken else (None, None)
    for key, chosen in (("optional-dependencies", extras), ("dev-dependencies", groups)):
        table = toml.get_table(package, key)
        yield from (toml.get_list(table, name) for name in (table if chosen is None else chosen))


def _list_names(lists: Iterable[Sequence[object]]) -> tuple[str, ...]:
    tables = (one for listed in lists for one in listed if isinstance(one, Mapping))
    return tuple(dict.fromkeys(str(one.get("name", "")) for one in tables))
