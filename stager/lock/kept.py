"""The parts of a lock that the next one keeps: pins, commits, and the cutoff."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from ..core.errors import ResolveError
from .cutoff import NONE, timestamp
from .git_pin import GitPin
from .pylock import Lock
from .resolve import ResolveOptions
from .resolver import ResolveRequest


@dataclass(frozen=True, kw_only=True)
class KeptPins:
    """The parts of a lock that the next one keeps."""

    pins: tuple[str, ...]
    """``name==version`` of packages from an index."""
    git: tuple[GitPin, ...]
    """Commits of packages from git repositories."""
    cutoff: str | None
    """The cutoff: that of the command, else that of the lock before; None for none."""

    def added_to(self, request: ResolveRequest) -> ResolveRequest:
        """Return a request that keeps all of it."""
        return replace(
            request,
            pins=self.pins,
            git=self.git,
            exclude_newer=timestamp(self.cutoff) if self.cutoff else None,
        )


def kept(options: ResolveOptions, earlier: Lock | None) -> KeptPins:
    """Return what is kept of a lock; of none, where there was none."""
    asked = options.exclude_newer
    cutoff = None if asked == NONE else asked
    if earlier is None:
        return KeptPins(pins=(), git=(), cutoff=cutoff)
    if asked is None:
        cutoff = earlier.exclude_newer
    if options.upgrade:
        return KeptPins(pins=(), git=(), cutoff=cutoff)
    upgraded = {canonicalize_name(name) for name in options.upgrade_packages}
    commits = tuple(pin for pin in earlier.git if canonicalize_name(pin.name) not in upgraded)
    return KeptPins(pins=earlier.pins(upgraded), git=commits, cutoff=cutoff)


def as_metadata(lock: Lock) -> dict[str, Any]:
    """Return what a later lock keeps, as ``[tool.stager]`` of a lock holds it."""
    metadata: dict[str, Any] = {}
    if lock.git:
        metadata["git"] = [asdict(pin) for pin in lock.git]
    if lock.exclude_newer:
        metadata["exclude-newer"] = lock.exclude_newer
    return metadata


def git_pins(metadata: Mapping[str, Any]) -> tuple[GitPin, ...]:
    """Return the commits that a lock was made with; what is not complete pins nothing."""
    known = {field.name for field in fields(GitPin)}
    listed = metadata.get("git")
    pins = []
    for entry in listed if isinstance(listed, list) else ():
        if isinstance(entry, dict) and entry.keys() == known:
            pins.append(GitPin(**{key: str(value) for key, value in entry.items()}))
    return tuple(pins)


def cutoff_of(path: Path, metadata: Mapping[str, Any]) -> str | None:
    """Return the cutoff that a lock was made with.

    Raises:
        ResolveError: it is neither a date nor a time.
    """
    value = metadata.get("exclude-newer")
    if value is None:
        return None
    try:
        timestamp(str(value))
    except ValueError as exc:
        raise ResolveError(
            f"{path}: [tool.stager] exclude-newer is neither a date nor a time: {value}",
            hint="run `stager lock` to make it again",
        ) from exc
    return str(value)
