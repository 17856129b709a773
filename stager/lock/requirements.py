"""Requirement files, line by line, in the format that pip documents."""

from __future__ import annotations

import codecs
import getopt
import io
import os
import re
import shlex
import tokenize
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from packaging import dependency_groups
from packaging.errors import ExceptionGroup
from packaging.requirements import Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import NormalizedName, canonicalize_name

from bundle.regex import compile_lazily

from ..config import foreign_files
from ..config.foreign_files import PDM_EXPORT, POETRY_EXPORT
from ..core import toml
from ..core.errors import ConfigError
from ..core.files import read_bytes
from ..core.values import Target
from . import uv_project
from .indexes import (
    FLAGS,
    INDEX_OPTIONS,
    Indexes,
    RequirementLine,
    find_path,
    list_names,
    shorten_path,
)
from .uv_project import UvProject

# --- Settings of uv, Poetry and PDM that change what is installed --------------------------------

# Without them, other packages would be installed: uv is handed its own, all others are refused.

_LATEST_PATCH = 99


def list_faults(project: UvProject, target: Target, root: Path) -> Iterator[str]:
    """Yield one message for each setting of a project that would be ignored, or rules it out."""
    data, shown = project.document, shorten_path(project.file, root)
    yield from uv_project.refuse(project.tables, root)
    if toml.get_table(data, "tool", "poetry").get("source"):
        yield _message(shown, ["tool.poetry.source"], "Poetry", POETRY_EXPORT)
    pdm = toml.get_table(data, "tool", "pdm")
    resolution = toml.get_table(pdm, "resolution")
    keys = ["tool.pdm.source"] if pdm.get("source") else []
    keys += [f"tool.pdm.resolution.{key}" for key in ("excludes", "overrides") if key in resolution]
    if keys:
        yield _message(shown, keys, "PDM", PDM_EXPORT)
    chosen = {*project.extras, *project.groups}
    faults = (_check_python(data, target.python), _check_conflicts(data, chosen))
    yield from (f"{shown}: {fault}" for fault in faults if fault)


def _describe_foreign_dependencies(data: toml.Table, shown: str) -> str:
    poetry = toml.get_table(data, "tool", "poetry")
    dependencies = {*toml.get_table(poetry, "dependencies")} - {"python"}
    if poetry and (dependencies or "project" not in data):
        return (
            f"{shown}: its dependencies stand in [tool.poetry], which only Poetry reads; run "
            f"{POETRY_EXPORT} and name requirements.txt instead, or name the folder instead of "
            "the file to build the project with its dependencies"
        )
    if "project" in data:
        return ""
    return (
        f"{shown}: it has no [project] table, so it declares no dependencies; name its folder "
        "instead, to build what a setup.py describes, or name what to install in "
        "environment.requirements"
    )


def _check_python(data: toml.Table, python: str) -> str:
    """Describe a requires-python that excludes every patch release; the nodes' is not known."""
    required = toml.get_table(data, "project").get("requires-python")
    if required is None:
        return ""
    try:
        allowed = SpecifierSet(str(required))
    except InvalidSpecifier as exc:
        return f"project.requires-python: {exc}"
    patches = (f"{python}.{patch}" for patch in range(_LATEST_PATCH + 1))
    if any(allowed.contains(version, prereleases=True) for version in patches):
        return ""
    return (
        f"project.requires-python is {str(required)!r}, but the environment is for Python "
        f"{python}; set environment.python to a version that it allows"
    )


def _check_conflicts(data: toml.Table, chosen: Collection[str]) -> str:
    for members in toml.get_list(toml.get_table(data, "tool", "uv"), "conflicts"):
        tables = [one for one in members if isinstance(one, Mapping)] if members else []
        names = [str(one.get("extra") or one.get("group")) for one in tables]
        both = [name for name in names if name in chosen]
        if len(both) > 1:
            return f"tool.uv.conflicts does not allow {' and '.join(both)} together"
    return ""


def _message(shown: str, keys: Collection[str], tool: str, export: str) -> str:
    return (
        f"{shown}: {', '.join(keys)}: only {tool} honours this, and without it other packages "
        f"would be installed; run {export} there and name requirements.txt instead"
    )


_COMMENT = compile_lazily(r"(^|\s+)#.*$")
_VARIABLE = compile_lazily(r"\$\{([A-Z0-9_]+)\}")
_LINE_OPTIONS = compile_lazily(r"\s+(--[a-z-]+.*)$")
_LONG_NAMES = {
    "-r": "--requirement",
    "-c": "--constraint",
    "-e": "--editable",
    "-i": "--index-url",
    "-f": "--find-links",
    "--pypi-url": "--index-url",
}
_WITHOUT_VALUE = (*FLAGS, "--require-hashes", "--prefer-binary")
_OTHERS = ("--pypi-url", "--use-feature")
_OPTIONS = [
    option.removeprefix("--") + ("" if option in _WITHOUT_VALUE else "=")
    for option in {*_LONG_NAMES.values(), *_WITHOUT_VALUE, *INDEX_OPTIONS, *_OTHERS}
]


def refuse_editable(text: str) -> str:
    """Return why an editable requirement is refused, and what to write."""
    if "+" in text.partition("://")[0] and "://" in text:
        remedy = "write it without -e: a wheel of its commit is built"
    else:
        remedy = "ship the code as [project], or name its folder without -e to install it"
    return (
        f"{text} is refused: an editable install points at files on this machine, which the nodes "
        f"do not have; {remedy}"
    )


class RequirementReader:
    """Collects the contents of a set of requirement files; collects problems, too."""

    def __init__(self, root: Path, target: Target) -> None:
        self.root, self.target = root, target
        self.lines: list[RequirementLine] = []
        self.indexes = Indexes()
        self.problems: list[str] = []
        self.uv_projects: dict[Path, UvProject] = {}  # those with settings that only uv honours
        self.require_hashes = ""  # the place that asks for a hash of every file; empty for none
        self._seen: set[tuple[Path, bool]] = set()

    def read_file(self, path: Path, *, origin: str, constraint: bool = False) -> None:
        """Read one requirement file and all it includes."""
        path = Path(os.path.normpath(path))
        if (path, constraint) in self._seen:
            return  # so a circle of includes ends
        self._seen.add((path, constraint))
        try:
            text = _read_text(path, shorten_path(path, self.root))
        except ValueError as exc:
            self.problems.append(f"{origin}: {exc}")
            return
        for number, line_text in _logical_lines(text):
            line = RequirementLine(
                text=line_text,
                origin=f"{shorten_path(path, self.root)}:{number}",
                base=path.parent,
                constraint=constraint,
            )
            try:
                if line_text.startswith("-"):
                    self._read_options(line)
                else:
                    self._read_requirement(line)
            except ValueError as exc:
                self.problems.append(f"{line.origin}: {exc}")

    def leave_to_uv(self, project: UvProject, requested: Collection[str] | None) -> bool:
        """Note the part of a project that uv is to read; ``requested`` is that of ``list_keys``."""
        keys = uv_project.list_keys(project.tables, requested, self.root)
        if keys:
            project = replace(project, keys=keys)
            earlier = self.uv_projects.get(project.file)
            self.uv_projects[project.file] = earlier.merge(project) if earlier else project
        return bool(keys)

    def _read_requirement(self, line: RequirementLine) -> None:
        found = _LINE_OPTIONS.search(line.text)
        options = found[1] if found else ""
        text = line.text[: found.start()] if found else line.text
        self.problems += (
            f"{line.origin}: {option} after a requirement is not supported; write it on a "
            "line of its own, or build the wheel with it (`pip wheel`) and name that wheel"
            for option in (word.partition("=")[0] for word in options.split())
            if option.startswith("--") and option != "--hash"
        )
        if "://" not in text:  # those of a URL may be secrets, and the resolvers fill them in
            text = _fill_in_variables(text)
        self.lines.append(replace(line, text=text.strip(), options=options))

    def _read_options(self, line: RequirementLine) -> None:
        try:
            options, rest = getopt.getopt(shlex.split(line.text), "r:c:e:i:f:", _OPTIONS)
        except getopt.GetoptError as exc:
            raise ValueError(str(exc)) from exc
        for name, value in options:
            self._apply_option(_LONG_NAMES.get(name, name), value, line)
        if rest:
            raise ValueError(f"{rest[0]} belongs on a line of its own")

    def _apply_option(self, name: str, value: str, line: RequirementLine) -> None:
        if name in ("--requirement", "--constraint"):
            if "://" in value:
                raise ValueError(f"{value} is on a server; save a copy beside this file")
            path, limits = line.base / _fill_in_variables(value), name == "--constraint"
            self.read_file(path, origin=line.origin, constraint=line.constraint or limits)
        elif name == "--editable":
            raise ValueError(refuse_editable(f"-e {value}"))
        elif name == "--require-hashes":
            self.require_hashes = self.require_hashes or line.origin
        elif name in INDEX_OPTIONS:
            if name == "--find-links" and not re.search(r"://|\$\{", value):
                # As in pip, at the file's folder, else at the working directory.
                value = str(find_path(value, (line.base, self.root)))
            self.indexes = self.indexes.merge(INDEX_OPTIONS[name](value))


def _read_text(path: Path, shown: str) -> str:
    remedy = foreign_files.find_remedy(path.name)
    if remedy:
        raise ValueError(f"{shown} is not a requirement file; {remedy}")
    try:
        data = read_bytes(path)
        if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):  # PowerShell's
            return data.decode("utf-16")
        return data.decode(tokenize.detect_encoding(io.BytesIO(data).readline)[0])  # as pip
    except OSError as exc:
        raise ValueError(f"cannot read {shown}: {exc.strerror}") from exc
    except (UnicodeError, SyntaxError) as exc:
        raise ValueError(
            f"cannot read {shown}: {exc}; save it as UTF-8, or begin it with the encoding that it "
            "has (# -*- coding: latin-1 -*-)"
        ) from exc


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield lines, joined and without comments as in pip, with their first line's number."""
    joined, start = "", 0
    for number, raw in enumerate([*text.splitlines(), ""], 1):
        start = start or number
        is_comment = raw.lstrip().startswith("#")
        if raw.endswith("\\") and not is_comment:
            joined += raw[:-1]
            continue
        line = _COMMENT.sub("", joined + ("" if is_comment else raw)).strip()
        if line:
            yield start, line
        joined, start = "", 0


def _fill_in_variables(text: str) -> str:
    """Fill in ``${NAME}`` from the environment, in pip's notation only; unset names stay."""
    return _VARIABLE.sub(lambda match: os.environ.get(match[1], match[0]), text)


# --- The requirements that a ``pyproject.toml`` declares: dependencies, extras, dependency groups


class PyprojectReader:
    """Reads the requirements of one ``pyproject.toml`` or script."""

    def __init__(self, project: UvProject, taken: RequirementReader) -> None:
        self.project, self.taken, self.problems = project, taken, taken.problems
        self.shown = shorten_path(project.file, taken.root)
        self._referenced: list[str] = []  # the extras, "" for the project itself, that it refers to

    def read(self) -> None:
        """Read the dependencies and extras, or only the groups (PEP 735) where any are named."""
        project, root = self.project, self.taken.root
        try:
            data = project.document if project.is_script else toml.read(project.file)
        except ConfigError as exc:
            self.problems.append(f"environment.requirements: {exc.message}")
            return
        table = toml.get_table(data, "project")
        if project.is_script:
            lines = self._list_lines(table.get("dependencies"), "dependencies")
        else:
            name = canonicalize_name(str(table.get("name", "")))
            lines = self._read_parts(data)
            if name not in map(canonicalize_name, toml.get_table(data, "tool", "uv", "sources")):
                lines = [*self._expand(table, name, lines)]  # else uv takes it from that folder
            itself = self._referenced
            project = replace(
                project,
                document=data,
                dependencies=project.dependencies or bool(itself),
                extras=tuple(dict.fromkeys((*project.extras, *filter(None, itself)))),
                excluded=(str(table.get("name")),) if itself else (),
            )
        texts = tuple(line.text for line in lines)
        self.problems += list_faults(project, self.taken.target, root)
        project = replace(project, requirements=texts)
        by_uv = self.taken.leave_to_uv(project, list_names(texts))
        self.taken.lines += [replace(line, by_uv=by_uv) for line in lines]

    def _read_parts(self, data: toml.Table) -> list[RequirementLine]:
        if self.project.groups:
            return [line for name in self.project.groups for line in self._read_group(data, name)]
        problem = _describe_foreign_dependencies(data, self.shown)
        if not problem and not isinstance(data["project"], dict):
            problem = f"{self.shown}: project is not a table"
        if problem:
            self.problems.append(problem)
            return []
        table = toml.get_table(data, "project")
        return [
            line for part in ("", *self.project.extras) for line in self._read_part(table, part)
        ]

    def _read_part(self, project: toml.Table, extra: str) -> list[RequirementLine]:
        if not extra:
            if "dependencies" in toml.get_list(project, "dynamic"):
                self.problems.append(
                    f"{self.shown}: its dependencies are dynamic, only a build knows them; "
                    f"name the folder instead of the file to install the project with them"
                )
            return self._list_lines(project.get("dependencies", []), "project.dependencies")
        extras = toml.get_table(project, "optional-dependencies")
        spellings = {canonicalize_name(name): name for name in extras}
        name = spellings.get(canonicalize_name(extra))
        if name is None:
            self.problems.append(f"{self.shown}: no extra {extra!r}; {_list_known(extras)}")
            return []
        return self._list_lines(extras[name], f"project.optional-dependencies.{name}")

    def _read_group(self, data: toml.Table, group: str) -> list[RequirementLine]:
        groups: Mapping[str, Any] = toml.get_table(data, "dependency-groups")
        if canonicalize_name(group) not in map(canonicalize_name, groups):
            self.problems.append(
                f"{self.shown}: no dependency group {group!r}; {_list_known(groups)}"
            )
            return []
        try:
            requirements = list(dependency_groups.resolve_dependency_groups(groups, group))
        except (ValueError, TypeError, LookupError, ExceptionGroup) as exc:
            self.problems.append(f"{self.shown}: dependency group {group!r}: {_join_messages(exc)}")
            return []
        return self._list_lines(requirements, f"dependency-groups.{group}")

    def _list_lines(self, requirements: object, key: str) -> list[RequirementLine]:
        origin, base = f"{self.shown}: {key}", self.project.file.parent
        if isinstance(requirements, list) and all(isinstance(one, str) for one in requirements):
            return [
                RequirementLine(text=text, origin=origin, base=base, metadata=True)
                for text in requirements
            ]
        self.problems.append(f"{origin}: must be a list of strings")
        return []

    def _expand(
        self, project: toml.Table, name: NormalizedName, lines: Iterable[RequirementLine]
    ) -> Iterator[RequirementLine]:
        """Expand references of a project to itself: an index may have a stranger's package."""
        nodes = {key: str(value) for key, value in self.taken.target.environment().items()}
        for line in lines:
            if name not in list_names([line.text]):
                yield line
                continue
            reference = Requirement(line.text)
            if reference.marker and not reference.marker.evaluate(nodes):
                continue
            for extra in ("", *sorted(reference.extras)):
                if extra not in self._referenced:  # so a circle ends
                    self._referenced.append(extra)
                    yield from self._expand(project, name, self._read_part(project, extra))


def _list_known(names: Iterable[str]) -> str:
    return f"there are {', '.join(sorted(names)) or 'none'}"


def _join_messages(exc: BaseException) -> str:
    return "; ".join(map(_join_messages, getattr(exc, "exceptions", ()))) or str(exc)
