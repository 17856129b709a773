"""The lock as a value, and the files that a PEP 751 lock has for one target."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import filterfalse
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from packaging.markers import Marker, UndefinedComparison, UndefinedEnvironmentName
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
from packaging.utils import parse_wheel_filename
from packaging.version import Version

from bundle.protocol.codec import decode
from bundle.protocol.dataclass import dataclass

from ..core import toml
from ..core.errors import ConfigError, ResolveError, StagerError
from ..core.files import write_output
from ..core.values import Digest, LockedFile, Target
from ..hub.repositories import LockedRepository, decode_repository
from . import resolver
from .indexes import GitPin, Indexes, strip_credentials
from .pip import ResolvedFile
from .resolver import BuildSource, UnavailablePackage, describe_unavailable, to_timestamp
from .spec import Spec

SelectedFile = PackageArchive | PackageDirectory | PackageSdist | PackageVcs | PackageWheel
_FILE_KEYS = {"wheels", "sdist", "archive", "vcs", "directory"}


@dataclass(frozen=True, kw_only=True)
class Lock:
    """Exactly one file for each package, for one target."""

    path: Path
    target: Target
    files: tuple[LockedFile, ...]
    spec_digest: Digest | None  # None in a lock of another tool
    indexes: Indexes  # beyond pip's own configuration; without credentials
    sources: tuple[tuple[str, str], ...]  # built wheels, and sources relative to the lock
    git: tuple[GitPin, ...] = ()
    exclude_newer: str | None = None
    torch_backend: str | None = None  # what ``torch-backend = "auto"`` has become
    assets: tuple[LockedRepository, ...] = ()

    def is_current(self, spec: Spec) -> bool:
        """Return whether the lock matches this spec; a user's does if the spec names its file."""
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


def parse_pylock(data: toml.Table, source: str) -> tuple[Pylock, list[UnavailablePackage]]:
    """Parse a lock; return it, and its packages without any file: uv lists those that fit none."""
    entries = toml.get_list(data, "packages")
    empty = [one for one in entries if isinstance(one, dict) and not _FILE_KEYS & one.keys()]
    empty = [one for one in empty if "name" in one]
    if empty:
        data = {**data, "packages": list(filterfalse(empty.__contains__, entries))}
    try:
        lock = Pylock.from_dict(data)
    except (PylockValidationError, PylockUnsupportedVersionError) as exc:
        raise ResolveError(
            f"{source} is not a lock that can be read: {exc}",
            hint="it must follow PEP 751: make it with `stager lock` or `uv export --format "
            "pylock.toml`",
        ) from exc
    return lock, [_make_unavailable(one["name"], one.get("version")) for one in empty]


def select(
    lock: Pylock, target: Target, *, base: Path, source: str, build: BuildSource | None = None
) -> tuple[list[ResolvedFile], list[UnavailablePackage]]:
    """Return the best file of each package the target needs, and the packages that have none."""
    tags, environment = list(target.tags()), target.environment()
    names: list[str] = []
    files: list[ResolvedFile] = []
    unavailable: list[UnavailablePackage] = []
    for package in lock.packages:
        # One at a time, so that each is reported; ``select`` takes the first of equal wheels.
        wheels = [*(package.wheels or ())]
        wheels.sort(key=lambda wheel: parse_wheel_filename(wheel.filename)[2], reverse=True)
        single = replace(lock, packages=[replace(package, wheels=wheels)])
        try:
            for _, selected in single.select(environment=environment, tags=tags):
                file = _resolve_file(package, selected, base, source, build)
                names.append(file.identity[0])
                files.append(file)
        except PylockSelectError as exc:
            if "satisfy" in str(exc):  # the lock, or the package, is for another Python or system
                raise ResolveError(
                    f"{source} is not for Python {target.python} on {target.platform}: {exc}",
                    hint="set environment.python and environment.platform to what it is for",
                ) from exc
            there = [wheel.filename for wheel in wheels]
            unavailable.append(_make_unavailable(package.name, package.version, there))
        except (UndefinedComparison, UndefinedEnvironmentName, ValueError) as exc:
            raise ResolveError(
                f"{source}: {package.name}: {exc}", hint="correct it, or lock again"
            ) from exc
    repeated = Counter(names) - Counter({*names})
    if repeated:
        raise ResolveError(
            f"{source} gives more than one file for the same package",
            hint="lock again, or remove all but one entry of each",
            context=sorted(repeated),
        )
    return files, unavailable


def _make_unavailable(
    name: str, version: object, files: Collection[str] = ()
) -> UnavailablePackage:
    requirement = name if version is None else f"{name}=={version}"
    return UnavailablePackage(requirement=requirement, files=tuple(files))


def drop_other_files(package: Package, hashes: Collection[str]) -> Package:
    """Drop files that a package's hashes do not allow; if none is left, keep all, to be refused."""
    wheels = [wheel for wheel in package.wheels or () if wheel.hashes.get("sha256") in hashes]
    sdist = package.sdist
    if sdist and sdist.hashes.get("sha256") not in hashes:
        sdist = None
    return replace(package, wheels=wheels, sdist=sdist) if wheels or sdist else package


def _resolve_file(
    package: Package, selected: SelectedFile, base: Path, source: str, build: BuildSource | None
) -> ResolvedFile:
    if isinstance(selected, PackageDirectory | PackageVcs):
        if build:
            return build(package, selected, base)
        raise ResolveError(
            f"{source} takes {package.name} from a folder or version control: it has no digest",
            hint="name what it was made from in environment.requirements, to lock built wheels",
        )
    url = selected.url or ""
    place = urlsplit(url).path
    path = Path(os.path.normpath(base / selected.path)) if selected.path else None
    if url.startswith("file://"):
        url, path = "", Path(unquote(place))
    named = None if isinstance(selected, PackageArchive) else selected.name
    # A quoted slash stays in the name, which is refused then.
    return ResolvedFile(
        filename=named or (path.name if path else unquote(place.rpartition("/")[2])),
        url=strip_credentials(url) or None,
        path=path,
        sha256=selected.hashes.get("sha256"),
        size=selected.size,
    )


def lock_files(resolved: Sequence[ResolvedFile], *, source: str) -> tuple[LockedFile, ...]:
    """Return locked files, sorted by package, from files whose digests are known."""
    without = [file.filename for file in resolved if not file.sha256]
    if without:
        raise ResolveError(
            f"{source} has no sha256 for some files",
            hint="download them, name them or their folder (--find-links), run `stager lock`",
            context=without,
        )
    try:
        files = [
            LockedFile(
                name=file.identity[0],
                version=file.identity[1],
                filename=file.filename,
                sha256=Digest(str(file.sha256)),
                size=file.size,
                url=file.url,
                path=file.path,
            )
            for file in resolved
        ]
    except ValueError as exc:
        hint = "lock again: somebody edited the digest"
        raise ResolveError(f"{source}: {exc}", hint=hint) from exc
    return tuple(sorted(files, key=lambda file: file.name))


# --- Differences between two sets of packages, and what they mean in bytes to send ---------------


PackageFiles = Mapping[str, tuple[str, str, int]]  # by name: version, file, bytes or 0


@dataclass(frozen=True, kw_only=True)
class PackageChange:
    """A package that two sets have in different versions, or that only one of them has."""

    name: str
    old: str | None
    new: str | None
    bytes: int  # size of its new file in bytes; 0 if it is gone, or where no server told the size


@dataclass(frozen=True, kw_only=True)
class PackageChanges:
    """The difference between two sets of packages."""

    added: tuple[PackageChange, ...] = ()
    removed: tuple[PackageChange, ...] = ()
    changed: tuple[PackageChange, ...] = ()
    bytes: int = 0  # what a node that has the earlier set is sent; for locks, about


def compare_locks(earlier: Lock | None, later: Lock) -> PackageChanges:
    """Return what a lock changes; everything is added where there was none before."""
    old, new = (
        {str(one.name): (str(one.version), str(one.sha256), one.size or 0) for one in files}
        for files in (earlier.files if earlier else (), later.files)
    )
    return compare_packages(old, new)


def compare_packages(old: PackageFiles, new: PackageFiles) -> PackageChanges:
    """Return the difference between two sets of packages."""

    def list_changes(names: Iterable[str]) -> tuple[PackageChange, ...]:
        none = (None, "", 0)
        return tuple(
            PackageChange(
                name=name,
                old=old.get(name, none)[0],
                new=new.get(name, none)[0],
                bytes=new.get(name, none)[2],
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

# A lock of ours lists the one file of each package; ``[tool.stager]`` has what PEP 751 has not.

CREATED_BY = "stager"


def find_earlier_lock(path: Path, target: Target) -> Lock | None:
    """Return the lock that stands in the place of a new one; None if there is none to go by."""
    try:
        return read_lock(path, target) if path.is_file() else None
    except StagerError:  # it is made anew
        return None


def read_lock(path: Path, target: Target) -> Lock:
    """Read a lock; the target selects the files of another tool's, a lock of ours names its own."""
    if not path.is_file():
        raise ResolveError(f"no lock at {path}", hint="run `stager lock` to make one")
    data = parse_lock(path)
    is_ours = data.get("created-by") == CREATED_BY
    metadata = toml.get_table(data, "tool", "stager") if is_ours else {}
    try:
        target, spec_digest, cutoff, assets = _decode_metadata(metadata, target)
        pins = tuple(decode(GitPin, entry) for entry in toml.get_list(metadata, "git"))
    except (KeyError, TypeError, ValueError, StagerError) as exc:
        raise ResolveError(
            f"{path}: [tool.stager] (spec-digest, git, exclude-newer or assets) is damaged: {exc}",
            hint="run `stager lock` to make it again",
        ) from exc
    parsed, empty = parse_pylock(data, str(path))
    resolved, unavailable = select(parsed, target, base=path.parent.absolute(), source=str(path))
    unavailable += empty
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
        indexes=Indexes.from_dict(toml.get_table(metadata, "indexes")),
        sources=tuple((wheel, str(label)) for wheel, label in built.items()),
        torch_backend=resolver.read_recorded_backend(path) if metadata else None,
        git=pins,
        exclude_newer=cutoff,
        assets=assets,
    )


def _decode_metadata(
    metadata: toml.Table, target: Target
) -> tuple[Target, Digest | None, str | None, tuple[LockedRepository, ...]]:
    if not metadata:
        return target, None, None, ()
    python, platform, digest = (str(metadata[key]) for key in ("python", "platform", "spec-digest"))
    cutoff, assets = metadata.get("exclude-newer"), metadata.get("assets", [])
    if cutoff is not None:
        cutoff = str(cutoff)
        to_timestamp(cutoff)
    if not isinstance(assets, list):
        raise ValueError("assets is not a list")
    target = Target(python=python, platform=platform)
    return target, Digest(digest), cutoff, tuple(map(decode_repository, assets))


def keep_assets(lock: Lock, assets: Sequence[LockedRepository]) -> Lock:
    """Write these models and data sets into a lock, unless it has them."""
    if lock.assets == tuple(assets):
        return lock
    lock = replace(lock, assets=tuple(assets))
    publish(lock.path, render(lock))
    return lock


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
        "indexes": lock.indexes.to_dict(),
        "torch-backend": lock.torch_backend,
        "sources": dict(lock.sources),
        "assets": [repository.to_json() for repository in lock.assets],
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
    return toml.dumps(pylock.to_dict())


def _package(file: LockedFile, base: Path) -> Package:
    url, path = (None, file.path) if file.path else (file.url, None)
    if path and path.is_relative_to(base):
        path = path.relative_to(base)
    kind = PackageWheel if file.is_wheel else PackageSdist
    entry = kind(
        name=file.filename,
        url=url,
        path=str(path) if path else None,
        size=file.size,
        hashes={"sha256": str(file.sha256)},
    )
    if isinstance(entry, PackageWheel):
        return Package(name=file.name, version=file.version, wheels=[entry])
    return Package(name=file.name, version=file.version, sdist=entry)


def parse_lock(path: Path) -> dict[str, Any]:
    """Parse a lock; where it is not TOML, the hint says how to make it again."""
    try:
        return toml.read(path)
    except ConfigError as exc:
        remedy = "run `stager lock` to make the lock again, or the tool that wrote it"
        raise ConfigError(exc.message, hint=f"{exc.hint}; {remedy}") from exc


def publish(path: Path, text: str) -> None:
    """Write the lock to its place."""
    hint = "the lock is written beside the project's settings; check the permissions there"
    with write_output(path, hint=hint) as file:
        file.write(text.encode())
