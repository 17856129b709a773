"""Requests to a resolver and its answers, the same for every program that resolves."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from packaging.pylock import Package, PackageDirectory, PackageVcs
from packaging.requirements import Requirement
from packaging.utils import (
    NormalizedName,
    canonicalize_name,
    parse_sdist_filename,
    parse_wheel_filename,
)
from packaging.version import Version

from ..core.processes import Runner, run
from ..core.values import Target
from .cutoff import timestamp
from .git_pin import GitPin
from .indexes import Indexes, PipSettings
from .pip import Pip
from .requirement_line import list_names
from .spec import Spec

_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
TAGS_SHOWN = 6
VERSIONS_SHOWN = 5

ResolverName = Literal["auto", "uv", "pip-tools"]


@dataclass(frozen=True, kw_only=True)
class KeptPins:
    """The parts of a lock that the next one keeps."""

    pins: tuple[str, ...] = ()
    """``name==version`` of packages from an index."""
    git: tuple[GitPin, ...] = ()
    """Commits of packages from git repositories, where the same branch is asked for."""
    cutoff: str | None = None
    """The cutoff: that of the command, else that of the lock before; None for none."""

    @property
    def exclude_newer(self) -> str | None:
        """Return the time in UTC after which uploaded files do not count; None for no limit."""
        return timestamp(self.cutoff) if self.cutoff else None


@dataclass(frozen=True, kw_only=True)
class ResolveRequest:
    """Requirements to resolve into one exact file for each package."""

    spec: Spec
    """All that was read: target, hashes, settings of uv and of builds."""
    requirements: tuple[str, ...]
    """PEP 508 requirements; none needs to be built, and none is uv's to read from its file."""
    constraints: tuple[str, ...]
    """PEP 508 requirements that limit versions only."""
    indexes: Indexes
    """Places to look in, on top of pip's own configuration."""
    scratch: Path
    """A private folder to work in."""
    keep: KeptPins = KeptPins()
    """The parts of the lock before that are kept where the requirements allow."""
    settings: PipSettings | None = None
    """pip's configuration; None where nothing is resolved."""
    torch_backend: str | None = None
    """Name of PyTorch's index that uv takes its packages from; None for none."""
    build: BuildSource | None = None
    """Builds the wheel of what uv takes from a folder or from a git repository."""
    offline: bool = False
    """True if only ``indexes.find_links`` counts."""
    packages: Path | None = None
    """A folder of installed packages, for builds without isolation; None for none."""
    run: Runner = run
    """Starts processes."""

    @property
    def names(self) -> set[NormalizedName]:
        """Return the packages that the user named."""
        of_uv = self.spec.uv_project.requirements if self.spec.uv_project else ()
        return {name_of(text) for text in self.requirements} | list_names(of_uv)

    @property
    def pip(self) -> Pip:
        """Return a way to call pip with the same settings."""
        return Pip(
            target=self.spec.target,
            indexes=self.indexes,
            scratch=self.scratch,
            offline=self.offline,
            builds=self.spec.builds,
            run=self.run,
        )


@dataclass(frozen=True, kw_only=True)
class ResolvedFile:
    """The file a resolver chose for a package; None for what it does not know."""

    filename: str
    """The file's own name."""
    url: str | None = None
    """Its address, without credentials."""
    path: Path | None = None
    """Its path on this machine."""
    sha256: str | None = None
    """The digest the index gives."""
    size: int | None = None
    """Length in bytes."""

    @property
    def identity(self) -> tuple[NormalizedName, Version]:
        """Return package and version, read from the file's name.

        Raises:
            ValueError: the name has no version, or leaves the folder that a file of it is put in.
        """
        if "/" in self.filename or not self.filename.isprintable():
            raise ValueError(f"{self.filename!r} is not the name of a file")
        if self.filename.endswith(".whl"):
            return parse_wheel_filename(self.filename)[:2]
        return parse_sdist_filename(self.filename)


BuildSource = Callable[[Package, PackageVcs | PackageDirectory, Path], ResolvedFile]
"""Builds the wheel of a package of a lock; the path is where relative ones start from."""


@dataclass(frozen=True, kw_only=True)
class UnavailablePackage:
    """A package for which no file was found that fits."""

    requirement: str
    """The package with the versions that would do: ``numpy==1.0``."""
    files: tuple[str, ...] = field(default=())
    """Names of the files that exist, if already known."""
    parent: str = ""
    """The package that requires it, if known."""


@dataclass(eq=False)
class NoSolution(Exception):
    """The requirements cannot all be met."""

    reason: str
    """The resolver's explanation, as one paragraph."""
    blamed: set[NormalizedName]
    """The packages, of those the user named, that it involves."""
    absent: list[UnavailablePackage]
    """Packages without a file that fits, if that is the reason."""
    not_searched: Sequence[str] = ()
    """Lines about indexes that did not count, as an earlier one has the name."""


class Solver(Protocol):
    """One program that resolves."""

    def solve(self, request: ResolveRequest) -> list[ResolvedFile]:
        """Resolve, with digests; raises NoSolution, or ResolveError if the program failed."""

    def check(self, request: ResolveRequest) -> None:
        """Find out, as cheaply as possible, whether there is a solution; raises as ``solve``."""


def name_of(requirement: str) -> NormalizedName:
    """Return the package a PEP 508 requirement is for."""
    return canonicalize_name(Requirement(requirement).name)


def names_in(text: str, known: set[NormalizedName]) -> set[NormalizedName]:
    """Return the known package names that occur in a text."""
    words = {canonicalize_name(word.rstrip("._-")) for word in _WORD.findall(text)}
    return words & known


def describe_unavailable(package: UnavailablePackage, target: Target) -> str:
    """Describe why no file fits, and what exists instead."""
    requirement = Requirement(package.requirement)
    shown = package.requirement
    if package.parent:
        shown += f" (for {package.parent})"
    files = _files_by_version(package)
    if not files:
        return f"{shown}: no index has a package of this name"
    fitting = [v for v in files if requirement.specifier.contains(v, prereleases=True)]
    if not fitting:
        newest = ", ".join(str(version) for version in sorted(files)[-VERSIONS_SHOWN:])
        return f"{shown}: no such version; the newest are {newest}"
    version = max(fitting)
    return (
        f"{requirement.name} {version}: no wheel for {target.python_tag} on {target.platform}; "
        f"there are {_wheel_tags(files[version])}"
    )


def _files_by_version(package: UnavailablePackage) -> dict[Version, list[str]]:
    name = canonicalize_name(Requirement(package.requirement).name)
    files: dict[Version, list[str]] = {}
    for filename in package.files:
        try:
            owner, version = ResolvedFile(filename=filename).identity
        except ValueError:  # an old installer's file, which nobody installs from
            continue
        if owner == name:
            files.setdefault(version, []).append(filename)
    return files


def _wheel_tags(filenames: Sequence[str]) -> str:
    stems = [name.removesuffix(".whl") for name in filenames if name.endswith(".whl")]
    tags = {"-".join(stem.split("-")[-3:]) for stem in stems}
    if not tags:
        return "no wheel at all"
    listed = ", ".join(sorted(tags)[:TAGS_SHOWN])
    if len(tags) > TAGS_SHOWN:
        listed += f" and {len(tags) - TAGS_SHOWN} more"
    return listed
