"""The spec: every requirement of ``[environment]``, read and put in one form.

An entry of ``environment.requirements`` is one of

* a requirement file (``requirements.txt``, ``requirements.in``), in pip's format;
* a requirement string (PEP 508): ``numpy>=2``, ``name @ https://...``;
* ``pyproject.toml``: the dependencies it declares; ``pyproject.toml[extra1,extra2]``: these and the
  extras'; ``pyproject.toml:group1,group2``: only those dependency groups (PEP 735);
* a script with a block of its own (PEP 723), and alone with the lock of uv beside it;
* ``uv.lock``, ``uv.lock[extra]``, ``uv.lock:group``, alone (:mod:`stager.lock.uv_project`);
* ``pylock.toml`` or ``pylock.NAME.toml`` (PEP 751), alone: it is taken as it is;
* a folder (``./mylib``, ``./mylib[extra]``), an sdist or a wheel file.

Folders, sdist files and everything from version control are *sources*: they are built into wheels
before anything is resolved, since no index has them. A bare name that is a file's is refused
(:mod:`stager.config.foreign_files`), and so are settings that would be left out in silence
(:mod:`stager.lock.requirements`).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from bundle.protocol.counts import format_count
from bundle.protocol.digest import canonical_json
from bundle.redaction.secrets import strip_url_secrets

from ..config import foreign_files, inline_script
from ..config.load import Config
from ..core.errors import ConfigError
from ..core.processes import Runner, run
from ..core.store import digest_file
from ..core.values import Digest, Target
from . import build_source, uv_project
from .build_source import (
    NEED_NVCC,
    BuildSettings,
    SourceReader,
    SourceRequirement,
    is_folder,
    list_prebuilt,
)
from .indexes import (
    Indexes,
    RequirementLine,
    expand_user,
    is_true,
    normalize_requirement,
    read_hashes,
    shorten_path,
)
from .requirements import PyprojectReader, RequirementReader, refuse_editable
from .uv_project import UvLock, UvProject, make_script_project, parse_entry

# --- Reading the entries of ``[environment]``, line by line, into what a spec consists of --------

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
        self.uv_lock, problems = uv_project.read_entries(entries, self.root)
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
        projects = list(self.lines.uv_projects.values())
        self.uv_project = projects[0] if projects else None
        if len(projects) > 1:
            keys = "; ".join(key for project in projects for key in project.keys)
            self.problems.append(
                "several projects have settings that only uv honours, and each means its own: "
                f"{keys}; make them one project or one workspace of uv"
            )

    def describe_uv_settings(self) -> dict[str, object]:
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
        wheels = list_prebuilt(environment.find_links)
        named = map(canonicalize_name, environment.no_build_isolation)
        only = tuple(sorted(wheels & ({*named} | NEED_NVCC)))
        own = Indexes(find_links=environment.find_links, only_binary=only)
        return self.lines.indexes.merge(own)

    def make_portable(self, text: str) -> str:
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
            return inline_script.read_block(path) if _SCRIPT.fullmatch(entry) else None
        except ConfigError as exc:
            self.problems.append(f"environment.requirements: {exc.message}")
            return {}

    def _read_script(self, script: Path, block: Mapping[str, Any]) -> None:
        """Read a script, or its lock if the script is the only entry in the settings."""
        lock = uv_project.read_script_lock(script, block)
        environment = self.config.environment
        if lock and len(environment.requirements) == 1 and not environment.constraints:
            self.uv_lock = lock
            return
        if lock:
            self.remarks.append(
                f"{lock.file.name} does not count: it is a complete lock, and the settings ask for "
                f"more than {shorten_path(script, self.root)}"
            )
        PyprojectReader(make_script_project(script, block), self.lines).read(origin=_INLINE)

    def _read_settings_around(self) -> None:
        """Apply uv's settings in the project's folder, which hold for requirement files."""
        asked = (line for line in self.lines.lines if not line.constraint and not line.metadata)
        if all(line.origin == _INLINE for line in asked):
            return
        file = self.root / "pyproject.toml"
        project = UvProject(file=file, document=uv_project.read(file), dependencies=False)
        self.problems += uv_project.refuse(project.tables, self.root)
        keys = uv_project.list_keys(project.tables, (), self.root)
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
                f"{line.origin}: {strip_url_secrets(line.text)} has no --hash=sha256:..., which "
                f"{asked} requires"
            )

    def _parse(self, line: RequirementLine) -> Requirement | None:
        problem = ""
        if not line.metadata and (line.constraint or not build_source.is_archive(line.text)):
            problem = foreign_files.explain_misread(line.text, (line.base, self.root))
        try:
            parsed = build_source.parse(line)
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
    why = build_source.first_line(exc)
    if conda:
        wanted = f"write {_CONDA_NAMES.get(conda[1], conda[1])}=={conda[2]}"
        if conda[1] == "python":
            wanted = f'set environment.python = "{".".join(conda[2].split(".")[:2])}" instead'
        why = f"one = is conda's notation; {wanted}"
    return f"{text!r}: {why}"


@dataclass(frozen=True, kw_only=True)
class Spec:
    """All that determines a lock, read from disk."""

    root: Path
    """The project's folder."""
    requirements: tuple[str, ...]
    """PEP 508 requirements, normalised, each once, in the order they were read."""
    constraints: tuple[str, ...]
    """PEP 508 requirements that limit versions only."""
    target: Target
    """The interpreter and platform to lock for."""
    torch_backend: str | None
    """Name of the PyTorch index to add; None for none, ``auto`` for one by the drivers."""
    local_projects: tuple[SourceRequirement, ...]
    """The sources to build into wheels first."""
    indexes: Indexes
    """The index options in the requirement files."""
    hashes: Mapping[str, tuple[str, ...]]
    """The sha256 of each file that may be installed, for each package that has hashes."""
    require_hashes: str
    """What asks for a hash of every file, a line or a variable; empty for nothing."""
    pylock: Path | None
    """A lock that the user supplied; then there are no requirements."""
    uv_lock: UvLock | None
    """A lock of uv that the user supplied; then there are no requirements, either."""
    uv_project: UvProject | None
    """The project whose settings only uv honours, where there is one."""
    index_strategy: str | None
    """uv's rule for packages that several indexes have; None for its own choice."""
    digest: Digest
    """Covers everything above except paths on this machine, and the content of local folders."""
    builds: BuildSettings
    """What builds from source are given; does not affect the lock."""
    prune: tuple[str, ...]
    """Kinds of files left out of the wheels' layers; does not affect the lock."""
    remarks: tuple[str, ...] = ()
    """What a person should know about the requirements, a line each; does not affect the lock."""

    @property
    def all_indexes(self) -> Indexes:
        """Return the indexes in the requirement files, and those that a project of uv names.

        Files that a lock names are fetched from them, each with its digest.
        """
        project = self.uv_lock.project if self.uv_lock else self.uv_project
        urls = project.indexes if project else ()
        return self.indexes.merge(Indexes(extra_index_urls=urls))

    @property
    def urls(self) -> tuple[str, ...]:
        """Return the addresses of single files and repositories, with their credentials."""
        texts = (*self.requirements, *(source.requirement for source in self.local_projects))
        places = (text.rpartition(" @ ")[2].partition(" ")[0] for text in texts)
        return tuple(place for place in places if "://" in place)

    @property
    def overridden(self) -> frozenset[str]:
        """Return the packages that are taken against what other packages ask for."""
        of_uv = self.uv_lock or self.uv_project
        return of_uv.overridden if of_uv else frozenset()


def read_spec(config: Config, *, run: Runner = run) -> Spec:
    """Read every requirement a project names.

    Raises:
        ConfigError: files that are missing, requirements that are malformed or refused; one
            context line for each, with file and line.
    """
    environment = config.environment
    python, platform = environment.python, environment.platform
    if not (python and platform):
        host = Target.of_host()
        python, platform = python or host.python, platform or host.platform
    target = Target(python=python, platform=platform)
    reader = SpecReader(config, target.python, run)
    pylock = reader.read()
    if reader.problems:
        many = format_count(len(reader.problems), "problem")
        raise ConfigError(
            f"{config.source}: {many} in the requirements",
            hint=f"correct what is named above, in {config.source.name} or in a file it names; the "
            "stager.toml that `stager init` writes lists what environment.requirements takes",
            context=reader.problems,
        )
    return Spec(
        root=config.root,
        requirements=tuple(dict.fromkeys(reader.requirements)),
        constraints=tuple(dict.fromkeys(reader.constraints)),
        target=target,
        torch_backend=environment.torch_backend,
        local_projects=tuple(reader.located.sources),
        indexes=reader.indexes,
        hashes=reader.located.hashes,
        require_hashes=reader.require_hashes,
        pylock=pylock,
        uv_lock=reader.uv_lock,
        uv_project=reader.uv_project,
        index_strategy=environment.index_strategy,
        builds=BuildSettings(
            in_environment=frozenset(map(canonicalize_name, environment.no_build_isolation)),
            variables=dict(environment.build_env),
        ),
        prune=environment.prune,
        remarks=tuple(reader.remarks),
        digest=_spec_digest(reader, target, pylock),
    )


def _spec_digest(reader: SpecReader, target: Target, pylock: Path | None) -> Digest:
    indexes = reader.indexes.as_dict()
    content: dict[str, object] = {
        "format": 1,
        "requirements": [reader.make_portable(text) for text in dict.fromkeys(reader.requirements)],
        "constraints": list(dict.fromkeys(reader.constraints)),
        "target": [target.python, target.platform],
        "torch-backend": reader.config.environment.torch_backend,
        "wheels": reader.located.wheels,
        "projects": [
            [source.digest, source.suffix, source.marker] for source in reader.located.sources
        ],
        "indexes": {key: reader.make_portable(json.dumps(value)) for key, value in indexes.items()},
        "pylock": digest_file(pylock) if pylock else None,
    }
    if reader.located.hashes:
        content["hashes"] = reader.located.hashes
    if reader.require_hashes:
        content["require-hashes"] = True
    if reader.config.environment.index_strategy:
        content["index-strategy"] = reader.config.environment.index_strategy
    content |= reader.describe_uv_settings()
    return Digest.of(canonical_json(content))
