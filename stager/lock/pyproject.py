"""The requirements that a ``pyproject.toml`` declares: dependencies, extras, dependency groups."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeGuard

from packaging import dependency_groups
from packaging.errors import ExceptionGroup
from packaging.markers import Marker
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from ..core import toml
from ..core.errors import ConfigError
from . import tool_settings, uv_settings
from .requirement_line import RequirementLine, list_names, relative
from .requirements import RequirementReader
from .uv_project import UvProject


class PyprojectReader:
    """Reads the requirements of one ``pyproject.toml`` or script."""

    def __init__(self, project: UvProject, taken: RequirementReader) -> None:
        self.project = project
        self.shown = relative(project.file, taken.root)
        self.taken = taken
        self.problems = taken.problems

    def read(self, *, origin: str) -> None:
        """Read the dependencies and extras, or only the groups (PEP 735) where any are named."""
        if self.project.is_script:
            dependencies = self.project.document["project"]["dependencies"]
            self._finish(self._list_lines(dependencies, "dependencies"))
            return
        try:
            data = toml.read(self.project.file)
        except ConfigError as exc:
            self.problems.append(f"{origin}: {exc.message}")
            return
        if self.project.groups:
            lines = [
                line for group in self.project.groups for line in self._read_group(data, group)
            ]
        else:
            lines = self._read_project(data)
        lines, itself = self._replace_self_references(data, lines)
        self.project = replace(
            self.project,
            document=data,
            dependencies=self.project.dependencies or bool(itself),
            extras=tuple(dict.fromkeys((*self.project.extras, *filter(None, itself)))),
            excluded=(str(data["project"]["name"]),) if itself else (),
        )
        self._finish(lines)

    def _finish(self, lines: Sequence[RequirementLine]) -> None:
        """Check what concerns the whole file; leave a file with uv-only settings to uv."""
        root = self.taken.root
        self.problems += tool_settings.list_faults(self.project, self.taken.python, root)
        texts = tuple(line.text for line in lines)
        keys = uv_settings.list_keys(self.project.tables, list_names(texts), root)
        self.taken.lines += [replace(line, by_uv=bool(keys)) for line in lines]
        if keys:
            self.taken.leave_to_uv(replace(self.project, keys=keys, requirements=texts))

    def _read_project(self, data: Mapping[str, Any]) -> list[RequirementLine]:
        problem = tool_settings.no_dependencies(data, self.project.file, shown=self.shown)
        if not problem and not isinstance(data["project"], dict):
            problem = f"{self.shown}: project is not a table"
        if problem:
            self.problems.append(problem)
            return []
        parts = ("", *self.project.extras)
        return [line for part in parts for line in self._read_part(data["project"], part)]

    def _read_part(self, project: Mapping[str, Any], extra: str) -> list[RequirementLine]:
        """Read one extra; ``[project] dependencies`` if its name is empty."""
        if not extra:
            if "dependencies" in toml.listed(project, "dynamic"):
                self.problems.append(
                    f"{self.shown}: its dependencies are dynamic, only a build knows them; "
                    f"name the folder instead of the file to install the project with them"
                )
            return self._list_lines(project.get("dependencies", []), "project.dependencies")
        extras = toml.table(project, "optional-dependencies")
        spellings = {canonicalize_name(name): name for name in extras}
        name = spellings.get(canonicalize_name(extra))
        if name is None:
            self.problems.append(f"{self.shown}: no extra {extra!r}; {_list_known(extras)}")
            return []
        return self._list_lines(extras[name], f"project.optional-dependencies.{name}")

    def _read_group(self, data: Mapping[str, Any], group: str) -> list[RequirementLine]:
        groups = toml.table(data, "dependency-groups")
        if canonicalize_name(group) not in map(canonicalize_name, groups):
            self.problems.append(
                f"{self.shown}: no dependency group {group!r}; {_list_known(groups)}"
            )
            return []
        try:
            requirements = list(dependency_groups.resolve_dependency_groups(groups, group))
        except (ValueError, TypeError, LookupError, ExceptionGroup) as exc:
            self.problems.append(f"{self.shown}: dependency group {group!r}: {_messages(exc)}")
            return []
        return self._list_lines(requirements, f"dependency-groups.{group}")

    def _list_lines(self, requirements: object, key: str) -> list[RequirementLine]:
        origin, base = f"{self.shown}: {key}", self.project.file.parent
        if not _is_list_of_strings(requirements):
            self.problems.append(f"{origin}: must be a list of strings")
            return []
        return [
            RequirementLine(text=text, origin=origin, base=base, metadata=True)
            for text in requirements
        ]

    def _replace_self_references(
        self, data: Mapping[str, Any], lines: list[RequirementLine]
    ) -> tuple[list[RequirementLine], set[str]]:
        """Return lines with what a project's reference to itself stands for in its place.

        ``all = ["this-project[train,plot]"]`` means these extras of the project here. An index may
        have a stranger's package of that name.

        Returns:
            The lines, and the extras that are named and hold on the nodes; an empty name for the
            project itself.
        """
        project = toml.table(data, "project")
        name = canonicalize_name(str(project.get("name", "")))
        if name in map(canonicalize_name, toml.table(data, "tool", "uv", "sources")):
            return lines, set()  # uv takes it from the folder that its source names
        pending, kept = [(line, frozenset[str]()) for line in lines], []
        seen: set[tuple[str, str]] = set()
        while pending:
            line, above = pending.pop(0)
            if name not in list_names([line.text]):
                kept.append(line)
                continue
            reference = Requirement(line.text)
            marker = str(reference.marker or "")
            # What lies above is in already, where no less holds: so a circle ends.
            named = [extra for extra in ("", *sorted(reference.extras)) if extra not in above]
            new = [extra for extra in named if (extra, marker) not in seen]
            seen |= {(extra, marker) for extra in new}
            found = [one for extra in new for one in self._read_part(project, extra)]
            pending[:0] = [(_limit(one, marker), above.union(named)) for one in found]
        nodes = tool_settings.list_node_markers(self.taken.python)
        here = {extra for extra, marker in seen if not marker or Marker(marker).evaluate(nodes)}
        return kept, here


def _limit(line: RequirementLine, marker: str) -> RequirementLine:
    if not marker:
        return line
    try:
        requirement = Requirement(line.text)
    except InvalidRequirement:
        return line
    both = f"({requirement.marker}) and ({marker})" if requirement.marker else marker
    requirement.marker = Marker(both)
    return replace(line, text=str(requirement))


def _is_list_of_strings(value: object) -> TypeGuard[list[str]]:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _list_known(names: Iterable[str]) -> str:
    return f"there are {', '.join(sorted(names)) or 'none'}"


def _messages(exc: BaseException) -> str:
    members = getattr(exc, "exceptions", ())
    if not members:
        return str(exc)
    return "; ".join(_messages(member) for member in members)
