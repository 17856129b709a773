"""The result of ``stager inspect --licenses``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .inventory import Inventory
from .licences import Licence


@dataclass(frozen=True, kw_only=True)
class LicensedComponent:
    """A component of a bundle that somebody else has made, with its licence."""

    kind: str
    """``package``, ``decompressor``, ``model``, ``dataset`` or ``space``."""
    name: str
    """Its name."""
    version: str
    """Its version; a model's or data set's commit."""
    licence: str
    """The licence; empty if it names none."""
    spdx: bool
    """True if that is a licence expression of SPDX."""
    declared_in: str
    """``License-Expression``, ``License``, ``Classifier`` or ``card``; empty for no licence."""


@dataclass(frozen=True, kw_only=True)
class LicenceList:
    """The licences in a bundle."""

    bundle: Path
    """The bundle."""
    id: str
    """Its id."""
    components: tuple[LicensedComponent, ...]
    """Sorted by name; those that name no licence last."""
    without_licence: int
    """Number of components that name none."""


def licence_list(inventory: Inventory) -> LicenceList:
    """Return the licences of everything that others have made."""
    found = [
        _component("package", package.name, package.version, package.licence)
        for package in inventory.packages
    ]
    if (tool := inventory.decompressor) is not None:
        found.append(_component("decompressor", tool.name, tool.version, tool.licence))
    for asset in inventory.assets:
        if asset.type != "file":
            found.append(_component(asset.type, asset.name, asset.commit, asset.licence))
    found.sort(key=lambda one: (not one.licence, one.name, one.version, one.kind))
    return LicenceList(
        bundle=inventory.bundle,
        id=inventory.manifest.id,
        components=tuple(found),
        without_licence=sum(not one.licence for one in found),
    )


def _component(kind: str, name: str, version: str, licence: Licence) -> LicensedComponent:
    return LicensedComponent(
        kind=kind,
        name=name,
        version=version,
        licence=licence.text,
        spdx=licence.spdx,
        declared_in=licence.field,
    )
