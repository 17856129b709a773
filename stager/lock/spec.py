"""What the user asks for: every requirement of ``[environment]``, read and put in one form.

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

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

from bundle.protocol.counts import counted
from bundle.redaction.masking import without_url_secrets

from ..config import foreign_files
from ..config.load import Config
from ..core.errors import ConfigError
from ..core.processes import Runner, run
from ..core.store import sha256_of
from ..core.values import Digest, Target
from . import located, source_tree, tool_settings
from .indexes import Indexes, strip_credentials
from .located import Source
from .requirements import EDITABLE, Line, RequirementReader, expanded, extras_of, normal

_PYPROJECT = re.compile(r".*pyproject\.toml([\[:].*)?")
_PYLOCK = re.compile(r"(.*/)?pylock(\.[^./]+)?\.toml")
_FILE = re.compile(r"[^\s\[\];<>=!~@]+\.(txt|in)")
_INLINE = "environment.requirements"
"""Where a requirement comes from that stands in the settings themselves."""
_COMMIT = re.compile(r"@[0-9a-f]{40}(#|$)")


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
    """Which of PyTorch's own indexes to add; None for none."""
    local_projects: tuple[Source, ...]
    """What has to be built into wheels first."""
    indexes: Indexes
    """The index options that the requirement files hold."""
    hashes: Mapping[str, tuple[str, ...]]
    """The sha256 of each file that may be taken for a package, where the requirements say."""
    pylock: Path | None
    """A lock the user brought; then there are no requirements."""
    digest: Digest
    """Covers everything above except paths on this machine, and what local folders hold."""
    prune: tuple[str, ...]
    """What is left out of the wheels' layers; no matter of the lock's."""


def read_spec(config: Config, *, run: Runner = run) -> Spec:
    """Read every requirement a project names.

    Args:
        config: the project's settings.
        run: starts ``git``, to learn which files of a local project count.

    Raises:
        ConfigError: files that are missing, requirements that are malformed or refused; one
            context line for each, with file and line.
    """
    wanted = config.environment
    host = Target.of_host() if not (wanted.python and wanted.platform) else None
    target = Target(
        python=wanted.python or (host.python if host else ""),
        platform=wanted.platform or (host.platform if host else ""),
    )
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
    reader = builder.reader
    requirements = tuple(dict.fromkeys(builder.requirements))
    constraints = tuple(dict.fromkeys(builder.constraints))
    return Spec(
        root=config.root,
        requirements=requirements,
        constraints=constraints,
        sources=tuple(reader.sources),
        target=target,
        torch_backend=wanted.torch_backend,
        local_projects=tuple(builder.projects),
        indexes=reader.indexes,
        hashes=builder.hashes,
        pylock=pylock,
        prune=wanted.prune,
        digest=_digest(
            {
                "format": 1,
                "requirements": [builder.portable(text) for text in requirements],
                "constraints": constraints,
                "target": [target.python, target.platform],
                "torch-backend": wanted.torch_backend,
                "wheels": builder.wheels,
                "projects": [[p.digest, p.suffix, p.marker] for p in builder.projects],
                "indexes": {
                    key: builder.portable(json.dumps(value))
                    for key, value in reader.indexes.as_dict().items()
                },
                "pylock": sha256_of(pylock) if pylock else None,
                **({"hashes": builder.hashes} if builder.hashes else {}),
            }
        ),
    )


class _Builder:
    """Sorts lines into requirements, constraints and sources."""

    def __init__(self, config: Config, python: str, run: Runner) -> None:
        self.config = config
        self.root = config.root
        self.run = run
        self.reader = RequirementReader(config.root, python)
        self.problems = self.reader.problems
        self.requirements: list[str] = []
        self.constraints: list[str] = []
        self.projects: list[Source] = []
        self.wheels: list[Digest] = []
        self.hashes: dict[str, tuple[str, ...]] = {}

    def read(self) -> Path | None:
        """Read everything; gives the lock the user brought, if that is what there is."""
        entries = self.config.environment.requirements
        locks = [entry for entry in entries if _PYLOCK.fullmatch(entry)]
        if locks:
            return self._given_lock(locks[0], alone=len(entries) == 1)
        for entry in entries:
            self._entry(entry, _INLINE, constraint=False)
        for entry in self.config.environment.constraints:
            self._entry(entry, "environment.constraints", constraint=True)
        self._refuse_uv_settings()
        for line in self.reader.requirements:
            self._requirement(line)
        for line in self.reader.constraints:
            self._constraint(line)
        self._refuse_nothing(entries)
        return None

    def _refuse_uv_settings(self) -> None:
        """Refuse settings of uv beside requirement files, which only uv honours."""
        lines = [line for line in self.reader.requirements if not line.metadata]
        files = [line for line in lines if line.origin != _INLINE]
        for folder in dict.fromkeys(line.base for line in files):
            shown = located.relative(folder / "uv.toml", self.root)
            texts = [line.text for line in files if line.base == folder]
            if why := tool_settings.refuse_beside(folder, texts, shown=shown):
                self.problems.append(why)

    def _refuse_nothing(self, entries: tuple[str, ...]) -> None:
        """Refuse files that ask for nothing, as a tool that failed leaves them."""
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

    def portable(self, text: str) -> str:
        """A text that holds this project's place, so that the digest does not depend on it."""
        return text.replace(self.root.as_uri(), "file://.").replace(str(self.root), ".")

    def _given_lock(self, entry: str, *, alone: bool) -> Path | None:
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

    def _entry(self, entry: str, key: str, *, constraint: bool) -> None:
        if entry.startswith(("-e ", "--editable")):
            self.problems.append(f"{key}: {entry} is refused: {EDITABLE}")
        elif _PYPROJECT.fullmatch(entry) and not constraint:
            self.reader.read_pyproject(entry, self.root, asked=key)
        elif _FILE.fullmatch(entry):
            path = self.root / expanded(entry)
            self.reader.read_file(path, asked=key, constraint=constraint)
        elif entry.startswith("-"):
            self.problems.append(f"{key}: {entry}: options belong in a requirement file")
        else:
            line = Line(text=entry, origin=key, base=self.root)
            (self.reader.constraints if constraint else self.reader.requirements).append(line)

    def _constraint(self, line: Line) -> None:
        if self._refuse_file(line):
            return
        try:
            parsed = Requirement(line.text)
        except InvalidRequirement as exc:
            self.problems.append(f"{line.origin}: {line.text!r}: {_first_line(exc)}")
            return
        self.constraints.append(normal(parsed))
        self._allow(parsed, line)

    def _allow(self, requirement: Requirement, line: Line) -> None:
        """Note which files may be taken for a package."""
        if line.hashes:
            name = canonicalize_name(requirement.name)
            self.hashes[name] = (*self.hashes.get(name, ()), *line.hashes)

    def _requirement(self, line: Line) -> None:
        """Decide what a line is; a path is one by its look, or because the folder exists."""
        if not line.metadata and foreign_files.bare_name(line.text).endswith(located.ARCHIVES):
            self._direct(line)
            return
        if self._refuse_file(line):
            return
        try:
            parsed = Requirement(line.text)
        except InvalidRequirement as exc:
            if located.looks_direct(line.text):
                self._direct(line)
            else:
                self.problems.append(f"{line.origin}: {line.text!r}: {_first_line(exc)}")
            return
        if parsed.url is None:
            self.requirements.append(normal(parsed))
            self._allow(parsed, line)
            return
        marker = str(parsed.marker or "")
        self._place(line, parsed.url, extras_of(parsed.extras), marker, name=parsed.name)

    def _refuse_file(self, line: Line) -> bool:
        """Refuse the name of a file in place of a package's; whether it was one."""
        why = "" if line.metadata else foreign_files.misread(line.text, (line.base, self.root))
        if why:
            self.problems.append(f"{line.origin}: {why}")
        return bool(why)

    def _direct(self, line: Line) -> None:
        place = located.split(line.text)
        if place is None:
            self.problems.append(f"{line.origin}: {line.text!r}: neither a requirement nor a path")
            return
        where, extras, marker = place
        self._place(line, where, extras, marker)

    def _place(self, line: Line, where: str, extras: str, marker: str, name: str = "") -> None:
        """Take a requirement that names its place: a path, a file URL, or something remote."""
        scheme = where.partition("://")[0] if "://" in where else ""
        if scheme not in ("", "file") or where.startswith("file://$"):
            self._remote(line, where, extras, marker, name)
            return
        path = located.local_path(where, (line.base, self.root))
        if path.suffix == ".whl" and path.is_file():
            self.wheels.append(sha256_of(path))
            self._wheel(line, path.as_uri(), path.name, extras, marker)
        elif path.is_dir() and not located.is_project(path):
            self.problems.append(
                f"{line.origin}: {where} has neither pyproject.toml nor setup.py, "
                "so it cannot be installed; ship plain folders as [project] or [assets] paths"
            )
        elif path.is_file() and not path.name.endswith(located.ARCHIVES):
            self.problems.append(
                f"{line.origin}: {where} is neither a wheel nor an sdist; "
                f"{foreign_files.remedy(path.name)}"
            )
        elif path.exists():
            shown = located.relative(path / "pyproject.toml", self.root)
            self.problems += tool_settings.refuse_folder(path, self.reader.python, shown=shown)
            self.projects.append(
                Source(
                    requirement=str(path),
                    label=located.relative(path, self.root),
                    suffix=extras,
                    marker=marker,
                    digest=self._content(path),
                    moving=False,
                )
            )
        else:
            self.problems.append(f"{line.origin}: no such file or folder: {where}")

    def _remote(self, line: Line, where: str, extras: str, marker: str, name: str) -> None:
        try:
            file_name = unquote(urlsplit(where).path.rpartition("/")[2])
        except ValueError as exc:
            self.problems.append(f"{line.origin}: {without_url_secrets(where)} is no URL: {exc}")
            return
        if file_name.endswith(".whl"):
            self._wheel(line, where, file_name, extras, marker)
            return
        from_vcs = "+" in where.partition("://")[0]
        if not from_vcs and not file_name.endswith(located.SDIST_ENDINGS):
            self.problems.append(f"{line.origin}: {strip_credentials(where)} is no wheel or sdist")
            return
        clean = strip_credentials(where)
        fragment = urlsplit(where).fragment
        pinned = bool(_COMMIT.search(where)) if from_vcs else "sha256=" in fragment
        self.projects.append(
            Source(
                requirement=f"{name} @ {where}" if name else where,
                label=clean,
                suffix=extras,
                marker=marker,
                digest=_digest([clean, fragment]),
                moving=not pinned,
            )
        )

    def _wheel(self, line: Line, url: str, file_name: str, extras: str, marker: str) -> None:
        try:
            name = parse_wheel_filename(file_name)[0]
        except ValueError as exc:
            self.problems.append(f"{line.origin}: {_first_line(exc)}")
            return
        tail = f" ; {marker}" if marker else ""
        self.requirements.append(normal(Requirement(f"{name}{extras} @ {url}{tail}")))

    def _content(self, path: Path) -> Digest:
        if path.is_file():
            return sha256_of(path)
        ours = [path / name for name in self.config.project.outputs]
        if self.config.environment.offline_root:
            ours.append(self.config.environment.offline_root)
        return source_tree.digest(path, source_tree.files(path, skip=ours, run=self.run))


def _digest(value: object) -> Digest:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return Digest(hashlib.sha256(text.encode()).hexdigest())


def _first_line(exc: Exception) -> str:
    return str(exc).splitlines()[0]
