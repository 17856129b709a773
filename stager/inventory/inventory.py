"""The inventory of a bundle: every component, its version, digest, licence and source."""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bundle.format.archive import BundleFile
from bundle.format.layer import LayerError, Origin, read_origin
from bundle.format.manifest import PYTHON, Layer, Manifest
from bundle.protocol.digest import Digest

from ..core.errors import ConfigError
from ..core.values import Target
from ..pack.bundle_file import ChosenBundle, open_bundle
from .package_metadata import (
    Licence,
    PackageMetadata,
    clean,
    dependencies,
    licence_of,
    licence_of_card,
    metadata_of,
    metadata_of_wheel,
)
from .provenance import ContentFile, LockedSources, Provenance, asset_contents

_EPOCH = "SOURCE_DATE_EPOCH"
"""The variable that fixes the time in what is generated (reproducible-builds.org)."""


@dataclass(frozen=True, kw_only=True)
class InventoryPackage:
    """A package in a bundle."""

    id: str
    """The id of its layer, or the digest of a wheel that is stored as it is."""
    name: str
    version: str
    sha256: str
    """Digest of the wheel that it was installed from."""
    licence: Licence
    provenance: Provenance
    requires: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class InventoryAsset:
    """A model, a data set, or files of the project's user."""

    id: str
    type: str
    """``model``, ``dataset`` or ``file``."""
    name: str
    """The repository of the hub, or the name of the files."""
    commit: str
    """The commit that it was taken at; empty for files."""
    tree: str
    """Digest of paths and contents together."""
    licence: Licence
    files: tuple[ContentFile, ...]


@dataclass(frozen=True, kw_only=True)
class InventoryPart:
    """A part of stager, the project's own files, or the Python that the bundle brings."""

    id: str
    kind: str
    """``project``, ``trainer``, ``python`` or ``program``."""
    name: str
    sha256: str
    """Digest of the file; for a layer, of paths and contents together."""
    version: str = ""


@dataclass(frozen=True, kw_only=True)
class Inventory:
    """Everything that a bundle is made of."""

    bundle: Path
    manifest: Manifest
    written: datetime.datetime
    packages: tuple[InventoryPackage, ...]
    decompressor: InventoryPackage | None
    """The package that decompresses the layers on a node; None if none is needed."""
    direct: tuple[str, ...]
    """Names of packages that the project asks for, or that no other package needs."""
    assets: tuple[InventoryAsset, ...]
    parts: tuple[InventoryPart, ...]


def inventory(chosen: ChosenBundle, locks: Sequence[Path] = ()) -> Inventory:
    """Return the inventory of a bundle."""
    sources = LockedSources(locks)
    with open_bundle(chosen.path, chosen.id) as bundle:
        manifest = bundle.manifest
        with bundle.turn_into_damage(LayerError):
            origins = {layer.id: read_origin(bundle.head(layer)) for layer in manifest.layers}
        packages = _packages(bundle, origins, sources)
        needed = {name for package in packages for name in package.requires}
        asked = set(map(clean, manifest.packages))
        return Inventory(
            bundle=chosen.path,
            manifest=manifest,
            written=_written(chosen.path),
            packages=packages,
            decompressor=_decompressor(bundle, sources),
            direct=tuple(p.name for p in packages if p.name in asked or p.name not in needed),
            assets=tuple(_assets(bundle, origins)),
            parts=tuple(_parts(manifest, origins)),
        )


def _written(path: Path) -> datetime.datetime:
    """Return ``$SOURCE_DATE_EPOCH``, else the file's time: a bundle itself contains no time."""
    text = os.environ.get(_EPOCH) or int(path.stat().st_mtime)
    try:
        return datetime.datetime.fromtimestamp(int(text), datetime.timezone.utc)
    except (ValueError, OverflowError, OSError):
        raise ConfigError(
            f"{_EPOCH} is {text!r}, which is not a time",
            hint="set it to seconds since 1970, or unset it",
        ) from None


def _packages(
    bundle: BundleFile, origins: Mapping[Digest, Origin], sources: LockedSources
) -> tuple[InventoryPackage, ...]:
    layers = [layer for layer in bundle.manifest.layers if layer.kind == "wheel"]
    metadata = {layer.name: metadata_of(bundle, layer) for layer in layers}
    needs = dependencies(
        {name: one.requires for name, one in metadata.items()}, _environment(bundle.manifest)
    )
    found = []
    for layer in layers:
        wheel = str(origins[layer.id].content)
        package = InventoryPackage(
            id=layer.id,
            name=clean(layer.name),
            version=clean(layer.version),
            sha256=wheel,
            licence=licence_of(metadata[layer.name]),
            provenance=sources.of(layer.name, layer.version, wheel),
            requires=tuple(map(clean, needs[layer.name])),
        )
        found.append(package)
    return tuple(sorted(found, key=lambda package: (package.name, package.version)))


def _environment(manifest: Manifest) -> Mapping[str, str]:
    needs = manifest.requires
    libc = "manylinux_2_17" if needs.libc == "glibc" else "musllinux_1_1"
    target = Target(python=needs.python, platform=f"{libc}_{needs.machine}")
    values = {name: str(value) for name, value in target.environment().items()}
    return {**values, "python_full_version": f"{needs.python}.0"}


def _decompressor(bundle: BundleFile, sources: LockedSources) -> InventoryPackage | None:
    part = bundle.manifest.decompressor
    if part is None:
        return None
    metadata = metadata_of_wheel(bundle.read_part(part))
    name, version = _identity(part.name, metadata)
    return InventoryPackage(
        id=part.sha256,
        name=name,
        version=version,
        sha256=part.sha256,
        licence=licence_of(metadata),
        provenance=sources.of(name, version, part.sha256),
    )


def _identity(file: str, metadata: PackageMetadata) -> tuple[str, str]:
    name, version, *_ = [*clean(file).removesuffix(".whl").split("-"), ""]
    return metadata.name or name, metadata.version or version


def _assets(bundle: BundleFile, origins: Mapping[Digest, Origin]) -> Iterator[InventoryAsset]:
    layers = [layer for layer in bundle.manifest.layers if layer.kind == "asset"]
    said = {layer.id: _said_by_hub(origins[layer.id]) for layer in layers}
    contents = asset_contents(bundle, {key: hub.get("commit", "") for key, hub in said.items()})
    for layer in layers:
        yield _asset(layer, origins[layer.id], said[layer.id], contents[layer.id])


def _said_by_hub(origin: Origin) -> Mapping[str, str]:
    """Return what a hub repository states about itself; empty for other assets."""
    said = origin.options.get("hub")
    if not isinstance(said, dict):
        return {}
    return {str(name): clean(str(value)) for name, value in said.items()}


def _asset(
    layer: Layer, origin: Origin, said: Mapping[str, str], files: tuple[ContentFile, ...]
) -> InventoryAsset:
    type_ = said.get("type", "")
    return InventoryAsset(
        id=layer.id,
        type=type_ if type_ in ("model", "dataset", "space") else "file",
        name=said.get("name", "") or clean(layer.name),
        commit=said.get("commit", ""),
        tree=origin.content,
        licence=licence_of_card(said.get("licence", "")),
        files=files,
    )


def _parts(manifest: Manifest, origins: Mapping[Digest, Origin]) -> Iterator[InventoryPart]:
    for layer in manifest.layers:
        if layer.kind in ("project", "trainer", PYTHON):
            yield InventoryPart(
                id=layer.id,
                kind=layer.kind,
                name=clean(layer.name),
                sha256=origins[layer.id].content,
                version=clean(layer.version),
            )
    node = manifest.node
    yield InventoryPart(id=node.sha256, kind="program", name=node.name, sha256=node.sha256)


# --- The result of ``stager inspect --licenses`` -------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LicensedComponent:
    """A component of a bundle that somebody else has made, with its licence."""

    kind: str
    """``package``, ``decompressor``, ``model``, ``dataset`` or ``space``."""
    name: str
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
    id: str
    components: tuple[LicensedComponent, ...]
    """Sorted by name; those that name no licence last."""
    without_licence: int
    """Number of components that name none."""


def licence_list(inventory: Inventory) -> LicenceList:
    """Return the licences of everything that others have made."""
    made = [("package", one.name, one.version, one.licence) for one in inventory.packages]
    if (tool := inventory.decompressor) is not None:
        made.append(("decompressor", tool.name, tool.version, tool.licence))
    assets = [asset for asset in inventory.assets if asset.type != "file"]
    made += [(one.type, one.name, one.commit, one.licence) for one in assets]
    found = [
        LicensedComponent(
            kind=kind,
            name=name,
            version=version,
            licence=licence.text,
            spdx=licence.spdx,
            declared_in=licence.field,
        )
        for kind, name, version, licence in made
    ]
    found.sort(key=lambda one: (not one.licence, one.name, one.version, one.kind))
    return LicenceList(
        bundle=inventory.bundle,
        id=inventory.manifest.id,
        components=tuple(found),
        without_licence=sum(not one.licence for one in found),
    )
