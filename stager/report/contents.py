"""The contents of a job's bundle, as long as the bundle still exists."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..core.errors import BundleError
from ..logs.json_fields import text
from ..pack.existing import manifest_of
from .attempt import Attempt


@dataclass(frozen=True, kw_only=True)
class BundlePart:
    """A package, the project or an asset."""

    name: str
    """Its name, with a package's version."""
    kind: str
    """Its source: ``wheel``, ``project``..."""
    packed: int
    """Bytes in the bundle."""
    unpacked: int
    """Bytes on a node."""
    files: int
    """The number of its files."""


@dataclass(frozen=True, kw_only=True)
class BundleContents:
    """The parts of a bundle, or the reason why they are not known."""

    path: str
    """The bundle's file."""
    missing: str = ""
    """The reason why its parts are not known; empty where they are."""
    parts: tuple[BundlePart, ...] = ()
    """Its parts, the largest first."""


def contents(attempt: Attempt) -> BundleContents | None:
    """Return the contents of a job's bundle; None where the bundle is not known."""
    path, wanted = text(attempt.job, "bundle"), text(attempt.job, "bundle_id")
    if not path:
        return None
    try:
        if not Path(path).is_file():
            return BundleContents(
                path=path, missing="the bundle is gone, or cannot be seen from here"
            )
        manifest = manifest_of(Path(path))
    except (BundleError, OSError, ValueError) as exc:
        return BundleContents(path=path, missing=f"the bundle cannot be read: {exc}")
    if manifest.id != wanted:
        return BundleContents(path=path, missing="another bundle is there now")
    parts = [
        BundlePart(
            name=f"{layer.name} {layer.version}".strip(),
            kind=layer.kind,
            packed=layer.size,
            unpacked=layer.unpacked_size,
            files=layer.files,
        )
        for layer in manifest.layers
    ]
    parts.sort(key=lambda part: (-part.packed, part.name))
    return BundleContents(path=path, parts=tuple(parts))
