"""Reading the entries of ``[environment]``, line by line, into what a spec consists of."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from bundle.redaction.masking import without_url_secrets

from ..config import foreign_files, script_block
from ..config.load import Config
from ..core.errors import ConfigError
from ..core.processes import Runner
from . import located, tool_settings, uv_lock, uv_project
from .indexes import Indexes, is_true
from .located import LocatedRequirement, SourceReader
from .requirement_line import (
    RequirementLine,
    expand_user,
    format_extras,
    normalize_requirement,
    read_hashes,
)
from .requirements import RequirementReader, refuse_editable
from .source_builds import NEED_NVCC, is_folder, prebuilt
from .uv_lock import UvLock
from .uv_project import UvProject

_PYPROJECT = re.compile(r".*pyproject\.toml([\[:].*)?")
_PYLOCK = re.compile(r"(.*/)?pylock(\.[^./]+)?\.toml")
_FILE = re.compile(r"[^\s\[\];<>=!~@]+\.(txt|in)")
_SCRIPT = re.compile(r"[^\s\[\];<>=!~@]+\.py")
_HASH_IN_URL = re.compile(r"[#&]sha256=")
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
        self.located = SourceReader(
            config.root, python, skipped=skipped, run=run, problems=self.problems
        )
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
        if any(map(uv_lock.ENTRY.fullmatch, entries)):
            self.uv_lock, problems = uv_lock.read_entries(entries, self.root)
            self.lines.sources.append(self.uv_lock.file)
            self.problems += problems
            return None
        self.uv_lock = self._locked_script(entries)
        if self.uv_lock:
            return None
        for entry in entries:
            self._read_entry(entry, _INLINE, constraint=False)
        for entry in self.config.environment.constraints:
            self._read_entry(entry, "environment.constraints", constraint=True)
        self._refuse_missing_folders()
        self._refuse_uv_settings()
        for line in self.lines.requirements:
            self._add_requirement(line)
            self._refuse_without_hash(line)
        for line in self.lines.constraints:
            self._add_constraint(line)
        self._refuse_empty(entries)
        projects = [*self.lines.uv_projects, *self.located.uv_projects]
        self.uv_project, problem = uv_project.merge_projects(projects)
        if problem:
            self.problems.append(problem)
        return None

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

    def _supplied_lock(self, entry: str, *, alone: bool) -> Path | None:
        path = self.root / expand_user(entry)
        if not alone:
            self.problems.append(
                f"environment.requirements: {entry} is a complete lock and must stand alone; "
                "drop the other entries, or name what the lock was made from instead"
            )
        if not path.is_file():
            self.problems.append(f"environment.requirements: no such file: {entry}")
            return None
        self.lines.sources.append(path)
        return path

    def _read_entry(self, entry: str, key: str, *, constraint: bool) -> None:
        """Read one entry of ``environment.requirements`` or ``environment.constraints``."""
        if entry.startswith(("-e ", "--editable")):
            self.problems.append(f"{key}: {refuse_editable(entry)}")
        elif _PYPROJECT.fullmatch(entry) and not constraint:
            self.lines.read_pyproject(entry, origin=key)
        elif _FILE.fullmatch(entry) or self._is_file_with_spaces(entry):
            path = self.root / expand_user(entry)
            self.lines.read_file(path, origin=key, constraint=constraint)
        elif not constraint and (block := self._block(entry)) is not None:
            self.lines.read_script(self.root / expand_user(entry), block)
        elif entry.startswith("-"):
            self.problems.append(f"{key}: {entry}: options belong in a requirement file")
        else:
            line = RequirementLine(text=entry, origin=key, base=self.root)
            self.lines.add(line, constraint=constraint)

    def _is_file_with_spaces(self, entry: str) -> bool:
        """Return whether an entry is the name of a requirement file that has spaces in it."""
        is_named = entry.endswith((".txt", ".in")) and " " in entry
        return is_named and (self.root / expand_user(entry)).is_file()

    def _block(self, entry: str) -> Mapping[str, Any] | None:
        """Return the block of a script (PEP 723) that an entry names; None if it names none."""
        if not _SCRIPT.fullmatch(entry):
            return None
        try:
            return script_block.read(self.root / expand_user(entry))
        except ConfigError as exc:
            self.problems.append(f"environment.requirements: {exc.message}")
            return {}

    def _refuse_missing_folders(self) -> None:
        for place in self.config.environment.find_links:
            if "://" not in place and not is_folder(place):
                self.problems.append(f"environment.find-links: no folder that can be read: {place}")

    def _locked_script(self, entries: Sequence[str]) -> UvLock | None:
        """Return the lock of the script that is all that is asked for; None without one."""
        for entry in entries:
            script = self.root / expand_user(entry)
            file = uv_lock.beside_script(script)
            if file is None or not _SCRIPT.fullmatch(entry) or not _has_block(script):
                continue
            if len(entries) == 1 and not self.config.environment.constraints:
                self.lines.sources += [script, file]
                return uv_lock.of_script(script, file)
            self.remarks.append(
                f"{file.name} does not count: it is a complete lock, and the settings ask for more "
                f"than {entry}"
            )
        return None

    def _refuse_uv_settings(self) -> None:
        """Refuse settings of uv beside requirement files, which only uv honours."""
        texts: dict[Path, list[str]] = {}
        for line in self.lines.requirements:
            if not line.metadata and line.origin != _INLINE:
                texts.setdefault(line.base, []).append(line.text)
        for folder, requirements in texts.items():
            shown = located.relative(folder / "uv.toml", self.root)
            problem = tool_settings.refuse_beside(folder, requirements, shown=shown)
            if problem:
                self.problems.append(problem)

    @property
    def require_hashes(self) -> str:
        """Return what asks for a hash of every file: a line or a variable; empty for nothing."""
        for name in ("PIP_REQUIRE_HASHES", "UV_REQUIRE_HASHES"):
            if is_true(os.environ.get(name, "")):
                return name
        return self.lines.require_hashes

    def _refuse_without_hash(self, line: RequirementLine) -> None:
        """Refuse a requirement without a hash where every file must have one."""
        asked = self.require_hashes
        if asked and not line.hashes and not _HASH_IN_URL.search(line.text):
            self.problems.append(
                f"{line.origin}: {without_url_secrets(line.text)} has no --hash=sha256:..., which "
                f"{asked} requires"
            )

    def _refuse_empty(self, entries: tuple[str, ...]) -> None:
        """Refuse files without any requirement, as a tool that failed leaves them."""
        if self.lines.requirements or self.problems:
            return
        empty = "requirements = [] in place of it, for an environment without packages"
        files = [entry for entry in entries if _FILE.fullmatch(entry)]
        if files:
            self.problems.append(
                f"environment.requirements: {', '.join(files)}: no requirement in it; write {empty}"
            )
        for entry in filter(_PYPROJECT.fullmatch, entries):
            path = re.split(r"[\[:]", entry)[0]
            self.problems.append(
                f"environment.requirements: {entry} declares no dependencies; list them in "
                f"[project] dependencies, name an extra or a group that has some "
                f'("{path}[train]", "{path}:train"), or write {empty}'
            )

    def _add_requirement(self, line: RequirementLine) -> None:
        """Sort one line; it names a path if it looks like one, or if such a folder exists."""
        if not line.metadata and foreign_files.bare_name(line.text).endswith(located.ARCHIVES):
            self._add_located(line)
            return
        if self._refuse_file(line):
            return
        try:
            parsed = Requirement(line.text)
        except InvalidRequirement as exc:
            if located.names_place(line.text):
                self._add_located(line)
            else:
                self._refuse_malformed(line, exc)
            return
        if line.by_uv and parsed.url:
            self._allow_hashes(parsed, line)
            parsed.url = None  # uv reads the place from the file
        if parsed.url is None:
            self.requirements.append(normalize_requirement(parsed))
            self._allow_hashes(parsed, line)
            return
        requirement = LocatedRequirement(
            line=line,
            place=parsed.url,
            extras=format_extras(parsed.extras),
            marker=str(parsed.marker or ""),
            name=parsed.name,
        )
        self._read_located(requirement)

    def _add_constraint(self, line: RequirementLine) -> None:
        if self._refuse_file(line):
            return
        try:
            parsed = Requirement(line.text)
        except InvalidRequirement as exc:
            self._refuse_malformed(line, exc)
            return
        self.constraints.append(normalize_requirement(parsed))
        self._allow_hashes(parsed, line)

    def _add_located(self, line: RequirementLine) -> None:
        requirement = located.parse(line)
        if requirement is None:
            self.problems.append(f"{line.origin}: {line.text!r}: neither a requirement nor a path")
        else:
            self._read_located(requirement)

    def _read_located(self, requirement: LocatedRequirement) -> None:
        wheel = self.located.read(requirement)
        if wheel is not None:
            self.requirements.append(wheel)

    def _allow_hashes(self, requirement: Requirement, line: RequirementLine) -> None:
        """Note which files may be installed for a package."""
        fragment = (requirement.url or "").partition("#")[2]
        try:
            hashes = (*line.hashes, *read_hashes("", fragment))
        except ValueError as exc:
            self.problems.append(f"{line.origin}: {exc}")
            return
        self.located.allow_hashes(requirement.name, hashes)

    def _refuse_file(self, line: RequirementLine) -> bool:
        """Refuse the name of a file in place of a package's; return whether it was one."""
        if line.metadata:
            return False
        problem = foreign_files.misread(line.text, (line.base, self.root))
        if problem:
            self.problems.append(f"{line.origin}: {problem}")
        return bool(problem)

    def _refuse_malformed(self, line: RequirementLine, exc: InvalidRequirement) -> None:
        why = located.first_line(exc)
        conda = _CONDA.match(line.text)
        if conda:
            why = f"one = is conda's notation; write {conda[1]}=={conda[2]}"
        self.problems.append(f"{line.origin}: {line.text!r}: {why}")


def _has_block(script: Path) -> bool:
    """Return whether a script has a block (PEP 723) that can be read."""
    try:
        return script_block.read(script) is not None
    except ConfigError:  # refused where the entry is read
        return False
