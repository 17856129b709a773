"""Requirement files in pip's format, and the tables of a ``pyproject.toml``, read line by line.

The format is the one pip documents ("Requirements File Format"): comments, line continuations,
``${NAME}`` from the environment, nested ``-r`` and ``-c``, index options. What pip would do with a
line is decided in :mod:`stager.lock.spec`; here a line keeps its text, its file and its number.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from packaging import dependency_groups
from packaging.errors import ExceptionGroup
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from ..config import foreign_files
from ..core import toml
from ..core.errors import ConfigError
from . import tool_settings
from .indexes import Indexes

_COMMENT = re.compile(r"(^|\s+)#.*$")
_VARIABLE = re.compile(r"\$\{([A-Z0-9_]+)\}")
_SHA256 = re.compile(r"--hash[=\s]\s*sha256:(\S+)")
_PER_LINE = re.compile(r"\s+(--[a-z-]+.*)$")
_PYPROJECT = re.compile(r"(?P<path>.*pyproject\.toml)(\[(?P<extras>.*)\]|:(?P<groups>.*))?")
_OPTIONS = {
    "-r": "--requirement",
    "-c": "--constraint",
    "-e": "--editable",
    "-i": "--index-url",
    "-f": "--find-links",
    "--pypi-url": "--index-url",
}
_WITHOUT_VALUE = ("--no-index", "--pre", "--require-hashes", "--prefer-binary")
# Options that change nothing here: hashes are always required, and kept in the lock.
_WITHOUT_EFFECT = ("--require-hashes", "--prefer-binary", "--use-feature")

EDITABLE = (
    "an editable install points at files on this machine, which the nodes do not have; "
    "ship the code as [project], or name its folder without -e to install it"
)


@dataclass(frozen=True, kw_only=True)
class Line:
    """One requirement or constraint, as written."""

    text: str
    """The requirement, without comment and without options."""
    origin: str
    """Where it stands, for messages: ``requirements.txt:3`` or a key path."""
    base: Path
    """The folder that relative paths in it start from."""
    metadata: bool = False
    """Whether it stands in a ``pyproject.toml``, where no files are named."""
    hashes: tuple[str, ...] = ()
    """The sha256 of each file that may be taken for it; any file where there is none."""


class RequirementReader:
    """Collects what a set of requirement files says; problems are collected too, not raised."""

    def __init__(self, root: Path, python: str) -> None:
        """Start empty.

        Args:
            root: what file names in messages are relative to.
            python: the environment's Python, ``major.minor``.
        """
        self.root = root
        self.python = python
        self.requirements: list[Line] = []
        self.constraints: list[Line] = []
        self.indexes = Indexes()
        self.sources: list[Path] = []
        self.problems: list[str] = []
        self._seen: set[tuple[Path, bool]] = set()

    def read_file(self, path: Path, *, asked: str, constraint: bool = False) -> None:
        """Read one requirement file and all it includes.

        Args:
            path: the file.
            asked: where it was named, for the message that it is missing.
            constraint: whether its lines limit versions only.
        """
        path = Path(os.path.normpath(path))
        if (path, constraint) in self._seen:
            return  # so a circle of includes ends
        self._seen.add((path, constraint))
        what_to_do = foreign_files.known(path.name)
        if what_to_do:
            self.problems.append(
                f"{asked}: {self._shown(path)} is not a requirement file; {what_to_do}"
            )
            return
        try:
            text = path.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as exc:
            why = exc.strerror if isinstance(exc, OSError) else "not UTF-8"
            self.problems.append(f"{asked}: cannot read {self._shown(path)}: {why}")
            return
        if path not in self.sources:
            self.sources.append(path)
        for number, line in _logical_lines(text):
            origin = f"{self._shown(path)}:{number}"
            if line.startswith("-"):
                self._option(line, origin, path.parent, constraint=constraint)
                continue
            rest = _PER_LINE.search(line)
            hashes = self._hashes(rest[1], origin) if rest else ()
            text_alone = line[: rest.start()] if rest else line
            found = Line(text=text_alone.strip(), origin=origin, base=path.parent, hashes=hashes)
            (self.constraints if constraint else self.requirements).append(found)

    def read_pyproject(self, entry: str, base: Path, *, asked: str) -> None:
        """Read dependencies from ``pyproject.toml``, ``...[extra,...]`` or ``...:group,...``.

        The plain form gives ``[project] dependencies``, extras add to it, and groups
        (PEP 735) stand alone.
        """
        match = _PYPROJECT.fullmatch(entry)
        path = base / match["path"] if match else base / entry
        try:
            data = toml.read(path)
        except ConfigError as exc:
            self.problems.append(f"{asked}: {exc.message}")
            return
        if path not in self.sources:
            self.sources.append(path)
        shown, start = self._shown(path), len(self.requirements)
        groups = match["groups"] if match else None
        if groups:
            for group in groups.split(","):
                self._group(data, group.strip(), shown, path.parent)
        else:
            self._declared(data, path, (match["extras"] if match else None) or "")
        asked_for = tool_settings.names(line.text for line in self.requirements[start:])
        refused = tool_settings.refuse(data, path, shown=shown, asked=asked_for)
        refused.append(tool_settings.wrong_python(data, self.python, shown=shown))
        self.problems += [message for message in refused if message]

    def _declared(self, data: Mapping[str, Any], path: Path, extras: str) -> None:
        """Read ``[project] dependencies`` and the extras that are named."""
        shown = self._shown(path)
        elsewhere = tool_settings.no_dependencies(data, path, shown=shown)
        if elsewhere:
            self.problems.append(elsewhere)
            return
        project = data["project"]
        if not isinstance(project, dict):
            self.problems.append(f"{shown}: project is no table")
            return
        if tool_settings.is_dynamic(project):
            self.problems.append(
                f"{shown}: its dependencies are dynamic, only a build knows them; "
                f"name the folder instead of the file to install the project with them"
            )
        self._add(project.get("dependencies", []), f"{shown}: project.dependencies", path.parent)
        for extra in extras.split(",") if extras else []:
            self._extra(project, extra.strip(), shown, path.parent)

    def _add(self, listed: object, origin: str, base: Path) -> None:
        if not isinstance(listed, list) or not all(isinstance(item, str) for item in listed):
            self.problems.append(f"{origin}: must be a list of strings")
            return
        self.requirements.extend(
            Line(text=item, origin=origin, base=base, metadata=True) for item in listed
        )

    def _extra(self, project: Mapping[str, Any], extra: str, shown: str, base: Path) -> None:
        extras = project.get("optional-dependencies", {})
        names = {canonicalize_name(name): name for name in extras}
        found = names.get(canonicalize_name(extra))
        if found is None:
            self.problems.append(f"{shown}: no extra {extra!r}; {_listed(extras)}")
            return
        start = len(self.requirements)
        self._add(extras[found], f"{shown}: project.optional-dependencies.{found}", base)
        own = canonicalize_name(str(project.get("name", "")))
        for line in self.requirements[start:]:
            # A project may name its own extras: all = ["this-project[train,plot]"].
            self_reference = re.fullmatch(r"\s*([\w.-]+)\s*\[([^\]]*)\]\s*", line.text)
            if self_reference and canonicalize_name(self_reference[1]) == own:
                self.requirements.remove(line)
                for name in self_reference[2].split(","):
                    self._extra(
                        {**project, "optional-dependencies": _without(extras, found)},
                        name.strip(),
                        shown,
                        base,
                    )

    def _group(self, data: Mapping[str, Any], group: str, shown: str, base: Path) -> None:
        groups = data.get("dependency-groups", {})
        if canonicalize_name(group) not in {canonicalize_name(name) for name in groups}:
            self.problems.append(f"{shown}: no dependency group {group!r}; {_listed(groups)}")
            return
        try:
            listed = dependency_groups.resolve_dependency_groups(groups, group)
        except (ValueError, TypeError, LookupError, ExceptionGroup) as exc:
            self.problems.append(f"{shown}: dependency group {group!r}: {_flat(exc)}")
        else:
            self._add(list(listed), f"{shown}: dependency-groups.{group}", base)

    def _option(self, line: str, origin: str, base: Path, *, constraint: bool) -> None:
        try:
            words = shlex.split(line, comments=False)
        except ValueError as exc:
            self.problems.append(f"{origin}: {exc}")
            return
        while words:
            name, value = _next_option(words)
            if value is None:
                self.problems.append(f"{origin}: {name} needs a value")
            elif name in ("--requirement", "--constraint"):
                target = base / _expand(value)
                if "://" in value:
                    self.problems.append(
                        f"{origin}: {value} is on a server; save a copy beside this file"
                    )
                else:
                    self.read_file(
                        target, asked=origin, constraint=constraint or name == "--constraint"
                    )
            elif name == "--editable":
                self.problems.append(f"{origin}: -e {value} is refused: {EDITABLE}")
            elif not self._index_option(name, value, base) and name not in _WITHOUT_EFFECT:
                self.problems.append(f"{origin}: the option {name} is not known here")

    def _index_option(self, name: str, value: str, base: Path) -> bool:
        """Take an option that says where to look; whether it was one."""
        have = self.indexes
        if name == "--index-url":
            self.indexes = replace(have, index_url=value)
        elif name == "--extra-index-url":
            self.indexes = have.plus(Indexes(extra_index_urls=(value,)))
        elif name == "--find-links":
            self.indexes = have.plus(Indexes(find_links=(_place(value, base),)))
        elif name == "--trusted-host":
            self.indexes = have.plus(Indexes(trusted_hosts=(value,)))
        elif name == "--only-binary":
            self.indexes = have.plus(Indexes(only_binary=tuple(value.split(","))))
        elif name == "--no-binary":
            self.indexes = have.plus(Indexes(no_binary=tuple(value.split(","))))
        elif name == "--no-index":
            self.indexes = replace(have, no_index=True)
        elif name == "--pre":
            self.indexes = replace(have, pre=True)
        else:
            return False
        return True

    def _hashes(self, options: str, origin: str) -> tuple[str, ...]:
        """Take the hashes of a requirement; any other option would be lost silently."""
        hashes = tuple(value.lower() for value in _SHA256.findall(options))
        if "--hash" in options and not hashes:
            self.problems.append(f"{origin}: only hashes of sha256 can be checked")
        for word in options.split():
            if word.startswith("--") and not word.startswith("--hash"):
                self.problems.append(
                    f"{origin}: the option {word.partition('=')[0]} of a single requirement "
                    "is not supported"
                )
        return hashes

    def _shown(self, path: Path) -> str:
        try:
            return str(path.relative_to(self.root))
        except ValueError:
            return str(path)


def normal(requirement: Requirement) -> str:
    """One spelling for each requirement, the same with every version of packaging."""
    extras = extras_of(requirement.extras)
    marker = f" ; {requirement.marker}" if requirement.marker else ""
    where = f" @ {requirement.url}" if requirement.url else ""
    versions = ",".join(sorted(str(one) for one in requirement.specifier))
    return f"{canonicalize_name(requirement.name)}{extras}{versions}{where}{marker}"


def extras_of(names: Iterable[str]) -> str:
    """The extras as they follow a name, ``[a,b]``; nothing where there are none."""
    listed = ",".join(sorted(canonicalize_name(name) for name in names if name))
    return f"[{listed}]" if listed else ""


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Lines with continuations joined and comments gone, with the number they start at.

    As in pip, a comment line ends a continuation, and a comment is only one after white space.
    """
    pending: list[str] = []
    start = 0
    for number, raw in enumerate([*text.splitlines(), ""], 1):
        start = start if pending else number
        is_comment = raw.lstrip().startswith("#")
        if raw.endswith("\\") and not is_comment:
            pending.append(raw[:-1])
            continue
        joined = "".join([*pending, "" if is_comment else raw])
        pending = []
        line = _COMMENT.sub("", joined).strip()
        if line:
            yield start, line


def _next_option(words: list[str]) -> tuple[str, str | None]:
    """Take one option off the front of a line; its value is None where one is missing."""
    word = words.pop(0)
    name, equals, value = word.partition("=")
    if re.match(r"-[a-zA-Z][^=]", word) and not word.startswith("--"):
        name, equals, value = word[:2], "=", word[2:].removeprefix("=")
    name = _OPTIONS.get(name, name)
    if name in _WITHOUT_VALUE:
        return name, ""
    if equals:
        return name, value
    return name, words.pop(0) if words else None


def _expand(text: str) -> str:
    """Fill in ``${NAME}`` from the environment, in pip's notation only; unset ones stay."""
    return _VARIABLE.sub(lambda match: os.environ.get(match[1], match[0]), text)


def _place(value: str, base: Path) -> str:
    """A ``--find-links`` place; a folder beside the file is meant as such, whoever reads it."""
    if "://" in value or "${" in value:
        return value
    return os.path.normpath(base / expanded(value))


def expanded(text: str) -> Path:
    """Return a path with a leading ``~`` filled in, where there is such a user."""
    return Path(os.path.expanduser(text))  # noqa: PTH111 - Path's own raises for an unknown one


def _listed(names: Mapping[str, object]) -> str:
    return ("there are " + ", ".join(sorted(names))) if names else "there are none"


def _without(mapping: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in mapping.items() if name != key}


def _flat(exc: BaseException) -> str:
    """The message, with those of a group's members."""
    members = getattr(exc, "exceptions", ())
    return "; ".join(_flat(member) for member in members) or str(exc)
