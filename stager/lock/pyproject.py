"""The requirements that a ``pyproject.toml`` declares: dependencies, extras, dependency groups."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeGuard

from packaging import dependency_groups
from packaging.errors import ExceptionGroup
from packaging.utils import canonicalize_name

from ..core import toml
from ..core.errors import ConfigError
from . import tool_settings
from .requirement_line import RequirementLine
from .uv_project import UvProject, script_project

_ENTRY = re.compile(r"(?P<path>.*pyproject\.toml)(\[(?P<extras>.*)\]|:(?P<groups>.*))?")
_SELF_REFERENCE = re.compile(r"\s*([\w.-]+)\s*\[([^\]]*)\]\s*")


class PyprojectReader:
    """Collects the requirements of one ``pyproject.toml``, and the problems in it."""

    def __init__(self, path: Path, *, shown: str, python: str) -> None:
        """Start empty.

        Args:
            path: the file.
            shown: its name in messages.
            python: the environment's Python, ``major.minor``.
        """
        self.path = path
        self.shown = shown
        self.python = python
        self.lines: list[RequirementLine] = []
        self.problems: list[str] = []
        self.uv_project: UvProject | None = None

    def read(self, extras: Sequence[str], groups: Sequence[str], *, origin: str) -> bool:
        """Read the dependencies and the extras, or only the groups where any are named.

        Args:
            extras: names of extras, added to ``[project] dependencies``.
            groups: names of dependency groups (PEP 735), which stand alone.
            origin: where the file was named, for the message that it cannot be read.

        Returns:
            False if the file could not be read.
        """
        try:
            data = toml.read(self.path)
        except ConfigError as exc:
            self.problems.append(f"{origin}: {exc.message}")
            return False
        for group in groups:
            self._read_group(data, group)
        if not groups:
            self._read_project(data, extras)
        self.problems += tool_settings.refuse(data, self.path, shown=self.shown)
        names = tool_settings.names(line.text for line in self.lines)
        keys = tool_settings.uv_keys(data, self.path, shown=self.shown, requested=names)
        project = UvProject(
            file=self.path,
            keys=tuple(keys),
            document=data,
            dependencies=not groups,
            extras=tuple(extras),
            groups=tuple(groups),
        )
        self._finish(project)
        return True

    def read_script(self, block: Mapping[str, Any]) -> None:
        """Read the block of a script (PEP 723)."""
        self._add(block.get("dependencies", []), "dependencies")
        document = script_project(self.path, block)
        names = tool_settings.names(line.text for line in self.lines)
        keys = tool_settings.script_keys(document, shown=self.shown, requested=names)
        self._finish(UvProject(file=self.path, keys=tuple(keys), document=document))

    def _finish(self, project: UvProject) -> None:
        """Check what holds for the whole file, and leave it to uv if only uv honours all of it."""
        data = project.document
        for problem in (
            tool_settings.wrong_python(data, self.python, shown=self.shown),
            tool_settings.other_environments(data, self.python, shown=self.shown),
            tool_settings.conflicting(data, project.extras, project.groups),
        ):
            if problem:
                self.problems.append(problem)
        if project.keys:
            self.lines = [replace(line, by_uv=True) for line in self.lines]
            texts = tuple(line.text for line in self.lines)
            self.uv_project = replace(project, requirements=texts)

    def _read_project(self, data: Mapping[str, Any], extras: Sequence[str]) -> None:
        """Read ``[project] dependencies`` and the named extras."""
        problem = tool_settings.no_dependencies(data, self.path, shown=self.shown)
        if problem:
            self.problems.append(problem)
            return
        project = data["project"]
        if not isinstance(project, dict):
            self.problems.append(f"{self.shown}: project is not a table")
            return
        if tool_settings.is_dynamic(project):
            self.problems.append(
                f"{self.shown}: its dependencies are dynamic, only a build knows them; "
                f"name the folder instead of the file to install the project with them"
            )
        self._add(project.get("dependencies", []), "project.dependencies")
        for extra in extras:
            self._read_extra(project, extra)

    def _read_extra(self, project: Mapping[str, Any], extra: str) -> None:
        """Read one extra, and the extras of the same project that it names."""
        extras = tool_settings.table(project, "optional-dependencies")
        spellings = {canonicalize_name(name): name for name in extras}
        name = spellings.get(canonicalize_name(extra))
        if name is None:
            self.problems.append(f"{self.shown}: no extra {extra!r}; {_available(extras)}")
            return
        start = len(self.lines)
        self._add(extras[name], f"project.optional-dependencies.{name}")
        others = {key: value for key, value in extras.items() if key != name}  # so a circle ends
        project_name = canonicalize_name(str(project.get("name", "")))
        for line in self.lines[start:]:
            # A project may name its own extras: all = ["this-project[train,plot]"].
            reference = _SELF_REFERENCE.fullmatch(line.text)
            if not reference or canonicalize_name(reference[1]) != project_name:
                continue
            self.lines.remove(line)
            for referenced in reference[2].split(","):
                rest = {**project, "optional-dependencies": others}
                self._read_extra(rest, referenced.strip())

    def _read_group(self, data: Mapping[str, Any], group: str) -> None:
        groups = tool_settings.table(data, "dependency-groups")
        known = {canonicalize_name(name) for name in groups}
        if canonicalize_name(group) not in known:
            self.problems.append(
                f"{self.shown}: no dependency group {group!r}; {_available(groups)}"
            )
            return
        try:
            requirements = list(dependency_groups.resolve_dependency_groups(groups, group))
        except (ValueError, TypeError, LookupError, ExceptionGroup) as exc:
            self.problems.append(f"{self.shown}: dependency group {group!r}: {_messages(exc)}")
            return
        self._add(requirements, f"dependency-groups.{group}")

    def _add(self, requirements: object, key: str) -> None:
        origin = f"{self.shown}: {key}"
        if not _is_list_of_strings(requirements):
            self.problems.append(f"{origin}: must be a list of strings")
            return
        base = self.path.parent
        for text in requirements:
            self.lines.append(RequirementLine(text=text, origin=origin, base=base, metadata=True))


def parse_entry(entry: str) -> tuple[str, list[str], list[str]]:
    """Return path, extras and groups of ``pyproject.toml[extra,...]`` or ``...:group,...``."""
    match = _ENTRY.fullmatch(entry)
    if match is None:
        return entry, [], []
    return match["path"], _split(match["extras"]), _split(match["groups"])


def _split(names: str | None) -> list[str]:
    if not names:
        return []
    return [name.strip() for name in names.split(",")]


def _is_list_of_strings(value: object) -> TypeGuard[list[str]]:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _available(names: Mapping[str, object]) -> str:
    if not names:
        return "there are none"
    return "there are " + ", ".join(sorted(names))


def _messages(exc: BaseException) -> str:
    """Return the message of an exception, or those of all members of a group."""
    members = getattr(exc, "exceptions", ())
    if not members:
        return str(exc)
    return "; ".join(_messages(member) for member in members)
