"""The lock as a value, and the files that a PEP 751 lock has for one target."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from packaging.markers import Environment, Marker, UndefinedComparison, UndefinedEnvironmentName
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
from packaging.specifiers import SpecifierSet
from packaging.tags import Tag
from packaging.utils import BuildTag, parse_wheel_filename
from packaging.version import Version

from bundle.protocol.digest import canonical_json

from ..core import toml
from ..core.errors import ConfigError, ResolveError, StagerError
from ..core.files import write_output
from ..core.values import Digest, LockedFile, Target
from ..hub.repositories import LockedRepository, decode_repository
from . import resolver
from .indexes import GitPin, Indexes, strip_credentials
from .resolver import (
    BuildSource,
    ResolvedFile,
    UnavailablePackage,
    describe_unavailable,
    to_timestamp,
)
from .spec import Spec

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
    """The cutoff it was made with; None for none. See :mod:`stager.lock.resolver`."""
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
            for package, selected in _select_package(single, environment, tags, source):
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


def _has_no_file(entry: object) -> bool:
    """Return whether a package lists no file, as uv writes it when none fits the platform."""
    return isinstance(entry, dict) and "name" in entry and not _FILE_KEYS & entry.keys()


def _select_package(
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


def drop_other_files(entry: dict[str, Any], hashes: Collection[str]) -> None:
    """Remove the files of a package that its hashes do not allow; all stay if they allow none.

    What is left then is refused by its digest, which the message names.
    """

    def is_allowed(file: Mapping[str, Any]) -> bool:
        return toml.get_table(file, "hashes").get("sha256") in hashes

    wheels = list(filter(is_allowed, entry.get("wheels", [])))
    sdists = list(filter(is_allowed, [entry["sdist"]] if "sdist" in entry else []))
    if wheels or sdists:
        entry.pop("wheels", None)
        entry.pop("sdist", None)
        entry |= {"wheels": wheels} if wheels else {}
        entry |= {"sdist": sdists[0]} if sdists else {}


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
        url = selected.url
        path = Path(os.path.normpath(base / selected.path)) if selected.path else None
        if url and url.startswith("file://"):
            url, path = None, Path(unquote(urlsplit(url).path))
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


def _file_name(url: str) -> str:
    return unquote(urlsplit(url).path.rpartition("/")[2])


def lock_files(resolved: Sequence[ResolvedFile], *, source: str) -> tuple[LockedFile, ...]:
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
    files = []
    for file in resolved:
        name, version = file.identity
        try:
            digest = Digest(str(file.sha256))
        except ValueError as exc:
            raise ResolveError(
                f"{source}: {file.filename}: {exc}", hint="lock again: somebody edited the digest"
            ) from exc
        locked = LockedFile(
            name=name,
            version=version,
            filename=file.filename,
            sha256=digest,
            size=file.size,
            url=file.url,
            path=file.path,
        )
        files.append(locked)
    return tuple(sorted(files, key=lambda file: file.name))


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


# --- Differences between two sets of packages, and what they mean in bytes to send ---------------


PackageFiles = Mapping[str, tuple[str, str, int]]
"""Packages by name: version, what tells two files of one version apart, bytes (0 if unknown)."""


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


def compare_locks(earlier: Lock | None, later: Lock) -> PackageChanges:
    """Return what a lock changes; everything is added where there was none before."""
    old, new = (
        {str(one.name): (str(one.version), str(one.sha256), one.size or 0) for one in lock.files}
        if lock
        else {}
        for lock in (earlier, later)
    )
    return compare_packages(old, new)


def compare_packages(old: PackageFiles, new: PackageFiles) -> PackageChanges:
    """Return the difference between two sets of packages."""

    def list_changes(names: Iterable[str]) -> tuple[PackageChange, ...]:
        return tuple(
            PackageChange(
                name=name,
                old=old[name][0] if name in old else None,
                new=new[name][0] if name in new else None,
                bytes=new[name][2] if name in new else 0,
            )
            for name in sorted(names)
        )

    added = list_changes(new.keys() - old.keys())
    changed = list_changes(name for name in new.keys() & old.keys() if new[name][1] != old[name][1])
    return PackageChanges(
        added=added,
        removed=list_changes(old.keys() - new.keys()),
        changed=changed,
        bytes=sum(change.bytes for change in (*added, *changed)),
    )


# --- Reading and writing ``pylock.toml`` (PEP 751) -----------------------------------------------

# For one target there is nothing left to choose, so a lock of ours lists only the chosen wheel (or
# sdist, if no wheel fits) with digest, size and place. ``[tool.stager]`` holds what PEP 751 has no
# key for. The same answer of a resolver always gives the same bytes.

CREATED_BY = "stager"


def find_earlier_lock(path: Path, target: Target) -> Lock | None:
    """Return the lock that stands in the place of a new one; None if there is none to go by."""
    try:
        return read_lock(path, target) if path.is_file() else None
    except StagerError:  # it is made anew
        return None


def read_lock(path: Path, target: Target) -> Lock:
    """Read a lock.

    Args:
        path: the file.
        target: the target to select files for, in a lock that another tool wrote. A lock of ours
            has no choice left and is read for the target it names; :meth:`Lock.is_current` tells
            if that is still the right one.

    Raises:
        ResolveError: no such file, no valid lock, or files missing for the target (all packages).
    """
    if not path.is_file():
        raise ResolveError(f"no lock at {path}", hint="run `stager lock` to make one")
    data = parse_lock(path)
    metadata = _metadata(data)
    spec_digest, cutoff = None, metadata.get("exclude-newer")
    try:
        if metadata:
            python, platform = str(metadata["python"]), str(metadata["platform"])
            target = Target(python=python, platform=platform)
            spec_digest = Digest(str(metadata["spec-digest"]))
        if cutoff is not None and to_timestamp(str(cutoff)):
            cutoff = str(cutoff)
        assets = tuple(map(decode_repository, metadata.get("assets", ())))
    except (KeyError, TypeError, ValueError, StagerError) as exc:
        raise ResolveError(
            f"{path}: [tool.stager] (spec-digest, exclude-newer or assets) is damaged: {exc}",
            hint="run `stager lock` to make it again",
        ) from exc
    resolved, unavailable = select(data, target, base=path.parent.absolute(), source=str(path))
    if unavailable:
        lines = [describe_unavailable(package, target) for package in unavailable]
        raise missing_file_error(path, target, lines)
    files = lock_files(resolved, source=str(path))
    built = toml.get_table(metadata, "sources")
    return Lock(
        path=path,
        target=target,
        files=files,
        spec_digest=spec_digest,
        digest=digest_of(target, files),
        indexes=Indexes.from_dict(toml.get_table(metadata, "indexes")),
        sources=tuple((wheel, str(label)) for wheel, label in built.items()),
        torch_backend=resolver.read_recorded_backend(path) if metadata else None,
        git=_git_pins(metadata),
        exclude_newer=cutoff,
        assets=assets,
    )


def _git_pins(metadata: Mapping[str, Any]) -> tuple[GitPin, ...]:
    known = {field.name for field in fields(GitPin)}
    entries = [one for one in toml.get_list(metadata, "git") if isinstance(one, dict)]
    return tuple(
        GitPin(**{key: str(value) for key, value in entry.items()})
        for entry in entries
        if entry.keys() == known
    )


def keep_assets(lock: Lock, assets: Sequence[LockedRepository]) -> Lock:
    """Write these models and data sets into a lock, unless it has them.

    Raises:
        StagerError: the lock cannot be written.
    """
    if lock.assets == tuple(assets):
        return lock
    lock = replace(lock, assets=tuple(assets))
    publish(lock.path, render(lock))
    return lock


def _metadata(data: Mapping[str, Any]) -> Mapping[str, Any]:
    return toml.get_table(data, "tool", "stager") if data.get("created-by") == CREATED_BY else {}


def missing_file_error(path: Path, target: Target, lines: Sequence[str]) -> ResolveError:
    """Return the error for packages of a lock that have no file for a target."""
    return ResolveError(
        f"{path} has no file for Python {target.python} on {target.platform}",
        hint="lock again for that target, or change environment.python and platform",
        context=lines,
    )


def render(lock: Lock) -> str:
    """Return the lock's text."""
    target = lock.target
    marker = (
        f"python_version == '{target.python}' and sys_platform == 'linux' "
        f"and platform_machine == '{target.machine}'"
    )
    optional = {
        "git": [asdict(pin) for pin in lock.git],
        "exclude-newer": lock.exclude_newer,
        "indexes": lock.indexes.as_dict(),
        "torch-backend": lock.torch_backend,
        "sources": dict(lock.sources),
        "assets": [repository.to_dict() for repository in lock.assets],
    }
    metadata = {
        "spec-digest": str(lock.spec_digest),
        "python": target.python,
        "platform": target.platform,
        **{key: value for key, value in optional.items() if value},
    }
    base = lock.path.parent.absolute()
    pylock = Pylock(
        lock_version=Version("1.0"),
        environments=[Marker(marker)],
        requires_python=SpecifierSet(f"=={target.python}.*"),
        created_by=CREATED_BY,
        packages=[_package(file, base) for file in lock.files],
        tool={"stager": metadata},
    )
    pylock.validate()
    return toml.dumps(pylock.to_dict())


def _package(file: LockedFile, base: Path) -> Package:
    place: dict[str, Any] = {"size": file.size, "hashes": {"sha256": str(file.sha256)}}
    if file.path is None:
        place["url"] = file.url
    elif file.path.is_relative_to(base):
        place["path"] = file.path.relative_to(base).as_posix()
    else:
        place["path"] = str(file.path)
    if file.is_wheel:
        wheel = PackageWheel(name=file.filename, **place)
        return Package(name=file.name, version=file.version, wheels=[wheel])
    sdist = PackageSdist(name=file.filename, **place)
    return Package(name=file.name, version=file.version, sdist=sdist)


def parse_lock(path: Path) -> dict[str, Any]:
    """Parse a lock, which a person does not mend by hand where it is not TOML."""
    try:
        return toml.read(path)
    except ConfigError as exc:
        remedy = "run `stager lock` to make the lock again, or the tool that wrote it"
        raise ConfigError(exc.message, hint=f"{exc.hint}; {remedy}") from exc


def digest_of(target: Target, files: Sequence[LockedFile]) -> Digest:
    """Return the digest of what a lock installs, wherever its files lie."""
    content = {
        "target": [target.python, target.platform],
        "files": [[f.name, str(f.version), f.filename, f.sha256] for f in files],
    }
    return Digest.of(canonical_json(content))


def publish(path: Path, text: str) -> None:
    """Write the lock to its place."""
    hint = "the lock is written beside the project's settings; check the permissions there"
    with write_output(path, hint=hint) as file:
        file.write(text.encode())
