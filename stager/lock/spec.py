"""The spec: every requirement of ``[environment]``, read and put in one form.

An entry of ``environment.requirements`` is one of

* a requirement file (``requirements.txt``, ``requirements.in``), in pip's format;
* a requirement string (PEP 508): ``numpy>=2``, ``name @ https://...``;
* ``pyproject.toml``: the dependencies it declares; ``pyproject.toml[extra1,extra2]``: these and the
  extras'; ``pyproject.toml:group1,group2``: only those dependency groups (PEP 735);
* ``pylock.toml`` or ``pylock.NAME.toml`` (PEP 751), alone: it is taken as it is;
* a folder (``./mylib``, ``./mylib[extra]``), an sdist or a wheel file.

Folders, sdist files and everything from version control are *sources*: they are built into wheels
before anything is resolved, since no index has them. A bare name that is a file's is refused
(:mod:`stager.config.foreign_files`), and so are settings that would be left out in silence
(:mod:`stager.lock.tool_settings`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from bundle.protocol.counts import counted
from bundle.protocol.digest import canonical_json

from ..config import foreign_files
from ..config.load import Config
from ..core.errors import ConfigError
from ..core.processes import Runner, run
from ..core.store import sha256_of
from ..core.values import Digest, Target
from . import located, tool_settings
from .indexes import Indexes
from .located import LocatedRequirement, SourceReader, SourceRequirement
from .requirement_line import RequirementLine, expanded, extras_of, normal
from .requirements import EDITABLE, RequirementReader

_PYPROJECT = re.compile(r".*pyproject\.toml([\[:].*)?")
_PYLOCK = re.compile(r"(.*/)?pylock(\.[^./]+)?\.toml")
_FILE = re.compile(r"[^\s\[\];<>=!~@]+\.(txt|in)")
_INLINE = "environment.requirements"
"""Origin of a requirement that is written in the settings themselves."""


@dataclass(frozen=True, kw_only=True)
class Spec:
    """All that determines a lock, read from disk."""

    root: Path
    """The project's folder."""
    requirements: tuple[str, ...]
    """PEP 508 requirements, normalised, each once, in the order they were read."""
    constraints: tuple[str, ...]
    """PEP 508 requirements that limit versions only."""
    sources: tuple[Path, ...]
    """The files that were read, in order."""
    target: Target
    """The interpreter and platform to lock for."""
    torch_backend: str | None
    """Name of the PyTorch index to add; None for none."""
    local_projects: tuple[SourceRequirement, ...]
    """The sources to build into wheels first."""
    indexes: Indexes
    """The index options in the requirement files."""
    hashes: Mapping[str, tuple[str, ...]]
    """The sha256 of each file that may be installed, for each package that has hashes."""
    pylock: Path | None
    """A lock that the user supplied; then there are no requirements."""
    digest: Digest
    """Covers everything above except paths on this machine, and the content of local folders."""
    prune: tuple[str, ...]
    """Kinds of files left out of the wheels' layers; does not affect the lock."""


def read_spec(config: Config, *, run: Runner = run) -> Spec:
    """Read every requirement a project names.

    Args:
        config: the project's settings.
        run: starts ``git``, to learn which files of a local project count.

    Raises:
        ConfigError: files that are missing, requirements that are malformed or refused; one
            context line for each, with file and line.
    """
    environment = config.environment
    target = _target(environment.python, environment.platform)
    builder = _Builder(config, target.python, run)
    pylock = builder.read()
    if builder.problems:
        many = counted(len(builder.problems), "problem")
        raise ConfigError(
            f"{config.source}: {many} in the requirements",
            hint=f"correct what is named above, in {config.source.name} or in a file it names; the "
            "stager.toml that `stager init` writes lists what environment.requirements takes",
            context=builder.problems,
        )
    return Spec(
        root=config.root,
        requirements=tuple(dict.fromkeys(builder.requirements)),
        constraints=tuple(dict.fromkeys(builder.constraints)),
        sources=tuple(builder.reader.sources),
        target=target,
        torch_backend=environment.torch_backend,
        local_projects=tuple(builder.located.sources),
        indexes=builder.reader.indexes,
        hashes=builder.hashes,
        pylock=pylock,
        prune=environment.prune,
        digest=_spec_digest(builder, target, pylock),
    )


def _target(python: str | None, platform: str | None) -> Target:
    """Return the target that the settings name, completed from this machine."""
    if python and platform:
        return Target(python=python, platform=platform)
    host = Target.of_host()
    return Target(python=python or host.python, platform=platform or host.platform)


def _spec_digest(builder: _Builder, target: Target, pylock: Path | None) -> Digest:
    """Return the digest of all that determines a lock."""
    indexes = builder.reader.indexes.as_dict()
    content: dict[str, object] = {
        "format": 1,
        "requirements": [builder.portable(text) for text in dict.fromkeys(builder.requirements)],
        "constraints": list(dict.fromkeys(builder.constraints)),
        "target": [target.python, target.platform],
        "torch-backend": builder.config.environment.torch_backend,
        "wheels": builder.located.wheels,
        "projects": [
            [source.digest, source.suffix, source.marker] for source in builder.located.sources
        ],
        "indexes": {key: builder.portable(json.dumps(value)) for key, value in indexes.items()},
        "pylock": sha256_of(pylock) if pylock else None,
    }
    if builder.hashes:
        content["hashes"] = builder.hashes
    return Digest.of(canonical_json(content))


class _Builder:
    """Sorts lines into requirements, constraints and sources."""

    def __init__(self, config: Config, python: str, run: Runner) -> None:
        self.config = config
        self.root = config.root
        self.reader = RequirementReader(config.root, python)
        self.problems = self.reader.problems
        skipped = [config.root / name for name in config.project.outputs]
        if config.environment.offline_root:
            skipped.append(config.environment.offline_root)
        self.located = SourceReader(
            config.root, python, skipped=skipped, run=run, problems=self.problems
        )
        self.requirements: list[str] = []
        self.constraints: list[str] = []
        self.hashes: dict[str, tuple[str, ...]] = {}

    def read(self) -> Path | None:
        """Read everything; return the lock that the user supplied in place of requirements."""
        entries = self.config.environment.requirements
        for entry in entries:
            if _PYLOCK.fullmatch(entry):
                return self._supplied_lock(entry, alone=len(entries) == 1)
        for entry in entries:
            self._read_entry(entry, _INLINE, constraint=False)
        for entry in self.config.environment.constraints:
            self._read_entry(entry, "environment.constraints", constraint=True)
        self._refuse_uv_settings()
        for line in self.reader.requirements:
            self._add_requirement(line)
        for line in self.reader.constraints:
            self._add_constraint(line)
        self._refuse_empty(entries)
        return None

    def portable(self, text: str) -> str:
        """Return a text with this project's path replaced, so that the digest does not vary."""
        return text.replace(self.root.as_uri(), "file://.").replace(str(self.root), ".")

    def _supplied_lock(self, entry: str, *, alone: bool) -> Path | None:
        path = self.root / expanded(entry)
        if not alone:
            self.problems.append(
                f"environment.requirements: {entry} is a complete lock and must stand alone; "
                "drop the other entries, or name what the lock was made from instead"
            )
        if not path.is_file():
            self.problems.append(f"environment.requirements: no such file: {entry}")
            return None
        self.reader.sources.append(path)
        return path

    def _read_entry(self, entry: str, key: str, *, constraint: bool) -> None:
        """Read one entry of ``environment.requirements`` or ``environment.constraints``."""
        if entry.startswith(("-e ", "--editable")):
            self.problems.append(f"{key}: {entry} is refused: {EDITABLE}")
        elif _PYPROJECT.fullmatch(entry) and not constraint:
            self.reader.read_pyproject(entry, origin=key)
        elif _FILE.fullmatch(entry):
            path = self.root / expanded(entry)
            self.reader.read_file(path, origin=key, constraint=constraint)
        elif entry.startswith("-"):
            self.problems.append(f"{key}: {entry}: options belong in a requirement file")
        else:
            line = RequirementLine(text=entry, origin=key, base=self.root)
            self.reader.add(line, constraint=constraint)

    def _refuse_uv_settings(self) -> None:
        """Refuse settings of uv beside requirement files, which only uv honours."""
        texts: dict[Path, list[str]] = {}
        for line in self.reader.requirements:
            if not line.metadata and line.origin != _INLINE:
                texts.setdefault(line.base, []).append(line.text)
        for folder, requirements in texts.items():
            shown = located.relative(folder / "uv.toml", self.root)
            problem = tool_settings.refuse_beside(folder, requirements, shown=shown)
            if problem:
                self.problems.append(problem)

    def _refuse_empty(self, entries: tuple[str, ...]) -> None:
        """Refuse files without any requirement, as a tool that failed leaves them."""
        if self.reader.requirements or self.problems:
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
        if parsed.url is None:
            self.requirements.append(normal(parsed))
            self._allow_hashes(parsed, line)
            return
        requirement = LocatedRequirement(
            line=line,
            place=parsed.url,
            extras=extras_of(parsed.extras),
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
        self.constraints.append(normal(parsed))
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
        if line.hashes:
            name = canonicalize_name(requirement.name)
            self.hashes[name] = (*self.hashes.get(name, ()), *line.hashes)

    def _refuse_file(self, line: RequirementLine) -> bool:
        """Refuse the name of a file in place of a package's; return whether it was one."""
        if line.metadata:
            return False
        problem = foreign_files.misread(line.text, (line.base, self.root))
        if problem:
            self.problems.append(f"{line.origin}: {problem}")
        return bool(problem)

    def _refuse_malformed(self, line: RequirementLine, exc: InvalidRequirement) -> None:
        self.problems.append(f"{line.origin}: {line.text!r}: {located.first_line(exc)}")
