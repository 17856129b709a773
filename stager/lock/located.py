"""Requirements that name their place: a folder, an archive or a URL."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import unquote, urlsplit

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

from bundle.protocol.digest import canonical_json
from bundle.redaction.masking import without_url_secrets

from ..config import foreign_files
from ..core import toml
from ..core.errors import ConfigError
from ..core.processes import Runner
from ..core.store import sha256_of
from ..core.values import Digest
from . import source_tree, tool_settings, uv_settings
from .indexes import strip_credentials
from .requirement_line import (
    RequirementLine,
    expand_user,
    format_extras,
    normalize_requirement,
    relative,
)
from .uv_project import UvProject

SDIST_ENDINGS = (".tar.gz", ".zip", ".tar.bz2", ".tar.xz", ".tgz")
ARCHIVES = (".whl", *SDIST_ENDINGS)

_LINE = re.compile(
    r"(?P<place>[^;\[\]\s]+|[^;]+?)\s*(\[(?P<extras>[^\]]*)\])?\s*(;(?P<marker>.*))?"
)
_CONDA = re.compile(r"/(croot|feedstock_root|conda-bld|conda/feedstock\w*|tmp/build/\d+)/")
_FREEZE = (
    ", where conda built the package: `pip list --format=freeze` writes versions in place of such "
    "paths"
)
_COMMIT = re.compile(r"@[0-9a-f]{40}(#|$)")


@dataclass(frozen=True, kw_only=True)
class SourceRequirement:
    """A source that is built into a wheel before anything is resolved."""

    requirement: str
    """The path or URL that pip builds; may hold credentials."""
    label: str
    """The same as the user wrote it, without credentials; relative paths start at the root."""
    digest: Digest
    """Digest of its content, or of its URL where the content is elsewhere."""
    suffix: str = ""
    """Extras of the requirement, as they follow the name: ``[train]``."""
    marker: str = ""
    """The environment marker; empty for none."""
    moving: bool = False
    """True if the same digest may stand for other content later, as for a branch."""


@dataclass(frozen=True, kw_only=True)
class LocatedRequirement:
    """A requirement whose place is known."""

    line: RequirementLine
    """The line it was written in."""
    place: str
    """A path or a URL."""
    extras: str
    """Extras as they follow a name, ``[a,b]``."""
    marker: str
    """The environment marker; empty for none."""
    name: str = ""
    """The package, where the line names it."""


class SourceReader:
    """Sorts requirements with a place into wheels to install and sources to build."""

    def __init__(
        self, root: Path, python: str, *, skipped: Iterable[Path], run: Runner, problems: list[str]
    ) -> None:
        """Start empty.

        Args:
            root: the project's folder.
            python: the environment's Python, ``major.minor``.
            skipped: files and folders that never count as part of a source.
            run: starts ``git``.
            problems: a list to add every problem to.
        """
        self.root = root
        self.python = python
        self.skipped = tuple(skipped)
        self.run = run
        self.sources: list[SourceRequirement] = []
        self.wheels: list[Digest] = []
        self.uv_projects: list[UvProject] = []
        self.hashes: dict[str, tuple[str, ...]] = {}
        """The sha256 of each file that may be installed, for each package that has hashes."""
        self.problems = problems

    def read(self, requirement: LocatedRequirement) -> str | None:
        """Take one requirement: a path, a file URL, or something on a server.

        Returns:
            The requirement that installs a wheel; None for a source, which has to be built first.
        """
        line, place = requirement.line, requirement.place
        scheme = place.partition("://")[0] if "://" in place else ""
        if scheme not in ("", "file") or place.startswith("file://$"):
            return self._read_url(requirement)
        # pip and uv start at the working directory, which is the project's folder; in the metadata
        # of a project, at that project.
        bases = (line.base, self.root) if line.metadata else (self.root, line.base)
        path = _local_path(place, bases)
        problem = _unusable(path, place) or _compare_hashes(path, place, line.hashes)
        if problem:
            self.problems.append(f"{line.origin}: {problem}")
        elif path.suffix == ".whl" and path.is_file():
            self.wheels.append(sha256_of(path))
            return self._wheel(requirement, path.as_uri(), path.name)
        else:
            self._add_local_source(requirement, path)
        return None

    def _add_local_source(self, requirement: LocatedRequirement, path: Path) -> None:
        file = path / "pyproject.toml"
        if file.is_file():
            self._read_settings(requirement, file)
        source = SourceRequirement(
            requirement=str(path),
            label=relative(path, self.root),
            suffix=requirement.extras,
            marker=requirement.marker,
            digest=self.content_digest(path),
        )
        self.sources.append(source)

    def _read_settings(self, requirement: LocatedRequirement, file: Path) -> None:
        """Refuse settings of a local project that a build of it would ignore.

        Where only uv honours them, the project's dependencies are uv's to read.
        """
        try:
            data = toml.read(file)
        except ConfigError as exc:
            self.problems.append(exc.message)
            return
        extras = tuple(name for name in requirement.extras.strip("[]").split(",") if name)
        project = UvProject(file=file, document=data, extras=extras)
        self.problems += tool_settings.list_faults(project, self.python, self.root)
        keys = uv_settings.list_keys(project.tables, None, self.root)
        if keys:
            self.uv_projects.append(replace(project, keys=keys))

    def content_digest(self, path: Path) -> Digest:
        """Return the digest of a file, or of a folder's files that count."""
        if path.is_file():
            return sha256_of(path)
        names = source_tree.files(path, skip=self.skipped, run=self.run)
        return source_tree.digest(path, names)

    def _read_url(self, requirement: LocatedRequirement) -> str | None:
        url, origin, hashes = requirement.place, requirement.line.origin, requirement.line.hashes
        try:
            parts = urlsplit(url)
        except ValueError as exc:
            self.problems.append(f"{origin}: {without_url_secrets(url)} is not a URL: {exc}")
            return None
        file_name = unquote(parts.path.rpartition("/")[2])
        if file_name.endswith(".whl"):
            return self._wheel(requirement, url, file_name)
        clean = strip_credentials(url)
        from_vcs = "+" in parts.scheme
        problem = ""
        if not from_vcs and not file_name.endswith(SDIST_ENDINGS):
            problem = " is neither a wheel nor an sdist"
        elif from_vcs and hashes:
            problem = ": a repository has no sha256; name a commit of it instead"
        if problem:
            self.problems.append(f"{origin}: {clean}{problem}")
            return None
        line = f"{requirement.name} @ {url}" if requirement.name else url
        options = [digest for digest in hashes if digest not in parts.fragment.lower()]
        source = SourceRequirement(
            requirement=" ".join([line, *(f"--hash=sha256:{digest}" for digest in hashes)]),
            label=clean + _keep_fragment(parts.fragment, hashes),
            suffix=requirement.extras,
            marker=requirement.marker,
            digest=Digest.of(canonical_json([clean, parts.fragment, *options])),
            moving=not (_COMMIT.search(url) if from_vcs else hashes),
        )
        self.sources.append(source)
        return None

    def allow_hashes(self, name: str, hashes: tuple[str, ...]) -> None:
        """Note which files may be installed for a package."""
        if hashes:
            name = canonicalize_name(name)
            self.hashes[name] = (*self.hashes.get(name, ()), *hashes)

    def _wheel(self, requirement: LocatedRequirement, url: str, file_name: str) -> str | None:
        """Return the requirement that takes a package's wheel from a URL."""
        try:
            name = parse_wheel_filename(file_name)[0]
        except ValueError as exc:
            self.problems.append(f"{requirement.line.origin}: {first_line(exc)}")
            return None
        self.allow_hashes(name, requirement.line.hashes)
        marker = f" ; {requirement.marker}" if requirement.marker else ""
        return normalize_requirement(Requirement(f"{name}{requirement.extras} @ {url}{marker}"))


def names_place(text: str) -> bool:
    """Return whether a line that is not a requirement by the standard (PEP 508) names a place."""
    place = text.partition(";")[0].strip()
    return place.startswith((".", "/", "~")) or "/" in place or place.endswith(ARCHIVES)


def parse(line: RequirementLine) -> LocatedRequirement | None:
    """Return place, extras and marker of a line; None if it names no place."""
    match = _LINE.fullmatch(line.text)
    if match is None:
        return None
    extras = (match["extras"] or "").split(",")
    return LocatedRequirement(
        line=line,
        place=match["place"].strip(),
        extras=format_extras(extra.strip() for extra in extras),
        marker=(match["marker"] or "").strip(),
    )


def first_line(exc: Exception) -> str:
    """Return the first line of an exception's message."""
    return str(exc).splitlines()[0]


def _unusable(path: Path, place: str) -> str:
    """Return why a path cannot be built into a wheel; empty if it can."""
    if not path.exists():
        built_by_conda = _CONDA.search(place)
        return f"no such file or folder: {place}" + (_FREEZE if built_by_conda else "")
    if path.is_dir():
        if (path / "pyproject.toml").is_file() or (path / "setup.py").is_file():
            return ""
        return (
            f"{place} has neither pyproject.toml nor setup.py, so it cannot be installed; "
            "ship plain folders as [project] or [assets] paths"
        )
    if not path.is_file():
        return f"{place} is not a regular file, but a pipe, a socket or a device; name a file"
    if not path.name.endswith(ARCHIVES):
        remedy = foreign_files.remedy(path.name)
        return f"{place} is neither a wheel nor an sdist; {remedy}"
    return ""


def _compare_hashes(path: Path, place: str, hashes: Collection[str]) -> str:
    """Return why a path is not what its hashes allow; empty if it is, or if there are none."""
    if not hashes:
        return ""
    if path.is_dir():
        return f"{place} is a folder, which has no sha256; build a wheel of it and name that"
    digest = sha256_of(path)
    if digest in hashes:
        return ""
    return f"{place}: its sha256 is {digest}, which is not among the hashes given"


def _keep_fragment(fragment: str, hashes: Sequence[str]) -> str:
    """Return the parts of a source's fragment that a build of it needs, to be kept in a lock."""
    kept = [part for part in fragment.split("&") if part.startswith("subdirectory=")]
    if len(hashes) == 1:
        kept.append(f"sha256={hashes[0]}")
    return f"#{'&'.join(kept)}" if kept else ""


def _local_path(place: str, folders: Iterable[Path]) -> Path:
    """Return the path that a line means: the first that exists, else that in the first folder."""
    text = unquote(urlsplit(place).path) if place.startswith("file://") else place
    text = text.removeprefix("file:")  # which may stand before a relative path
    paths = [Path(os.path.normpath(folder / expand_user(text))) for folder in folders]
    for path in paths:
        if path.exists():
            return path
    return paths[0]
