"""Differences between two sets of packages, and what they mean in bytes to send."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from .pylock import Lock


@dataclass(frozen=True, kw_only=True)
class PackageFile:
    """A package as one of the two sets has it."""

    name: str
    """The package."""
    version: str
    """Its version."""
    content: str
    """What tells two files of one version apart."""
    bytes: int
    """Its size in bytes; 0 where it is unknown."""


@dataclass(frozen=True, kw_only=True)
class PackageChange:
    """A package that two sets have in different versions, or that only one of them has."""

    name: str
    """The package."""
    old: str | None
    """Its version in the earlier set; None if it is new."""
    new: str | None
    """Its version in the later set; None if it is gone."""
    bytes: int
    """Size of its new file in bytes; 0 if it is gone, or where no server told the size."""


@dataclass(frozen=True, kw_only=True)
class PackageChanges:
    """The difference between two sets of packages."""

    added: tuple[PackageChange, ...] = ()
    """Packages that only the later set has."""
    removed: tuple[PackageChange, ...] = ()
    """Packages that only the earlier set has."""
    changed: tuple[PackageChange, ...] = ()
    """Packages with another version, or with another file of the same version."""
    bytes: int = 0
    """What has to be sent to a node that has all of the earlier set; for locks, about."""

    @property
    def any(self) -> bool:
        """Return whether there is a difference."""
        return bool(self.added or self.removed or self.changed)


def changes(earlier: Lock | None, later: Lock) -> PackageChanges:
    """Return what a lock changes; everything is added where there was none before."""
    return compare(_files(earlier) if earlier else (), _files(later))


def compare(earlier: Iterable[PackageFile], later: Iterable[PackageFile]) -> PackageChanges:
    """Return the difference between two sets of packages."""
    old = {file.name: file for file in earlier}
    new = {file.name: file for file in later}
    other = {name for name in new.keys() & old.keys() if new[name].content != old[name].content}
    added = _listed(new.keys() - old.keys(), old, new)
    changed = _listed(other, old, new)
    return PackageChanges(
        added=added,
        removed=_listed(old.keys() - new.keys(), old, new),
        changed=changed,
        bytes=sum(change.bytes for change in (*added, *changed)),
    )


def _files(lock: Lock) -> list[PackageFile]:
    return [
        PackageFile(
            name=file.name,
            version=str(file.version),
            content=str(file.sha256),
            bytes=file.size or 0,
        )
        for file in lock.files
    ]


def _listed(
    names: Iterable[str], old: Mapping[str, PackageFile], new: Mapping[str, PackageFile]
) -> tuple[PackageChange, ...]:
    pairs = [(name, old.get(name), new.get(name)) for name in sorted(names)]
    return tuple(
        PackageChange(
            name=name,
            old=before.version if before else None,
            new=after.version if after else None,
            bytes=after.bytes if after else 0,
        )
        for name, before, after in pairs
    )
