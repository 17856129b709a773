"""The difference between a project's new bundle and the one before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bundle.format.manifest import Layer, Manifest

from ..core.errors import StagerError
from ..core.store import Store
from ..lock.changes import PackageChanges, PackageFile, compare
from ..pack import existing


def before(store: Store, project: Path) -> Manifest | None:
    """Return the manifest of the bundle that a project's last build made, if it can be read."""
    newest = existing.newest(store, project)
    if newest is None:
        return None
    try:
        return existing.manifest_of(newest.path)
    except StagerError:
        return None


def changes(old: Manifest | None, new: Manifest) -> PackageChanges:
    """Compare a bundle with the one before; without one, all packages are added.

    Returns:
        The changes; their bytes are those of all layers that the earlier bundle does not have, the
        project's among them, as they are sent.
    """
    earlier = old.layers if old is not None else ()
    there = {layer.id for layer in earlier}
    return replace(
        compare(_packages(earlier), _packages(new.layers)),
        bytes=sum(layer.size for layer in new.layers if layer.id not in there),
    )


def _packages(layers: Sequence[Layer]) -> list[PackageFile]:
    return [
        PackageFile(name=layer.name, version=layer.version, content=layer.version, bytes=layer.size)
        for layer in layers
        if layer.kind == "wheel"
    ]
