"""What a resolver is asked and what it answers, whichever program does the work."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

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
from .indexes import Indexes
from .pip import Pip

_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
TAGS_SHOWN = 6
VERSIONS_SHOWN = 5

ResolverName = Literal["auto", "uv", "pip-tools"]


@dataclass(frozen=True, kw_only=True)
class ResolveRequest:
    """Requirements to resolve into one exact file for each package."""

    requirements: tuple[str, ...]
    """PEP 508 requirements; none needs to be built."""
    constraints: tuple[str, ...]
    """PEP 508 requirements that limit versions only."""
    target: Target
    """The interpreter and platform to resolve for."""
    indexes: Indexes
    """Where to look, on top of pip's own configuration."""
    scratch: Path
    """A private folder to work in."""
    offline: bool = False
    """Whether only ``indexes.find_links`` counts."""
    run: Runner = run
    """Starts processes."""

    @property
    def names(self) -> set[NormalizedName]:
        """The packages that the user named."""
        return {name_of(text) for text in self.requirements}

    @property
    def pip(self) -> Pip:
        """Pip, called with the same means."""
        return Pip(
            target=self.target,
            indexes=self.indexes,
            scratch=self.scratch,
            offline=self.offline,
            run=self.run,
        )


@dataclass(frozen=True, kw_only=True)
class ResolvedFile:
    """The file a resolver chose for a package; what it does not know is None."""

    filename: str
    """The file's own name."""
    url: str | None = None
    """Where it is, without credentials."""
    path: Path | None = None
    """Where it is on this machine."""
    sha256: str | None = None
    """The digest the index gives."""
    size: int | None = None
    """Length in bytes."""

    @property
    def identity(self) -> tuple[NormalizedName, Version]:
        """Package and version, from the file's name; ValueError where it has neither."""
        if self.filename.endswith(".whl"):
            return parse_wheel_filename(self.filename)[:2]
        return parse_sdist_filename(self.filename)


@dataclass(frozen=True, kw_only=True)
class UnavailablePackage:
    """A package for which no file was found that fits."""

    requirement: str
    """The package with the versions that would do: ``numpy==1.0``."""
    files: tuple[str, ...] = field(default=())
    """Names of the files that exist, if already known."""
    parent: str = ""
    """The package that requires it, if known."""


class NoSolution(Exception):
    """The requirements cannot all be met."""

    def __init__(
        self, reason: str, *, blamed: set[NormalizedName], absent: list[UnavailablePackage]
    ) -> None:
        """Carry one reason.

        Args:
            reason: the resolver's own, as one paragraph.
            blamed: the packages, of those the user named, that it involves.
            absent: packages without a file that fits, where that is the reason.
        """
        super().__init__(reason)
        self.reason = reason
        self.blamed = blamed
        self.absent = absent


class Solver(Protocol):
    """One program that resolves."""

    def solve(self, request: ResolveRequest) -> list[ResolvedFile]:
        """Resolve, with digests; raises NoSolution, or ResolveError where asking itself failed."""

    def check(self, request: ResolveRequest) -> None:
        """Find out, as cheaply as possible, whether there is a solution; raises as ``solve``."""


def name_of(requirement: str) -> NormalizedName:
    """The package a PEP 508 requirement is for."""
    return canonicalize_name(Requirement(requirement).name)


def names_in(text: str, known: set[NormalizedName]) -> set[NormalizedName]:
    """Those of some package names that occur in a text."""
    words = {canonicalize_name(word.rstrip("._-")) for word in _WORD.findall(text)}
    return words & known


def describe_unavailable(absent: UnavailablePackage, target: Target) -> str:
    """Say why no file fits, with what there is instead."""
    wanted = Requirement(absent.requirement)
    asked = f"{absent.requirement} (for {absent.parent})" if absent.parent else absent.requirement
    versions: dict[Version, list[str]] = {}
    for name in absent.files:
        try:
            owner, version = ResolvedFile(filename=name).identity
        except ValueError:  # an old installer's file, which nobody installs from
            continue
        if owner == canonicalize_name(wanted.name):
            versions.setdefault(version, []).append(name)
    if not versions:
        return f"{asked}: no index has a package of this name"
    fitting = [v for v in versions if wanted.specifier.contains(v, prereleases=True)]
    if not fitting:
        newest = ", ".join(str(v) for v in sorted(versions)[-VERSIONS_SHOWN:])
        return f"{asked}: no such version; the newest are {newest}"
    version = max(fitting)
    tags = sorted({"-".join(n[:-4].split("-")[-3:]) for n in versions[version] if n[-4:] == ".whl"})
    shown = ", ".join(tags[:TAGS_SHOWN]) or "no wheel at all"
    more = f" and {len(tags) - TAGS_SHOWN} more" if len(tags) > TAGS_SHOWN else ""
    return (
        f"{wanted.name} {version}: no wheel for {target.python_tag} on {target.platform}; "
        f"there are {shown}{more}"
    )
