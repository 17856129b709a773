"""The lock as a value, and what a PEP 751 file says about one target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from packaging.pylock import (
    Package,
    PackageArchive,
    PackageDirectory,
    PackageSdist,
    PackageVcs,
    PackageWheel,
    Pylock,
    PylockSelectError,
    PylockUnsupportedVersionError,
    PylockValidationError,
)

from ..core.errors import ResolveError
from ..core.values import Digest, LockedFile, Target
from .indexes import Indexes, strip_credentials
from .resolver import ResolvedFile, UnavailablePackage
from .spec import Spec

Chosen = PackageArchive | PackageDirectory | PackageSdist | PackageVcs | PackageWheel
_KINDS = {"wheels", "sdist", "archive", "vcs", "directory"}


@dataclass(frozen=True, kw_only=True)
class Lock:
    """Exactly one file for each package, for one target."""

    path: Path
    """The file it was read from or written to."""
    target: Target
    """The interpreter and platform it is for."""
    files: tuple[LockedFile, ...]
    """The files, sorted by package."""
    spec_digest: Digest | None
    """What it was made from; None in a lock that another tool wrote."""
    digest: Digest
    """Covers target, packages, versions and file digests; not where the files are."""
    indexes: Indexes
    """Where the files were found, beyond pip's own configuration; without credentials."""
    sources: tuple[tuple[str, str], ...]
    """Wheels that were built here: file name, and what from, relative to the lock's folder."""

    def is_current(self, spec: Spec) -> bool:
        """Whether the lock is what this spec asks for.

        A lock that the user brought is current as long as the spec names that very file.
        """
        if self.spec_digest is not None:
            return self.spec_digest == spec.digest
        return spec.pylock is not None and spec.pylock.absolute() == self.path.absolute()


def select(
    data: Mapping[str, Any], target: Target, *, base: Path, source: str
) -> tuple[list[ResolvedFile], list[UnavailablePackage]]:
    """The best file of each package that the target needs, and the packages that have none.

    Args:
        data: the lock, as parsed from TOML.
        target: the interpreter and platform to choose for.
        base: the folder that relative paths in the lock start from.
        source: what the lock is called in messages.

    Raises:
        ResolveError: it is not a valid lock, or holds what is not a file.
    """
    tags, environment = list(target.tags()), target.environment()
    entries = data.get("packages")
    found: list[ResolvedFile] = []
    absent: list[UnavailablePackage] = []
    _parse({**data, "packages": []} if isinstance(entries, list) else data, source)
    for entry in entries or []:
        if isinstance(entry, dict) and not _KINDS & entry.keys() and "name" in entry:
            # uv writes a package so when no file of it fits its --python-platform.
            absent.append(_absent(entry))
            continue
        # One package at a time, so that each tells by itself that nothing of it fits.
        single = _parse({**data, "packages": [entry]}, source)
        try:
            for package, chosen in single.select(environment=environment, tags=tags):
                found.append(_chosen(package, chosen, base, source))
        except PylockSelectError as exc:
            if "satisfy" in str(exc):  # the lock, or the package, is for another Python or system
                raise ResolveError(
                    f"{source} is not for Python {target.python} on {target.platform}: {exc}",
                    hint="set environment.python and environment.platform to what it is for",
                ) from exc
            absent.append(_absent(entry or {}))
    _require_one_each(found, source)
    return found, absent


def _parse(data: Mapping[str, Any], source: str) -> Pylock:
    try:
        return Pylock.from_dict(data)
    except (PylockValidationError, PylockUnsupportedVersionError) as exc:
        raise ResolveError(
            f"{source} is not a lock that can be read: {exc}",
            hint="it must follow PEP 751, for example as `stager lock` or `uv pip compile "
            "--format pylock.toml` writes it",
        ) from exc


def _chosen(package: Package, chosen: Chosen, base: Path, source: str) -> ResolvedFile:
    """Describe the file that was selected for a package."""
    if isinstance(chosen, PackageDirectory | PackageVcs):
        kind = "a folder" if isinstance(chosen, PackageDirectory) else "version control"
        raise ResolveError(
            f"{source} takes {package.name} from {kind}, which has no digest",
            hint="name what the lock was made from in environment.requirements instead, so that "
            "a wheel is built and locked",
        )
    url, path = chosen.url, Path(base / chosen.path) if chosen.path else None
    if url and url.startswith("file://"):
        url, path = None, Path(unquote(urlsplit(url).path))
    place = path.name if path else unquote(urlsplit(url or "").path.rpartition("/")[2])
    name = None if isinstance(chosen, PackageArchive) else chosen.name
    return ResolvedFile(
        filename=name or place,
        url=strip_credentials(url) if url else None,
        path=path,
        sha256=chosen.hashes.get("sha256"),
        size=chosen.size,
    )


def locked_files(found: Sequence[ResolvedFile], *, source: str) -> tuple[LockedFile, ...]:
    """Locked files, sorted by package, from files whose digests are known.

    Raises:
        ResolveError: files without a digest (all of them); ``source`` says whose they are.
    """
    without = [file.filename for file in found if not file.sha256]
    if without:
        raise ResolveError(
            f"{source} has no sha256 for some files",
            hint="download them and name the files, or a folder with them as --find-links, then "
            "run `stager lock`",
            context=without,
        )
    files = []
    for file in found:
        name, version = file.identity
        try:
            digest = Digest(str(file.sha256))
        except ValueError as exc:
            raise ResolveError(f"{source}: {file.filename}: {exc}") from exc
        files.append(
            LockedFile(
                name=name,
                version=version,
                filename=file.filename,
                sha256=digest,
                size=file.size,
                url=file.url,
                path=file.path,
            )
        )
    return tuple(sorted(files, key=lambda file: file.name))


def _require_one_each(found: list[ResolvedFile], source: str) -> None:
    """Refuse a lock in which two entries of one package hold for the same target."""
    try:
        names = [file.identity[0] for file in found]
    except ValueError as exc:
        raise ResolveError(f"{source}: {exc}", hint="a lock names wheels and sdists") from exc
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ResolveError(f"{source} gives more than one file for the same package", context=twice)


def _absent(entry: Mapping[str, Any]) -> UnavailablePackage:
    version = f"=={entry['version']}" if "version" in entry else ""
    files = [
        file.get("name") or str(file.get("url") or file.get("path") or "")
        for file in entry.get("wheels") or []
    ]
    names = tuple(unquote(urlsplit(name).path.rpartition("/")[2]) for name in files)
    return UnavailablePackage(requirement=f"{entry['name']}{version}", files=names)
