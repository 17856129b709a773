"""The inventory of a bundle: every component, its version, digest, licence and source."""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bundle.format.archive import BundleFile
from bundle.format.layer import LayerError, Origin, origin_of
from bundle.format.manifest import PYTHON, Layer, Manifest
from bundle.protocol.digest import Digest

from ..core.errors import ConfigError, StagerError
from ..core.files import SBOM_SUFFIX, output_file
from ..core.values import Target
from ..pack.bundle_file import ChosenBundle, opened
from ..pack.members import refuse_in_project
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
    """Its normalised name."""
    version: str
    """Its version."""
    sha256: str
    """Digest of the wheel that it was installed from."""
    licence: Licence
    """Its licence."""
    provenance: Provenance
    """Its source."""
    requires: tuple[str, ...] = ()
    """Names of packages in the bundle that it needs."""


@dataclass(frozen=True, kw_only=True)
class InventoryAsset:
    """A model, a data set, or files of the project's user."""

    id: str
    """The id of its layer."""
    type: str
    """``model``, ``dataset`` or ``file``."""
    name: str
    """The repository of the hub, or the name of the files."""
    commit: str
    """The commit that it was taken at; empty for files."""
    tree: str
    """Digest of paths and contents together."""
    licence: Licence
    """The licence that its card names."""
    files: tuple[ContentFile, ...]
    """Its files."""


@dataclass(frozen=True, kw_only=True)
class InventoryPart:
    """A part of stager, the project's own files, or the Python that the bundle brings."""

    id: str
    """The id of its layer, or its digest."""
    kind: str
    """``project``, ``trainer``, ``python`` or ``program``."""
    name: str
    """Its name."""
    sha256: str
    """Digest of the file; for a layer, of paths and contents together."""
    version: str = ""
    """The version of Python."""


@dataclass(frozen=True, kw_only=True)
class Inventory:
    """Everything that a bundle is made of."""

    bundle: Path
    """The bundle."""
    manifest: Manifest
    """Its manifest."""
    written: datetime.datetime
    """When it was written."""
    packages: tuple[InventoryPackage, ...]
    """The packages of the environment, sorted by name."""
    decompressor: InventoryPackage | None
    """The package that decompresses the layers on a node; None if none is needed."""
    direct: tuple[str, ...]
    """Names of packages that the project asks for, or that no other package needs."""
    assets: tuple[InventoryAsset, ...]
    """Models, data sets and other files, in the order of the bundle."""
    parts: tuple[InventoryPart, ...]
    """The project and what stager adds."""


def inventory(chosen: ChosenBundle, locks: Sequence[Path] = ()) -> Inventory:
    """Return the inventory of a bundle.

    Raises:
        BundleError: it cannot be read, is damaged, or is another one.
        ConfigError: ``$SOURCE_DATE_EPOCH`` is not a time.
    """
    sources = LockedSources(locks)
    with opened(chosen.path, chosen.id) as bundle:
        manifest = bundle.manifest
        with bundle.refusing(LayerError):
            origins = {layer.id: origin_of(bundle.head(layer)) for layer in manifest.layers}
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
    """Return the environment markers of the target, independent of this machine."""
    needs = manifest.requires
    libc = "manylinux_2_17" if needs.libc == "glibc" else "musllinux_1_1"
    target = Target(python=needs.python, platform=f"{libc}_{needs.machine}")
    values = {name: str(value) for name, value in target.environment().items()}
    return {**values, "python_full_version": f"{needs.python}.0"}


def _decompressor(bundle: BundleFile, sources: LockedSources) -> InventoryPackage | None:
    part = bundle.manifest.decompressor
    if part is None:
        return None
    metadata = metadata_of_wheel(bundle.part(part))
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


# --- The software bill of materials of a bundle, where the library that writes it is installed

"""The ending that CycloneDX recommends for names of its files; no project ships such a file."""
_INSTALL = "uv tool install --reinstall '.[sbom]'"


def sbom(inventory: Inventory) -> str:
    """Return the inventory as JSON of CycloneDX 1.6; for the same bundle and locks the same text.

    The library comes with the extra ``stager[sbom]`` and is imported when it is needed.

    Raises:
        StagerError: it is not installed, or is of another major version.
    """
    try:
        from .cyclonedx_document import document
    except ImportError as exc:
        raise StagerError(
            "inspect --sbom needs cyclonedx-python-lib, which is not installed here as needed",
            hint=f"in the clone of stager: {_INSTALL}; or in its virtual environment: "
            "pip install 'cyclonedx-python-lib>=11.7,<12'",
            context=[str(exc)],
        ) from exc
    return document(inventory)


# --- A software bill of materials in a file ------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SbomResult:
    """The result of ``stager inspect --sbom -o FILE``."""

    file: Path
    """The file."""
    bundle: Path
    """The bundle."""
    id: str
    """Its id."""
    packages: int
    """Number of packages in the environment."""
    assets: int
    """Number of models, data sets and other files or folders of data."""
    unknown_sources: tuple[str, ...]
    """Packages of which no lock at hand says where they came from."""


def unknown_sources(inventory: Inventory) -> tuple[str, ...]:
    """Return the packages of which no lock at hand says where they came from."""
    return tuple(package.name for package in inventory.packages if not package.provenance.kind)


def write_sbom(inventory: Inventory, output: Path, project: Path | None) -> SbomResult:
    """Write the document to a file, in place of one that is there.

    Raises:
        ConfigError: the file would become part of the project's next bundle.
        StagerError: it cannot be written, or the library is not installed.
    """
    refuse_in_project(output, project, SBOM_SUFFIX)
    text = sbom(inventory)
    with output_file(output) as handle:
        handle.write(text.encode())
    return SbomResult(
        file=output,
        bundle=inventory.bundle,
        id=inventory.manifest.id,
        packages=len(inventory.packages),
        assets=len(inventory.assets),
        unknown_sources=unknown_sources(inventory),
    )
