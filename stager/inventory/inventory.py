"""The inventory of a bundle: every component, its version, digest, licence and source."""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from bundle.format.archive import BundleFile
from bundle.format.layer import LayerError, Origin, read_origin
from bundle.format.manifest import PYTHON, Manifest
from bundle.protocol.dataclass import dataclass
from bundle.protocol.digest import Digest

from ..core.errors import ConfigError, StagerError
from ..core.files import SBOM_SUFFIX, write_output
from ..core.values import Target
from ..pack.bundle_file import ChosenBundle, open_bundle
from ..pack.members import refuse_in_project
from .package_metadata import (
    Licence,
    choose_licence,
    clean,
    find_dependencies,
    parse_card_licence,
    read_metadata,
    read_wheel_metadata,
)
from .provenance import ContentFile, LockedSources, Provenance, list_asset_files

_EPOCH = "SOURCE_DATE_EPOCH"  # see reproducible-builds.org


@dataclass(frozen=True, kw_only=True)
class InventoryItem:
    """A component of a bundle."""

    kind: str
    """``package``, ``decompressor``, ``model``, ``dataset``, ``space``, ``file``, ``project``,
    ``trainer``, ``python`` or ``program``."""
    id: str  # the id of its layer, or the digest of a file that is stored as it is
    name: str
    version: str = ""
    sha256: str  # of the wheel or the file; for files of a layer, of paths and contents together
    licence: Licence = Licence()
    provenance: Provenance = Provenance()
    requires: tuple[str, ...] = ()
    files: tuple[ContentFile, ...] = ()  # those of a model, a data set, or the project's user


@dataclass(frozen=True, kw_only=True)
class Inventory:
    """Everything that a bundle is made of."""

    bundle: Path
    manifest: Manifest
    written: datetime.datetime
    packages: tuple[InventoryItem, ...]
    direct: tuple[str, ...]  # the packages that the project asks for, or that no other needs
    assets: tuple[InventoryItem, ...]
    parts: tuple[InventoryItem, ...]  # the project, what stager adds, and the decompressor


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
            direct=tuple(p.name for p in packages if p.name in asked or p.name not in needed),
            assets=tuple(_assets(bundle, origins)),
            parts=tuple(_parts(bundle, origins, sources)),
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
) -> tuple[InventoryItem, ...]:
    layers = [layer for layer in bundle.manifest.layers if layer.kind == "wheel"]
    metadata = {layer.name: read_metadata(bundle, layer) for layer in layers}
    needs = find_dependencies(
        {name: one.requires for name, one in metadata.items()}, _environment(bundle.manifest)
    )
    found = [
        InventoryItem(
            kind="package",
            id=layer.id,
            name=clean(layer.name),
            version=clean(layer.version),
            sha256=origins[layer.id].content,
            licence=choose_licence(metadata[layer.name]),
            provenance=sources.find(layer.name, layer.version, origins[layer.id].content),
            requires=tuple(map(clean, needs[layer.name])),
        )
        for layer in layers
    ]
    return tuple(sorted(found, key=lambda package: (package.name, package.version)))


def _environment(manifest: Manifest) -> Mapping[str, str]:
    needs = manifest.requires
    libc = "manylinux_2_17" if needs.libc == "glibc" else "musllinux_1_1"
    target = Target(python=needs.python, platform=f"{libc}_{needs.machine}")
    values = {name: str(value) for name, value in target.environment().items()}
    return {**values, "python_full_version": f"{needs.python}.0"}


def _assets(bundle: BundleFile, origins: Mapping[Digest, Origin]) -> Iterator[InventoryItem]:
    layers = [layer for layer in bundle.manifest.layers if layer.kind == "asset"]
    hubs = {layer.id: _read_hub_entry(origins[layer.id]) for layer in layers}
    contents = list_asset_files(bundle, {key: hub.get("commit", "") for key, hub in hubs.items()})
    for layer in layers:
        hub = hubs[layer.id]
        kind = hub.get("type", "")
        yield InventoryItem(
            kind=kind if kind in ("model", "dataset", "space") else "file",
            id=layer.id,
            name=hub.get("name", "") or clean(layer.name),
            version=hub.get("commit", ""),
            sha256=origins[layer.id].content,
            licence=parse_card_licence(hub.get("licence", "")),
            files=contents[layer.id],
        )


def _read_hub_entry(origin: Origin) -> Mapping[str, str]:
    entry = origin.options.get("hub")
    fields = entry.items() if isinstance(entry, dict) else ()
    return {str(name): clean(str(value)) for name, value in fields}


def _parts(
    bundle: BundleFile, origins: Mapping[Digest, Origin], sources: LockedSources
) -> Iterator[InventoryItem]:
    for layer in bundle.manifest.layers:
        if layer.kind in ("project", "trainer", PYTHON):
            yield InventoryItem(
                kind=layer.kind,
                id=layer.id,
                name=clean(layer.name),
                version=clean(layer.version),
                sha256=origins[layer.id].content,
            )
    node, part = bundle.manifest.node, bundle.manifest.decompressor
    yield InventoryItem(kind="program", id=node.sha256, name=node.name, sha256=node.sha256)
    if part is not None:
        metadata = read_wheel_metadata(bundle.read_part(part))
        name, version, *_ = [*clean(part.name).removesuffix(".whl").split("-"), ""]
        name, version = metadata.name or name, metadata.version or version
        yield InventoryItem(
            kind="decompressor",
            id=part.sha256,
            name=name,
            version=version,
            sha256=part.sha256,
            licence=choose_licence(metadata),
            provenance=sources.find(name, version, part.sha256),
        )


@dataclass(frozen=True, kw_only=True)
class LicensedComponent:
    """A component of a bundle that somebody else has made, with its licence."""

    kind: str
    name: str
    version: str
    licence: str
    spdx: bool
    declared_in: str  # the field of the metadata, or ``card``; empty for no licence


@dataclass(frozen=True, kw_only=True)
class LicenceList:
    """The licences in a bundle."""

    bundle: Path
    id: str
    components: tuple[LicensedComponent, ...]  # by name; those that name no licence last
    without_licence: int


def licence_list(inventory: Inventory) -> LicenceList:
    """Return the licences of everything that others have made."""
    items = (*inventory.packages, *inventory.assets, *inventory.parts)
    own = ("file", "project", "trainer", PYTHON, "program")
    found = [
        LicensedComponent(
            kind=one.kind,
            name=one.name,
            version=one.version,
            licence=one.licence.text,
            spdx=one.licence.spdx,
            declared_in=one.licence.field,
        )
        for one in items
        if one.kind not in own
    ]
    found.sort(key=lambda one: (not one.licence, one.name, one.version, one.kind))
    return LicenceList(
        bundle=inventory.bundle,
        id=inventory.manifest.id,
        components=tuple(found),
        without_licence=sum(not one.licence for one in found),
    )


_INSTALL = "uv tool install --reinstall '.[sbom]'"


def sbom(inventory: Inventory) -> str:
    """Return the inventory as JSON of CycloneDX 1.6, the same for the same bundle and locks."""
    try:
        from .cyclonedx_document import document
    except ImportError as exc:
        raise StagerError(
            "inspect --sbom needs cyclonedx-python-lib, which is not installed here as needed",
            hint=f"in the clone of stager: {_INSTALL}; else: "
            "pip install 'cyclonedx-python-lib>=11.7,<12'",
            context=[str(exc)],
        ) from exc
    return document(inventory)


@dataclass(frozen=True, kw_only=True)
class SbomResult:
    """The result of ``stager inspect --sbom -o FILE``."""

    file: Path
    bundle: Path
    id: str
    packages: int
    assets: int
    unknown_sources: tuple[str, ...]


def unknown_sources(inventory: Inventory) -> tuple[str, ...]:
    """Return the packages of which no lock at hand says where they came from."""
    return tuple(package.name for package in inventory.packages if not package.provenance.kind)


def write_sbom(inventory: Inventory, output: Path, project: Path | None) -> SbomResult:
    """Write the document to a file, in place of one that is there."""
    refuse_in_project(output, project, SBOM_SUFFIX)
    text = sbom(inventory)
    with write_output(output) as handle:
        handle.write(text.encode())
    return SbomResult(
        file=output,
        bundle=inventory.bundle,
        id=inventory.manifest.id,
        packages=len(inventory.packages),
        assets=len(inventory.assets),
        unknown_sources=unknown_sources(inventory),
    )
