"""Requirements that name their place: a folder, an archive or a URL."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import SplitResult, unquote, urlsplit

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

from bundle.protocol.digest import canonical_json
from bundle.redaction.secrets import without_url_secrets

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
    find_path,
    format_extras,
    normalize_requirement,
    relative,
)
from .requirements import RequirementReader
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


class SourceReader:
    """Sorts requirements with a place into wheels to install and sources to build."""

    def __init__(self, taken: RequirementReader, *, skipped: Iterable[Path], run: Runner) -> None:
        self.taken = taken
        self.root = taken.root
        self.problems = taken.problems
        self.skipped = tuple(skipped)
        self.run = run
        self.sources: list[SourceRequirement] = []
        self.wheels: list[Digest] = []
        self.hashes: dict[str, tuple[str, ...]] = {}
        """The sha256 of each file that may be installed, for each package that has hashes."""

    def read(self, requirement: Requirement, line: RequirementLine) -> str | None:
        """Take one requirement with a URL: a path, a file URL, or something on a server.

        Returns:
            The requirement that installs a wheel; None for a source, which has to be built first.
        """
        place = requirement.url or ""
        scheme = place.partition("://")[0] if "://" in place else ""
        try:
            parts = urlsplit(place if scheme else "")
        except ValueError as exc:
            self.problems.append(f"{line.origin}: {without_url_secrets(place)} is not a URL: {exc}")
            return None
        if scheme not in ("", "file") or place.startswith("file://$"):
            return self._read_url(requirement, line, parts)
        # pip and uv start at the working directory, which is the project's folder; in the metadata
        # of a project, at that project.
        bases = (line.base, self.root) if line.metadata else (self.root, line.base)
        text = unquote(parts.path) if scheme else place.removeprefix("file:")
        path = find_path(text, bases)
        problem = _unusable(path, place) or _compare_hashes(path, place, line.hashes)
        if problem:
            self.problems.append(f"{line.origin}: {problem}")
        elif path.suffix == ".whl" and path.is_file():
            self.wheels.append(sha256_of(path))
            return self._wheel(requirement, line, path.as_uri(), path.name)
        else:
            self._add_local_source(requirement, path)
        return None

    def _add_local_source(self, requirement: Requirement, path: Path) -> None:
        file = path / "pyproject.toml"
        if file.is_file():
            self._read_settings(requirement, file)
        source = SourceRequirement(
            requirement=str(path),
            label=relative(path, self.root),
            suffix=format_extras(requirement.extras),
            marker=str(requirement.marker or ""),
            digest=self.content_digest(path),
        )
        self.sources.append(source)

    def _read_settings(self, requirement: Requirement, file: Path) -> None:
        """Report settings that a build ignores; leave a project with uv-only settings to uv."""
        try:
            data = toml.read(file)
        except ConfigError as exc:
            self.problems.append(exc.message)
            return
        extras = tuple(sorted(map(canonicalize_name, requirement.extras)))
        project = UvProject(file=file, document=data, extras=extras)
        self.problems += tool_settings.list_faults(project, self.taken.python, self.root)
        keys = uv_settings.list_keys(project.tables, None, self.root)
        if keys:
            self.taken.leave_to_uv(replace(project, keys=keys))

    def content_digest(self, path: Path) -> Digest:
        """Return the digest of a file, or of a folder's files that count."""
        return source_tree.digest_content(path, skip=self.skipped, run=self.run)

    def _read_url(
        self, requirement: Requirement, line: RequirementLine, parts: SplitResult
    ) -> str | None:
        url, hashes = requirement.url or "", line.hashes
        file_name = unquote(parts.path.rpartition("/")[2])
        if file_name.endswith(".whl"):
            return self._wheel(requirement, line, url, file_name)
        clean = strip_credentials(url)
        from_vcs = "+" in parts.scheme
        problem = ""
        if not from_vcs and not file_name.endswith(SDIST_ENDINGS):
            problem = " is neither a wheel nor an sdist"
        elif from_vcs and hashes:
            problem = ": a repository has no sha256; name a commit of it instead"
        if problem:
            self.problems.append(f"{line.origin}: {clean}{problem}")
            return None
        text = f"{requirement.name} @ {url}" if requirement.name else url
        options = [digest for digest in hashes if digest not in parts.fragment.lower()]
        source = SourceRequirement(
            requirement=" ".join([text, *(f"--hash=sha256:{digest}" for digest in hashes)]),
            label=clean + _keep_fragment(parts.fragment, hashes),
            suffix=format_extras(requirement.extras),
            marker=str(requirement.marker or ""),
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

    def _wheel(
        self, requirement: Requirement, line: RequirementLine, url: str, file_name: str
    ) -> str | None:
        try:
            name = parse_wheel_filename(file_name)[0]
        except ValueError as exc:
            self.problems.append(f"{line.origin}: {first_line(exc)}")
            return None
        self.allow_hashes(name, line.hashes)
        requirement.name, requirement.url = name, url
        return normalize_requirement(requirement)


def parse(line: RequirementLine) -> Requirement:
    """Return what a line asks for: a package, or a place (then it has a URL, and may lack a name).

    Raises:
        InvalidRequirement: it is neither a requirement by the standard (PEP 508) nor a place.
    """
    text = line.text
    if line.constraint or line.metadata or not is_archive(text):
        try:
            return Requirement(text)
        except InvalidRequirement:
            place = text.partition(";")[0].strip()
            names_place = "/" in place or place.startswith((".", "~")) or place.endswith(ARCHIVES)
            if line.constraint or not names_place:
                raise
    match = _LINE.fullmatch(text)
    if match is None:
        raise InvalidRequirement("neither a requirement nor a path")
    marker = (match["marker"] or "").strip()
    parsed = Requirement(f"unnamed[{match['extras'] or ''}]{' ; ' if marker else ''}{marker}")
    parsed.name, parsed.url = "", match["place"].strip()
    return parsed


def is_archive(text: str) -> bool:
    """Return whether a line is nothing but the name of a wheel or an sdist."""
    return foreign_files.bare_name(text).endswith(ARCHIVES)


def first_line(exc: Exception) -> str:
    """Return the first line of an exception's message."""
    return str(exc).splitlines()[0]


def _unusable(path: Path, place: str) -> str:
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
    if not hashes:
        return ""
    if path.is_dir():
        return f"{place} is a folder, which has no sha256; build a wheel of it and name that"
    digest = sha256_of(path)
    if digest in hashes:
        return ""
    return f"{place}: its sha256 is {digest}, which is not among the hashes given"


def _keep_fragment(fragment: str, hashes: Sequence[str]) -> str:
    """Return the fragment that a lock keeps: the subdirectory, and the sha256 if it is one."""
    kept = [part for part in fragment.split("&") if part.startswith("subdirectory=")]
    if len(hashes) == 1:
        kept.append(f"sha256={hashes[0]}")
    return f"#{'&'.join(kept)}" if kept else ""
