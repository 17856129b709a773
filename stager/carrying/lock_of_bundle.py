"""The lock of a bundle that is named: it is carried beside the bundle, which does not hold it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bundle.format.layer import LayerError
from bundle.format.layer_head import origin_of

from ..core.errors import BundleError
from ..inventory.provenance import LockedSources
from ..pack.existing import ChosenBundle, opened


def lock_of(chosen: ChosenBundle, locks: Sequence[Path]) -> Path:
    """Return the first lock that names every wheel of a bundle.

    Args:
        chosen: the bundle.
        locks: where locks may be.

    Raises:
        BundleError: there is none, or the bundle is damaged.
    """
    with opened(chosen.path, chosen.id) as bundle, bundle.refusing(LayerError):
        wheels = [
            (layer.name, layer.version, str(origin_of(bundle.head(layer)).content))
            for layer in bundle.manifest.layers
            if layer.kind == "wheel"
        ]
    for path in filter(Path.is_file, locks):
        known = LockedSources((path,))
        if all(known.of(*wheel).kind for wheel in wheels):
            return path
    raise BundleError(
        f"the lock that {chosen.path} was made from is not here, and would have to come along",
        hint="export it in its project's folder, before the requirements change; or carry the file "
        "itself, which `--bundle` takes over there",
        context=[f"not its lock, or not there: {path}" for path in locks],
    )
