"""Reading the entries of ``[environment]``, line by line, into what a spec consists of."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from bundle.redaction.secrets import without_url_secrets

from ..config import foreign_files, inline_script
from ..config.load import Config
from ..core.errors import ConfigError
from ..core.processes import Runner
from . import located, uv_lock, uv_settings
from .indexes import Indexes, is_true
from .located import SourceReader
from .pyproject import PyprojectReader
from .requirement_line import (
    RequirementLine,
    expand_user,
    normalize_requirement,
    read_hashes,
    relative,
)
from .requirements import RequirementReader, refuse_editable
from .source_builds import NEED_NVCC, is_folder, prebuilt
from .uv_lock import UvLock
from .uv_project import UvProject, parse_entry, script_project

_PYLOCK = re.compile(r"(.*/)?pylock(\.[^./]+)?\.toml")
_FILE = re.compile(r"[^\s\[\];<>=!~@]+\.(txt|in)")
_SCRIPT = re.compile(r"[^\s\[\];<>=!~@]+\.py")
_CONDA_NAMES = {"pytorch": "torch"}
"""Packages of conda that have another name in a package index."""
_CONDA = re.compile(r"([\w.-]+)=(\d[^=\s]*)(=\S+)?\s*$")
"""A line of `conda list --export`: package, version, build."""
_INLINE = "environment.requirements"
"""Origin of a requirement that is written in the settings themselves."""


class SpecReader:
    """Sorts lines into requirements, constraints and sources."""

    def __init__(self, config: Config, python: str, run: Runner) -> None:
        self.config = config
        self.root = config.root
        self.lines = RequirementReader(config.root, python)
        self.problems = self.lines.problems
        skipped = [config.root / name for name in config.project.outputs]
        if config.environment.offline_root:
            skipped.append(config.environment.offline_root)
        self.located = SourceReader(self.lines, skipped=skipped, run=run)
        self.requirements: list[str] = []
        self.constraints: list[str] = []
        self.remarks: list[str] = []
        self.uv_lock: UvLock | None = None
        self.uv_project: UvProject | None = None

    def read(self) -> Path | None:
        """Read everything; return the lock that the user supplied in place of requirements."""
        entries = self.config.environment.requirements
        for entry in entries:
            if _PYLOCK.fullmatch(entry):
                return self._supplied_lock(entry, alone=len(entries) == 1)
        self.uv_lock, problems = uv_lock.read_entries(entries, self.root)
        self.problems += problems
        if self.uv_lock is None:
            self._read_entries(entries)
        return None

    def _read_entries(self, entries: tuple[str, ...]) -> None:
        for entry in entries:
            self._read_entry(entry, _INLINE, constraint=False)
        if self.uv_lock:  # that of the script which is all that is asked for
            return
        for entry in self.config.environment.constraints:
            self._read_entry(entry, "environment.constraints", constraint=True)
        for place in self.config.environment.find_links:
            if "://" not in place and not is_folder(place):
                self.problems.append(f"environment.find-links: no folder that can be read: {place}")
        self._read_settings_around()
        for line in sorted(self.lines.lines, key=lambda line: line.constraint):
            self._add_line(line)
        self._refuse_empty(entries)
        projects = [*self.lines.uv_projects.values()]
        self.uv_project = projects[0] if projects else None
        if len(projects) > 1:
            keys = "; ".join(key for project in projects for key in project.keys)
            self.problems.append(
                "several projects have settings that only uv honours, and each means its own: "
                f"{keys}; make them one project or one workspace of uv"
            )

    def of_uv(self) -> dict[str, object]:
        """Return what else of uv's world determines a lock, for the digest."""
        content: dict[str, object] = {}
        for key, used in (("uv-lock", self.uv_lock), ("uv-project", self.uv_project)):
            if used is not None and not self.problems:
                places = [
                    [os.path.relpath(path, self.root), self.located.content_digest(path)]
                    for path in used.local_sources()
                    if path.exists()
                ]
                content[key] = [used.identity(self.root), places]
        return content

    @property
    def indexes(self) -> Indexes:
        """Return the places of the requirement files and of the settings.

        Where a folder has a wheel of a package that would else be built, its wheels alone count.
        """
        environment = self.config.environment
        wheels = prebuilt(environment.find_links)
        named = map(canonicalize_name, environment.no_build_isolation)
        only = tuple(sorted(wheels & ({*named} | NEED_NVCC)))
        own = Indexes(find_links=environment.find_links, only_binary=only)
        return self.lines.indexes.plus(own)

    def portable(self, text: str) -> str:
        """Return a text with this project's path replaced, so that the digest does not vary."""
        return text.replace(self.root.as_uri(), "file://.").replace(str(self.root), ".")

    def _supplied_lock(self, entry: str, *, alone: bool) -> Path:
        path = self.root / expand_user(entry)
        if not alone:
            self.problems.append(
                f"environment.requirements: {entry} is a complete lock and must stand alone; "
                "drop the other entries, or name what the lock was made from instead"
            )
        if not path.is_file():
            self.problems.append(f"environment.requirements: no such file: {entry}")
        return path

    def _read_entry(self, entry: str, key: str, *, constraint: bool) -> None:
        path = self.root / expand_user(entry)
        project = None if constraint else parse_entry(entry, self.root)
        block = None if constraint else self._read_block(entry, path)
        if entry.startswith(("-e ", "--editable")):
            self.problems.append(f"{key}: {refuse_editable(entry)}")
        elif project is not None:
            PyprojectReader(project, self.lines).read(origin=key)
        elif _FILE.fullmatch(entry) or _is_file_with_spaces(path):
            self.lines.read_file(path, origin=key, constraint=constraint)
        elif block is not None:
            self._read_script(path, block)
        elif entry.startswith("-"):
            self.problems.append(f"{key}: {entry}: options belong in a requirement file")
        else:
            line = RequirementLine(text=entry, origin=key, base=self.root, constraint=constraint)
            self.lines.lines.append(line)

    def _read_block(self, entry: str, path: Path) -> Mapping[str, Any] | None:
        """Return the block of a script (PEP 723) that an entry names; None if it names none."""
        try:
            return inline_script.read(path) if _SCRIPT.fullmatch(entry) else None
        except ConfigError as exc:
            self.problems.append(f"environment.requirements: {exc.message}")
            return {}

    def _read_script(self, script: Path, block: Mapping[str, Any]) -> None:
        """Read a script, or its lock if the script is the only entry in the settings."""
        lock = uv_lock.read_script_lock(script, block)
        environment = self.config.environment
        if lock and len(environment.requirements) == 1 and not environment.constraints:
            self.uv_lock = lock
            return
        if lock:
            self.remarks.append(
                f"{lock.file.name} does not count: it is a complete lock, and the settings ask for "
                f"more than {relative(script, self.root)}"
            )
        PyprojectReader(script_project(script, block), self.lines).read(origin=_INLINE)

    def _read_settings_around(self) -> None:
        """Apply uv's settings in the project's folder, which hold for requirement files."""
        asked = (line for line in self.lines.lines if not line.constraint and not line.metadata)
        if all(line.origin == _INLINE for line in asked):
            return
        file = self.root / "pyproject.toml"
        project = UvProject(file=file, document=uv_settings.read(file), dependencies=False)
        self.problems += uv_settings.refuse(project.tables, self.root)
        keys = uv_settings.list_keys(project.tables, (), self.root)
        if keys:
            self.lines.leave_to_uv(replace(project, keys=keys))

    @property
    def require_hashes(self) -> str:
        """Return what asks for a hash of every file: a line or a variable; empty for nothing."""
        for name in ("PIP_REQUIRE_HASHES", "UV_REQUIRE_HASHES"):
            if is_true(os.environ.get(name, "")):
                return name
        return self.lines.require_hashes

    def _refuse_empty(self, entries: tuple[str, ...]) -> None:
        """Report files without any requirement, as a failed export leaves them."""
        if self.problems or not all(line.constraint for line in self.lines.lines):
            return
        empty = "requirements = [] in place of it, for an environment without packages"
        files = [entry for entry in entries if _FILE.fullmatch(entry)]
        if files:
            self.problems.append(
                f"environment.requirements: {', '.join(files)}: no requirement in it; write {empty}"
            )
        for entry in entries:
            if parse_entry(entry, self.root) is None:
                continue
            path = re.split(r"[\[:]", entry)[0]
            self.problems.append(
                f"environment.requirements: {entry} declares no dependencies; list them in "
                f"[project] dependencies, name an extra or a group that has some "
                f'("{path}[train]", "{path}:train"), or write {empty}'
            )

    def _add_line(self, line: RequirementLine) -> None:
        try:
            line = replace(line, hashes=read_hashes(line))
        except ValueError as exc:
            self.problems.append(f"{line.origin}: {exc}")
            return
        parsed = self._parse(line)
        if parsed is not None and parsed.url and not line.constraint:
            wheel = self.located.read(parsed, line)
            self.requirements += [] if wheel is None else [wheel]
        elif parsed is not None:
            self.located.allow_hashes(parsed.name, line.hashes)
            taken = self.constraints if line.constraint else self.requirements
            taken.append(normalize_requirement(parsed))
        asked = "" if line.constraint else self.require_hashes
        if asked and not line.hashes:
            self.problems.append(
                f"{line.origin}: {without_url_secrets(line.text)} has no --hash=sha256:..., which "
                f"{asked} requires"
            )

    def _parse(self, line: RequirementLine) -> Requirement | None:
        problem = ""
        if not line.metadata and (line.constraint or not located.is_archive(line.text)):
            problem = foreign_files.misread(line.text, (line.base, self.root))
        try:
            parsed = located.parse(line)
        except InvalidRequirement as exc:
            problem = problem or _describe_malformed(line.text, exc)
        if problem:
            self.problems.append(f"{line.origin}: {problem}")
            return None
        if line.by_uv:
            parsed.url = None  # uv reads the place from the file
        return parsed


def _is_file_with_spaces(path: Path) -> bool:
    return path.suffix in (".txt", ".in") and " " in path.name and path.is_file()


def _describe_malformed(text: str, exc: InvalidRequirement) -> str:
    conda = _CONDA.match(text)
    why = located.first_line(exc)
    if conda:
        wanted = f"write {_CONDA_NAMES.get(conda[1], conda[1])}=={conda[2]}"
        if conda[1] == "python":
            wanted = f'set environment.python = "{".".join(conda[2].split(".")[:2])}" instead'
        why = f"one = is conda's notation; {wanted}"
    return f"{text!r}: {why}"
