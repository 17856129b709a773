"""The lock of a bundle that is named: it is carried beside the bundle, which does not hold it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bundle.format.layer import LayerError, origin_of

from ..core.errors import BundleError
from ..inventory.provenance import LockedSources
from ..pack.bundle_file import ChosenBundle, opened


def names_wheels(chosen: ChosenBundle, lock: Path) -> bool:
    """Return whether a lock names every wheel of a bundle.

    Raises:
        BundleError: the bundle is damaged.
    """
    return _names_all(lock, _wheels(chosen))


def _names_all(lock: Path, wheels: Sequence[tuple[str, str, str]]) -> bool:
    known = LockedSources((lock,))
    return all(known.of(*wheel).kind for wheel in wheels)


def _wheels(chosen: ChosenBundle) -> list[tuple[str, str, str]]:
    """Return name, version and digest of each wheel of a bundle."""
    with opened(chosen.path, chosen.id) as bundle, bundle.refusing(LayerError):
        return [
            (layer.name, layer.version, str(origin_of(bundle.head(layer)).content))
            for layer in bundle.manifest.layers
            if layer.kind == "wheel"
        ]


def lock_of(chosen: ChosenBundle, locks: Sequence[Path]) -> Path:
    """Return the first lock that names every wheel of a bundle.

    Raises:
        BundleError: there is none, or the bundle is damaged.
    """
    wheels = _wheels(chosen)
    for path in filter(Path.is_file, locks):
        if _names_all(path, wheels):
            return path
    raise BundleError(
        f"the lock that {chosen.path} was made from is not here, and would have to come along",
        hint="export it in its project's folder, before the requirements change; or carry the file "
        "itself, which `--bundle` takes over there",
        context=[f"not its lock, or not there: {path}" for path in locks],
    )
