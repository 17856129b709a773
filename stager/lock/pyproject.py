"""The requirements that a ``pyproject.toml`` declares: dependencies, extras, dependency groups."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeGuard

from packaging import dependency_groups
from packaging.errors import ExceptionGroup
from packaging.markers import Marker
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from ..core import toml
from ..core.errors import ConfigError
from . import tool_settings
from .requirement_line import RequirementLine
from .uv_project import UvProject, script_project

_ENTRY = re.compile(r"(?P<path>.*pyproject\.toml)(\[(?P<extras>.*)\]|:(?P<groups>.*))?")


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
        itself = self._replace_self_references(data)
        self.problems += tool_settings.refuse(data, self.path, shown=self.shown)
        names = tool_settings.names(line.text for line in self.lines)
        keys = tool_settings.uv_keys(data, self.path, shown=self.shown, requested=names)
        project = UvProject(
            file=self.path,
            keys=tuple(keys),
            document=data,
            dependencies=not groups or bool(itself),
            extras=tuple(dict.fromkeys((*extras, *filter(None, itself)))),
            groups=tuple(groups),
            excluded=(str(tool_settings.table(data, "project")["name"]),) if itself else (),
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
        self._read_dependencies(project)
        for extra in extras:
            self._read_extra(project, extra)

    def _read_dependencies(self, project: Mapping[str, Any]) -> None:
        """Read ``[project] dependencies``."""
        if tool_settings.is_dynamic(project):
            self.problems.append(
                f"{self.shown}: its dependencies are dynamic, only a build knows them; "
                f"name the folder instead of the file to install the project with them"
            )
        self._add(project.get("dependencies", []), "project.dependencies")

    def _read_extra(self, project: Mapping[str, Any], extra: str) -> None:
        """Read one extra."""
        extras = tool_settings.table(project, "optional-dependencies")
        spellings = {canonicalize_name(name): name for name in extras}
        name = spellings.get(canonicalize_name(extra))
        if name is None:
            self.problems.append(f"{self.shown}: no extra {extra!r}; {_available(extras)}")
            return
        self._add(extras[name], f"project.optional-dependencies.{name}")

    def _replace_self_references(self, data: Mapping[str, Any]) -> set[str]:
        """Put what a project's reference to itself stands for in its place.

        ``all = ["this-project[train,plot]"]`` means these extras of the project here. An index may
        have a stranger's package of that name.

        Returns:
            The extras that are named and hold on the nodes; an empty name for the project itself.
        """
        project = tool_settings.table(data, "project")
        name = canonicalize_name(str(project.get("name", "")))
        uv = tool_settings.table(tool_settings.table(data, "tool"), "uv")
        if name in map(canonicalize_name, tool_settings.table(uv, "sources")):
            return set()  # uv takes it from the folder that its source names
        pending = [(line, frozenset[str]()) for line in self.lines]
        self.lines = []
        seen: set[tuple[str, str]] = set()
        while pending:
            line, above = pending.pop(0)
            reference = _parse_reference(name, line.text)
            if reference is None:
                self.lines.append(line)
                continue
            own, self.lines = self.lines, []
            marker = str(reference.marker or "")
            # What lies above is in already, where no less holds: so a circle ends.
            named = [extra for extra in ("", *sorted(reference.extras)) if extra not in above]
            for extra in named:
                if (extra, marker) in seen:
                    continue
                seen.add((extra, marker))
                if extra:
                    self._read_extra(project, extra)
                else:
                    self._read_dependencies(project)
            found = [(_limit(one, marker), above.union(named)) for one in self.lines]
            pending = [*found, *pending]
            self.lines = own
        nodes = tool_settings.list_node_markers(self.python)
        return {extra for extra, marker in seen if not marker or Marker(marker).evaluate(nodes)}

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


def _parse_reference(name: str, text: str) -> Requirement | None:
    """Return a requirement if it is for the project of this name; None for any other."""
    try:
        requirement = Requirement(text)
    except InvalidRequirement:  # reported where the requirements are sorted
        return None
    return requirement if name and canonicalize_name(requirement.name) == name else None


def _limit(line: RequirementLine, marker: str) -> RequirementLine:
    """Return a line that holds only where a marker does as well."""
    if not marker:
        return line
    try:
        requirement = Requirement(line.text)
    except InvalidRequirement:
        return line
    both = f"({requirement.marker}) and ({marker})" if requirement.marker else marker
    requirement.marker = Marker(both)
    return replace(line, text=str(requirement))


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
