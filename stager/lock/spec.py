"""The spec: every requirement of ``[environment]`` (docs/settings.md), read and put in one form.

Folders, sdists and repositories are *sources*, built into wheels before anything is resolved.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import filterfalse
from pathlib import Path
from urllib.parse import SplitResult, unquote, urlsplit

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

from bundle.protocol.counts import format_count
from bundle.protocol.dataclass import dataclass
from bundle.protocol.digest import canonical_json
from bundle.redaction.secrets import strip_url_secrets
from bundle.regex import compile_lazily

from ..config import foreign_files, inline_script
from ..config.load import Config
from ..core import toml
from ..core.errors import ConfigError
from ..core.store import digest_file
from ..core.values import Digest, Target
from . import uv_project
from .build_source import (
    NEED_NVCC,
    BuildSettings,
    SourceRequirement,
    digest_content,
    is_folder,
    list_distributions,
)
from .indexes import (
    Indexes,
    RequirementLine,
    expand_user,
    find_path,
    format_extras,
    is_true,
    normalize_requirement,
    read_hashes,
    shorten_path,
    strip_credentials,
)
from .requirements import PyprojectReader, RequirementReader, list_faults, refuse_editable
from .uv_project import UvLock, UvProject, make_script_project, parse_entry

# --- Reading the entries of ``[environment]``, line by line, into what a spec consists of --------

_PYLOCK = compile_lazily(r"(.*/)?pylock(\.[^./]+)?\.toml")
_FILE = compile_lazily(r"[^\s\[\];<>=!~@]+\.(txt|in)")
_SCRIPT = compile_lazily(r"[^\s\[\];<>=!~@]+\.py")
_CONDA_LINE = compile_lazily(r"[\w.-]+=\d[^=\s]*(=\S+)?\s*$")  # of `conda list --export`
_INLINE = "environment.requirements"  # as a place, in messages
_SDIST_ENDINGS = (".tar.gz", ".zip", ".tar.bz2", ".tar.xz", ".tgz")
_ARCHIVES = (".whl", *_SDIST_ENDINGS)
_LINE = compile_lazily(
    r"(?P<place>[^;\[\]\s]+|[^;]+?)\s*(\[(?P<extras>[^\]]*)\])?\s*(;(?P<marker>.*))?"
)
_COMMIT = compile_lazily(r"@[0-9a-f]{40}(#|$)")


class SpecReader:
    """Sorts lines into requirements, constraints and sources; collects every problem."""

    def __init__(self, config: Config, target: Target) -> None:
        self.root, self.environment = config.root, config.environment
        self.lines = RequirementReader(config.root, target)
        self.problems = self.lines.problems
        self.skipped = [config.root / name for name in config.project.outputs]
        if config.environment.offline_root:
            self.skipped.append(config.environment.offline_root)
        self.requirements: list[str] = []
        self.constraints: list[str] = []
        self.sources: list[SourceRequirement] = []
        self.wheels: list[Digest] = []
        self.hashes: dict[str, tuple[str, ...]] = {}
        self.remarks: list[str] = []
        self.pylock: Path | None = None
        self.uv_lock: UvLock | None = None
        self.uv_project: UvProject | None = None

    def read(self) -> None:
        """Read everything."""
        entries = self.environment.requirements
        given = next(filter(_PYLOCK.fullmatch, entries), None)
        if given is None:
            self.uv_lock, problems = uv_project.read_entries(entries, self.root)
            self.problems += problems
            if self.uv_lock is None:
                self._read_entries(entries)
            return
        self.pylock = self.root / expand_user(given)
        if len(entries) > 1:
            self.problems.append(
                f"{_INLINE}: {given} is a complete lock and must stand alone; drop the other "
                "entries, or name what the lock was made from instead"
            )
        if not self.pylock.is_file():
            self.problems.append(f"{_INLINE}: no such file: {given}")

    def _read_entries(self, entries: tuple[str, ...]) -> None:
        for entry in entries:
            self._read_entry(entry)
        if self.uv_lock:  # that of the script which is all that is asked for
            return
        for entry in self.environment.constraints:
            self._read_text(entry, "environment.constraints", constraint=True)
        for place in self.environment.find_links:
            if "://" not in place and not is_folder(place):
                self.problems.append(f"environment.find-links: no folder that can be read: {place}")
        self._read_settings_around()
        for line in sorted(self.lines.lines, key=lambda line: line.constraint):
            self._add_line(line)
        self._refuse_empty(entries)
        self._choose_project(list(self.lines.uv_projects.values()))

    def _refuse_empty(self, entries: tuple[str, ...]) -> None:
        """Report files without any requirement, as a failed export leaves them."""
        files = list(filterfalse(_SCRIPT.fullmatch, entries))
        if files and not self.problems and all(line.constraint for line in self.lines.lines):
            self.problems.append(
                f"{_INLINE}: {', '.join(files)} declares no dependencies; list some, name an extra "
                'or a group that has some ("pyproject.toml[train]", "pyproject.toml:train"), or '
                "write requirements = [] for an environment without packages"
            )

    def _choose_project(self, projects: Sequence[UvProject]) -> None:
        self.uv_project = next(iter(projects), None)
        if len(projects) > 1:
            keys = "; ".join(key for project in projects for key in project.keys)
            self.problems.append(
                "several projects have settings that only uv honours, and each means its own: "
                f"{keys}; make them one project or one workspace of uv"
            )

    def _read_entry(self, entry: str) -> None:
        path = self.root / expand_user(entry)
        project = None if entry.startswith("-") else parse_entry(entry, self.root)
        block = None
        if _SCRIPT.fullmatch(entry):
            try:
                block = inline_script.read_block(path)
            except ConfigError as exc:
                self.problems.append(f"{_INLINE}: {exc.message}")
                block = {}
        if block is not None:
            self._read_script(path, block)
        elif project is not None:
            PyprojectReader(project, self.lines).read()
        else:
            self._read_text(entry, _INLINE, constraint=False)

    def _read_text(self, entry: str, key: str, *, constraint: bool) -> None:
        path = self.root / expand_user(entry)
        with_spaces = path.suffix in (".txt", ".in") and " " in path.name and path.is_file()
        if entry.startswith(("-e ", "--editable")):
            self.problems.append(f"{key}: {refuse_editable(entry)}")
        elif _FILE.fullmatch(entry) or with_spaces:
            self.lines.read_file(path, origin=key, constraint=constraint)
        elif entry.startswith("-"):
            self.problems.append(f"{key}: {entry}: options belong in a requirement file")
        else:
            line = RequirementLine(text=entry, origin=key, base=self.root, constraint=constraint)
            self.lines.lines.append(line)

    def _read_script(self, script: Path, block: toml.Table) -> None:
        lock = uv_project.read_script_lock(script, block)
        if lock and len(self.environment.requirements) == 1 and not self.environment.constraints:
            self.uv_lock = lock
            return
        if lock:
            self.remarks.append(
                f"{lock.file.name} does not count: it is a complete lock, and the settings ask for "
                f"more than {shorten_path(script, self.root)}"
            )
        PyprojectReader(make_script_project(script, block), self.lines).read()

    def _read_settings_around(self) -> None:
        """Apply uv's settings in the project's folder, which hold for requirement files."""
        asked = (line for line in self.lines.lines if not line.constraint and not line.metadata)
        if any(line.origin != _INLINE for line in asked):
            file = self.root / "pyproject.toml"
            project = UvProject(file=file, document=uv_project.read(file), dependencies=False)
            self.problems += uv_project.refuse(project.tables, self.root)
            self.lines.leave_to_uv(project, ())

    @property
    def indexes(self) -> Indexes:
        """The places of requirement files and settings; wheels in folders count before sources."""
        wheels, _ = list_distributions(self.environment.find_links)
        named = map(canonicalize_name, self.environment.no_build_isolation)
        only = tuple(sorted(wheels & {*named, *NEED_NVCC}))
        own = Indexes(find_links=self.environment.find_links, only_binary=only)
        return self.lines.indexes.merge(own)

    @property
    def require_hashes(self) -> str:
        """What asks for a hash of every file: a line or a variable; empty for nothing."""
        names = ("PIP_REQUIRE_HASHES", "UV_REQUIRE_HASHES")
        asking = (name for name in names if is_true(os.environ.get(name, "")))
        return next(asking, self.lines.require_hashes)

    def _add_line(self, line: RequirementLine) -> None:
        asked = self.require_hashes
        try:
            line = replace(line, hashes=read_hashes(line))
            self._sort(line)
            if asked and not (line.constraint or line.hashes):
                shown = strip_url_secrets(line.text)
                raise ValueError(f"{shown} has no --hash=sha256:..., which {asked} requires")
        except ValueError as exc:
            self.problems.append(f"{line.origin}: {exc}")

    def _sort(self, line: RequirementLine) -> None:
        if not (line.metadata or _is_archive(line)):
            problem = foreign_files.explain_misread(line.text, (line.base, self.root))
            if problem:
                raise ValueError(problem)
        try:
            parsed = _parse_line(line)
        except InvalidRequirement as exc:
            why = str(exc).splitlines()[0]
            if _CONDA_LINE.match(line.text):
                why = "one = is conda's notation; write package==version, as pip names the package"
            raise ValueError(f"{line.text!r}: {why}") from exc
        if line.constraint:
            self.constraints.append(self._allow_hashes(parsed, line))
        elif parsed.url and not line.by_uv:
            self._add_place(parsed, line)
        else:
            parsed.url = None  # if it has one, uv reads it from the file
            self.requirements.append(self._allow_hashes(parsed, line))

    def _allow_hashes(self, parsed: Requirement, line: RequirementLine) -> str:
        if line.hashes:
            name = canonicalize_name(parsed.name)
            self.hashes[name] = (*self.hashes.get(name, ()), *line.hashes)
        return normalize_requirement(parsed)

    # --- Requirements that name their place: wheels to install, and sources to build

    def _add_place(self, parsed: Requirement, line: RequirementLine) -> None:
        place = parsed.url or ""
        scheme = place.partition("://")[0] if "://" in place else ""
        try:
            parts = urlsplit(place if scheme else "")
        except ValueError as exc:
            raise ValueError(f"{strip_url_secrets(place)} is not a URL: {exc}") from exc
        if scheme not in ("", "file") or place.startswith("file://$"):
            self._add_url(parsed, line, parts)
        else:
            text = unquote(parts.path) if scheme else place.removeprefix("file:")
            self._add_path(parsed, line, text)

    def _add_path(self, parsed: Requirement, line: RequirementLine, text: str) -> None:
        # As pip and uv, which start at the working directory, or at the project with the metadata.
        bases = (line.base, self.root) if line.metadata else (self.root, line.base)
        path, place = find_path(text, bases), parsed.url or ""
        problem = _check_path(path, place, line.hashes)
        if problem:
            raise ValueError(problem)
        if path.suffix == ".whl" and path.is_file():
            self.wheels.append(digest_file(path))
            self._add_wheel(parsed, line, path.as_uri(), path.name)
            return
        if (path / "pyproject.toml").is_file():
            self._read_build_settings(parsed, path / "pyproject.toml")
        label, digest = shorten_path(path, self.root), digest_content(path, skip=self.skipped)
        source = SourceRequirement(requirement=str(path), label=label, digest=digest)
        self._add_source(parsed, source)

    def _add_source(self, parsed: Requirement, source: SourceRequirement) -> None:
        suffix, marker = format_extras(parsed.extras), str(parsed.marker or "")
        self.sources.append(replace(source, suffix=suffix, marker=marker))

    def _read_build_settings(self, parsed: Requirement, file: Path) -> None:
        try:
            data = toml.read(file)
        except ConfigError as exc:
            raise ValueError(exc.message) from exc
        extras = tuple(sorted(map(canonicalize_name, parsed.extras)))
        project = UvProject(file=file, document=data, extras=extras)
        self.problems += list_faults(project, self.lines.target, self.root)
        self.lines.leave_to_uv(project, None)

    def _add_url(self, parsed: Requirement, line: RequirementLine, parts: SplitResult) -> None:
        url, hashes = parsed.url or "", line.hashes
        file_name = unquote(parts.path.rpartition("/")[2])
        if file_name.endswith(".whl"):
            self._add_wheel(parsed, line, url, file_name)
            return
        clean, from_vcs = strip_credentials(url), "+" in parts.scheme
        if from_vcs and hashes:
            raise ValueError(f"{clean}: a repository has no sha256; name a commit of it instead")
        if not (from_vcs or file_name.endswith(_SDIST_ENDINGS)):
            raise ValueError(f"{clean} is neither a wheel nor an sdist")
        is_fixed = bool(_COMMIT.search(url)) if from_vcs else bool(hashes)
        words = [parsed.name, "@", url] if parsed.name else [url]
        options = filterfalse(parts.fragment.lower().__contains__, hashes)
        source = SourceRequirement(
            requirement=" ".join([*words, *map("--hash=sha256:{}".format, hashes)]),
            label=clean + _keep_fragment(parts.fragment, hashes),
            digest=Digest.of(canonical_json([clean, parts.fragment, *options])),
            moving=not is_fixed,
        )
        self._add_source(parsed, source)

    def _add_wheel(self, parsed: Requirement, line: RequirementLine, url: str, name: str) -> None:
        parsed.name, parsed.url = parse_wheel_filename(name)[0], url
        self.requirements.append(self._allow_hashes(parsed, line))

    def digest(self, target: Target) -> Digest:
        """Return the digest of all that determines a lock."""
        environment = self.environment
        content: dict[str, object] = {
            "format": 1,
            "requirements": list(map(self._make_portable, dict.fromkeys(self.requirements))),
            "constraints": list(dict.fromkeys(self.constraints)),
            "target": [target.python, target.platform],
            "torch-backend": environment.torch_backend,
            "wheels": self.wheels,
            "projects": [[one.digest, one.suffix, one.marker] for one in self.sources],
            "indexes": {
                key: self._make_portable(json.dumps(value))
                for key, value in self.indexes.to_dict().items()
            },
            "pylock": digest_file(self.pylock) if self.pylock else None,
        }
        optional = {
            "hashes": self.hashes,
            "require-hashes": bool(self.require_hashes),
            "index-strategy": environment.index_strategy,
        }
        content |= {key: value for key, value in optional.items() if value}
        for key, used in (("uv-lock", self.uv_lock), ("uv-project", self.uv_project)):
            if used is not None:
                places = [
                    [os.path.relpath(path, self.root), digest_content(path, skip=self.skipped)]
                    for path in filter(Path.exists, used.local_sources())
                ]
                content[key] = [used.identity(self.root), places]
        return Digest.of(canonical_json(content))

    def _make_portable(self, text: str) -> str:
        return text.replace(self.root.as_uri(), "file://.").replace(str(self.root), ".")


def _parse_line(line: RequirementLine) -> Requirement:
    if not _is_archive(line):
        try:
            return Requirement(line.text)
        except InvalidRequirement:
            place = line.text.partition(";")[0].strip()
            is_path = "/" in place or place.startswith((".", "~")) or place.endswith(_ARCHIVES)
            if line.constraint or not is_path:
                raise
    match = _LINE.fullmatch(line.text)
    if match is None:
        raise InvalidRequirement("neither a requirement nor a path")
    marker = f" ; {match['marker']}" if match["marker"] else ""
    parsed = Requirement(f"unnamed[{match['extras'] or ''}]{marker}")
    parsed.name, parsed.url = "", match["place"].strip()
    return parsed


def _is_archive(line: RequirementLine) -> bool:
    names_file = not (line.constraint or line.metadata)
    return names_file and foreign_files.parse_bare_name(line.text).endswith(_ARCHIVES)


def _check_path(path: Path, place: str, hashes: Sequence[str]) -> str:
    if not path.exists():  # `pip freeze` writes where conda built a package
        versions = "; `pip list --format=freeze` writes versions in place of such paths"
        return f"no such file or folder: {place}{versions * place.startswith('file:')}"
    if path.is_dir():
        if {"pyproject.toml", "setup.py"}.isdisjoint(file.name for file in path.iterdir()):
            return (
                f"{place} has neither pyproject.toml nor setup.py, so it cannot be installed; "
                "ship plain folders as [project] or [assets] paths"
            )
        wrong = "is a folder, which has no sha256; build a wheel of it and name that"
        return f"{place} {wrong}" if hashes else ""
    if not (path.is_file() and path.name.endswith(_ARCHIVES)):
        return f"{place} is neither a wheel nor an sdist; {foreign_files.make_remedy(path.name)}"
    if not hashes or (digest := digest_file(path)) in hashes:
        return ""
    return f"{place}: its sha256 is {digest}, which is not among the hashes given"


def _keep_fragment(fragment: str, hashes: Sequence[str]) -> str:
    """Return the fragment that a lock keeps: the subdirectory, and the sha256 if it is one."""
    kept = [part for part in fragment.split("&") if part.startswith("subdirectory=")]
    if len(hashes) == 1:
        kept.append(f"sha256={hashes[0]}")
    return f"#{'&'.join(kept)}" if kept else ""


@dataclass(frozen=True, kw_only=True)
class Spec:
    """All that determines a lock, read from disk."""

    root: Path
    requirements: tuple[str, ...]  # PEP 508, normalised, each once, in order
    constraints: tuple[str, ...]
    target: Target
    torch_backend: str | None  # PyTorch's index to add; ``auto`` for one by the drivers
    local_projects: tuple[SourceRequirement, ...]
    indexes: Indexes
    hashes: Mapping[str, tuple[str, ...]]  # sha256 of each file that may be installed, by package
    require_hashes: str  # the line or variable that requires hashes; empty for none
    pylock: Path | None  # a lock that the user supplied; then there are no requirements
    uv_lock: UvLock | None
    uv_project: UvProject | None  # the project whose settings only uv honours, where there is one
    index_strategy: str | None
    digest: Digest  # of all above, without paths of this machine, and of local folders
    builds: BuildSettings  # what builds from source are given; does not affect the lock
    prune: tuple[str, ...]  # does not affect the lock
    remarks: tuple[str, ...]  # for the user, a line each; do not affect the lock

    @property
    def all_indexes(self) -> Indexes:
        """The indexes of requirement files and of uv's projects, to fetch a lock's files from."""
        project = self.uv_lock.project if self.uv_lock else self.uv_project
        urls = project.indexes if project else ()
        return self.indexes.merge(Indexes(extra_index_urls=urls))

    @property
    def own_requirements(self) -> tuple[str, ...]:
        """The requirements that uv does not read from a project's file."""
        of_uv = self.uv_project.requirements if self.uv_project else ()
        return tuple(text for text in self.requirements if text not in of_uv)

    @property
    def urls(self) -> tuple[str, ...]:
        """The addresses of single files and repositories, with their credentials."""
        texts = (*self.requirements, *(source.requirement for source in self.local_projects))
        places = (text.rpartition(" @ ")[2].partition(" ")[0] for text in texts)
        return tuple(place for place in places if "://" in place)

    @property
    def overridden(self) -> frozenset[str]:
        """The packages that are taken against what other packages ask for."""
        of_uv = self.uv_lock or self.uv_project
        return of_uv.overridden if of_uv else frozenset()


def read_spec(config: Config) -> Spec:
    """Read every requirement a project names; refuse all that is wrong with them at once."""
    environment = config.environment
    python, platform = environment.python, environment.platform
    if not (python and platform):
        host = Target.from_host()
        python, platform = python or host.python, platform or host.platform
    target = Target(python=python, platform=platform)
    reader = SpecReader(config, target)
    reader.read()
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
        local_projects=tuple(reader.sources),
        indexes=reader.indexes,
        hashes=reader.hashes,
        require_hashes=reader.require_hashes,
        pylock=reader.pylock,
        uv_lock=reader.uv_lock,
        uv_project=reader.uv_project,
        index_strategy=environment.index_strategy,
        builds=BuildSettings(
            in_environment=frozenset(map(canonicalize_name, environment.no_build_isolation)),
            variables=dict(environment.build_env),
        ),
        prune=environment.prune,
        remarks=tuple(reader.remarks),
        digest=reader.digest(target),
    )
