"""Reading and writing ``pylock.toml`` (PEP 751).

For one target there is nothing left to choose, so a lock of ours lists only the chosen wheel (or
sdist, if no wheel fits) with digest, size and place. ``[tool.stager]`` holds what PEP 751 has no
key for. The same answer of a resolver always gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from packaging.markers import Marker
from packaging.pylock import Package, PackageSdist, PackageWheel, Pylock
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from bundle.protocol.digest import canonical_json

from ..core import toml
from ..core.errors import ConfigError, ResolveError, StagerError
from ..core.files import output_file
from ..core.values import Digest, LockedFile, Target
from ..hub.repositories import LockedRepository, locked_from
from . import torch_backend
from .cutoff import timestamp
from .git_pin import GitPin
from .indexes import Indexes
from .pylock import Lock, locked_files, select
from .resolver import describe_unavailable

CREATED_BY = "stager"


def earlier_lock(path: Path, target: Target) -> Lock | None:
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
    data = parsed(path)
    metadata = _metadata(data)
    spec_digest, cutoff = None, metadata.get("exclude-newer")
    try:
        if metadata:
            python, platform = str(metadata["python"]), str(metadata["platform"])
            target = Target(python=python, platform=platform)
            spec_digest = Digest(str(metadata["spec-digest"]))
        if cutoff is not None and timestamp(str(cutoff)):
            cutoff = str(cutoff)
        assets = tuple(map(locked_from, metadata.get("assets", ())))
    except (KeyError, TypeError, ValueError, StagerError) as exc:
        raise ResolveError(
            f"{path}: [tool.stager] (spec-digest, exclude-newer or assets) is damaged: {exc}",
            hint="run `stager lock` to make it again",
        ) from exc
    resolved, unavailable = select(data, target, base=path.parent.absolute(), source=str(path))
    if unavailable:
        lines = [describe_unavailable(package, target) for package in unavailable]
        raise no_file(path, target, lines)
    files = locked_files(resolved, source=str(path))
    built = toml.table(metadata, "sources")
    return Lock(
        path=path,
        target=target,
        files=files,
        spec_digest=spec_digest,
        digest=digest_of(target, files),
        indexes=Indexes.from_dict(toml.table(metadata, "indexes")),
        sources=tuple((wheel, str(label)) for wheel, label in built.items()),
        torch_backend=torch_backend.recorded(path) if metadata else None,
        git=_git_pins(metadata),
        exclude_newer=cutoff,
        assets=assets,
    )


def _git_pins(metadata: Mapping[str, Any]) -> tuple[GitPin, ...]:
    known = {field.name for field in fields(GitPin)}
    entries = [one for one in toml.listed(metadata, "git") if isinstance(one, dict)]
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
    return toml.table(data, "tool", "stager") if data.get("created-by") == CREATED_BY else {}


def no_file(path: Path, target: Target, lines: Sequence[str]) -> ResolveError:
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
    metadata: dict[str, Any] = {
        "spec-digest": str(lock.spec_digest),
        "python": target.python,
        "platform": target.platform,
    }
    if lock.git:
        metadata["git"] = [asdict(pin) for pin in lock.git]
    if lock.exclude_newer:
        metadata["exclude-newer"] = lock.exclude_newer
    indexes = lock.indexes.as_dict()
    if indexes:
        metadata["indexes"] = indexes
    if lock.torch_backend:
        metadata["torch-backend"] = lock.torch_backend
    if lock.sources:
        metadata["sources"] = dict(lock.sources)
    if lock.assets:
        metadata["assets"] = [repository.to_dict() for repository in lock.assets]
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


def parsed(path: Path) -> dict[str, Any]:
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
    with output_file(path, hint=hint) as file:
        file.write(text.encode())
