"""What was in a job's bundle, as long as the bundle is still there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..core.errors import BundleError
from ..logs.json_fields import text
from ..pack.existing import manifest_of
from .attempt import Attempt


@dataclass(frozen=True, kw_only=True)
class Part:
    """A package, the project or an asset."""

    name: str
    """Its name, with a package's version."""
    kind: str
    """``wheel``, ``project``...: where it came from."""
    packed: int
    """Bytes in the bundle."""
    unpacked: int
    """Bytes on a node."""
    files: int
    """How many files it has."""


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What is in a bundle, or why that cannot be said."""

    path: str
    """The bundle's file."""
    missing: str = ""
    """Why nothing can be said of it; empty where it can."""
    parts: tuple[Part, ...] = ()
    """What is in it, the largest first."""


def contents(attempt: Attempt) -> Contents | None:
    """What is in the bundle of a job; None where it is not known which one that was."""
    path, wanted = text(attempt.job, "bundle"), text(attempt.job, "bundle_id")
    if not path:
        return None
    try:
        if not Path(path).is_file():
            return Contents(path=path, missing="the bundle is gone, or cannot be seen from here")
        manifest = manifest_of(Path(path))
    except (BundleError, OSError, ValueError) as exc:
        return Contents(path=path, missing=f"the bundle cannot be read: {exc}")
    if manifest.id != wanted:
        return Contents(path=path, missing="another bundle is there now")
    parts = [
        Part(
            name=f"{layer.name} {layer.version}".strip(),
            kind=layer.kind,
            packed=layer.size,
            unpacked=layer.unpacked_size,
            files=layer.files,
        )
        for layer in manifest.layers
    ]
    parts.sort(key=lambda part: (-part.packed, part.name))
    return Contents(path=path, parts=tuple(parts))
