"""The lock as a value, and the files that a PEP 751 lock has for one target."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from packaging.markers import UndefinedComparison, UndefinedEnvironmentName
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
from packaging.utils import BuildTag, parse_wheel_filename

from ..core.errors import ResolveError
from ..core.values import Digest, LockedFile, Target
from ..hub.repositories import LockedRepository
from .git_pin import GitPin
from .indexes import Indexes, strip_credentials
from .resolver import BuildSource, ResolvedFile, UnavailablePackage
from .spec import Spec

if TYPE_CHECKING:
    from packaging.markers import Environment
    from packaging.tags import Tag

SelectedFile = PackageArchive | PackageDirectory | PackageSdist | PackageVcs | PackageWheel
_FILE_KEYS = {"wheels", "sdist", "archive", "vcs", "directory"}


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
    """Digest of the spec it was made from; None in a lock that another tool wrote."""
    digest: Digest
    """Covers target, packages, versions and file digests; not where the files are."""
    indexes: Indexes
    """The indexes that were used, beyond pip's own configuration; without credentials."""
    sources: tuple[tuple[str, str], ...]
    """Wheels built here: file name, and source relative to the lock's folder."""
    git: tuple[GitPin, ...] = ()
    """The commits of packages that uv took from git repositories."""
    exclude_newer: str | None = None
    """The cutoff it was made with; None for none. See :mod:`stager.lock.cutoff`."""
    torch_backend: str | None = None
    """PyTorch's index that ``torch-backend = "auto"`` has become; None for another setting."""
    assets: tuple[LockedRepository, ...] = ()
    """Models and data sets of the hub, in the order of the settings."""

    def is_current(self, spec: Spec) -> bool:
        """Return whether the lock matches this spec.

        A lock that the user supplied is current as long as the spec names that very file.
        """
        if self.spec_digest is not None:
            return self.spec_digest == spec.digest
        return spec.pylock is not None and spec.pylock.absolute() == self.path.absolute()

    def pins(self, upgraded: Collection[str] = ()) -> tuple[str, ...]:
        """Return ``name==version`` of packages from an index, without ``upgraded`` (normalized)."""
        built = {wheel for wheel, _ in self.sources}
        return tuple(
            f"{file.name}=={file.version}"
            for file in self.files
            if file.filename not in built and file.name not in upgraded
        )


def select(
    data: Mapping[str, Any],
    target: Target,
    *,
    base: Path,
    source: str,
    build: BuildSource | None = None,
) -> tuple[list[ResolvedFile], list[UnavailablePackage]]:
    """Return the best file of each package the target needs, and the packages that have none.

    Raises:
        ResolveError: it is not a valid lock, or holds what is not a file and cannot be built.
    """
    entries = data.get("packages")
    _parse({**data, "packages": []} if isinstance(entries, list) else data, source)
    tags, environment = list(target.tags()), target.environment()
    files: list[ResolvedFile] = []
    unavailable: list[UnavailablePackage] = []
    for entry in entries or []:
        if _has_no_file(entry):
            unavailable.append(_unavailable(entry))
            continue
        # One package at a time, so that each is reported by itself if nothing of it fits.
        single = _parse({**data, "packages": [_order_wheels(entry)]}, source)
        try:
            for package, selected in _chosen(single, environment, tags, source):
                if build and isinstance(selected, PackageVcs | PackageDirectory):
                    files.append(build(package, selected, base))
                else:
                    files.append(_resolved_file(package, selected, base, source))
        except PylockSelectError as exc:
            if "satisfy" in str(exc):  # the lock, or the package, is for another Python or system
                raise ResolveError(
                    f"{source} is not for Python {target.python} on {target.platform}: {exc}",
                    hint="set environment.python and environment.platform to what it is for",
                ) from exc
            unavailable.append(_unavailable(entry or {}))
    _require_one_each(files, source)
    return files, unavailable


def drop_other_files(entry: dict[str, Any], hashes: Collection[str]) -> None:
    """Remove the files of a package that its hashes do not allow; all stay if they allow none.

    What is left then is refused by its digest, which the message names.
    """
    wheels = [one for one in entry.get("wheels", []) if _is_among(one, hashes)]
    sdist = entry.get("sdist")
    has_sdist = sdist is not None and _is_among(sdist, hashes)
    if wheels or has_sdist:
        entry["wheels"] = wheels
        if not wheels:
            del entry["wheels"]
        if not has_sdist:
            entry.pop("sdist", None)


def _is_among(file: Mapping[str, Any], hashes: Collection[str]) -> bool:
    return file.get("hashes", {}).get("sha256") in hashes


def _order_wheels(entry: Mapping[str, Any]) -> Mapping[str, Any]:
    """Put the highest build tag first: ``Pylock.select`` takes the first of equal wheels."""
    try:
        wheels = sorted(entry["wheels"], key=_build_tag, reverse=True)
    except (AttributeError, KeyError, TypeError):  # refused where the entry is parsed
        return entry
    return {**entry, "wheels": wheels}


def _build_tag(wheel: Mapping[str, Any]) -> BuildTag:
    try:
        return parse_wheel_filename(_wheel_name(wheel))[2]
    except ValueError:  # refused where the entry is parsed
        return ()


def _wheel_name(wheel: Mapping[str, Any]) -> str:
    return _file_name(str(wheel.get("name") or wheel.get("url") or wheel.get("path") or ""))


def _chosen(
    single: Pylock, environment: Environment, tags: Sequence[Tag], source: str
) -> list[tuple[Package, SelectedFile]]:
    try:
        return list(single.select(environment=environment, tags=tags))
    except (UndefinedComparison, UndefinedEnvironmentName) as exc:
        names = ", ".join(package.name for package in single.packages)
        raise ResolveError(
            f"{source}: the marker of {names or 'its environments'} has no meaning: {exc}",
            hint="correct it, or lock again",
        ) from exc


def _has_no_file(entry: object) -> bool:
    """Return whether a package lists no file, as uv writes it when none fits the platform."""
    return isinstance(entry, dict) and "name" in entry and not _FILE_KEYS & entry.keys()


def _parse(data: Mapping[str, Any], source: str) -> Pylock:
    try:
        return Pylock.from_dict(data)
    except (PylockValidationError, PylockUnsupportedVersionError) as exc:
        raise ResolveError(
            f"{source} is not a lock that can be read: {exc}",
            hint="it must follow PEP 751, for example as `stager lock` or `uv pip compile "
            "--format pylock.toml` writes it",
        ) from exc


def _resolved_file(
    package: Package, selected: SelectedFile, base: Path, source: str
) -> ResolvedFile:
    if isinstance(selected, PackageDirectory | PackageVcs):
        kind = "a folder" if isinstance(selected, PackageDirectory) else "version control"
        raise ResolveError(
            f"{source} takes {package.name} from {kind}, which has no digest",
            hint="name what the lock was made from in environment.requirements instead, so that "
            "a wheel is built and locked",
        )
    try:
        url, path = _place(selected.url, selected.path, base)
        filename = path.name if path else _file_name(url or "")
    except ValueError as exc:
        raise ResolveError(
            f"{source}: {package.name}: {selected.url} is not a URL: {exc}",
            hint="correct it, or lock again",
        ) from exc
    if not isinstance(selected, PackageArchive) and selected.name:
        filename = selected.name
    return ResolvedFile(
        filename=filename,
        url=strip_credentials(url) if url else None,
        path=path,
        sha256=selected.hashes.get("sha256"),
        size=selected.size,
    )


def _place(url: str | None, path: str | None, base: Path) -> tuple[str | None, Path | None]:
    if url and url.startswith("file://"):
        return None, Path(unquote(urlsplit(url).path))
    return url, Path(os.path.normpath(base / path)) if path else None


def _file_name(url: str) -> str:
    return unquote(urlsplit(url).path.rpartition("/")[2])


def locked_files(resolved: Sequence[ResolvedFile], *, source: str) -> tuple[LockedFile, ...]:
    """Return locked files, sorted by package, from files whose digests are known.

    Raises:
        ResolveError: files without a digest (all of them); ``source`` is the lock's name.
    """
    without = [file.filename for file in resolved if not file.sha256]
    if without:
        raise ResolveError(
            f"{source} has no sha256 for some files",
            hint="download them and name the files, or a folder with them as --find-links, then "
            "run `stager lock`",
            context=without,
        )
    files = [_locked_file(file, source) for file in resolved]
    return tuple(sorted(files, key=lambda file: file.name))


def _locked_file(file: ResolvedFile, source: str) -> LockedFile:
    name, version = file.identity
    try:
        digest = Digest(str(file.sha256))
    except ValueError as exc:
        raise ResolveError(
            f"{source}: {file.filename}: {exc}", hint="lock again: somebody edited the digest"
        ) from exc
    return LockedFile(
        name=name,
        version=version,
        filename=file.filename,
        sha256=digest,
        size=file.size,
        url=file.url,
        path=file.path,
    )


def _require_one_each(files: list[ResolvedFile], source: str) -> None:
    try:
        counts = Counter(file.identity[0] for file in files)
    except ValueError as exc:
        raise ResolveError(f"{source}: {exc}", hint="a lock names wheels and sdists") from exc
    repeated = sorted(name for name, count in counts.items() if count > 1)
    if repeated:
        raise ResolveError(
            f"{source} gives more than one file for the same package",
            hint="lock again, or remove all but one entry of each",
            context=repeated,
        )


def _unavailable(entry: Mapping[str, Any]) -> UnavailablePackage:
    version = f"=={entry['version']}" if "version" in entry else ""
    files = tuple(map(_wheel_name, entry.get("wheels") or []))
    return UnavailablePackage(requirement=f"{entry['name']}{version}", files=files)
