"""Looking into a bundle without unpacking it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bundle.format.archive import BundleFile
from bundle.format.layer import origin_of
from bundle.format.manifest import Layer, Manifest

from ..layers.layer_file import decompress_index
from ..layers.prune import Pruned, noted
from .existing import opened


@dataclass(frozen=True, kw_only=True)
class InspectedLayer:
    """A layer of a bundle."""

    kind: str
    """``wheel``, ``project``, ``trainer`` or ``asset``."""
    name: str
    """Its name."""
    version: str
    """Its version, or the beginning of a model's or data set's commit; empty for none."""
    bytes: int
    """Its size in the bundle."""
    unpacked_bytes: int
    """The size of its files."""
    files: int
    """Number of its files."""
    id: str
    """Its id."""


@dataclass(frozen=True, kw_only=True)
class InspectedRepository:
    """A model or data set of a hub in a bundle."""

    type: str
    """``model``, ``dataset`` or ``space``."""
    name: str
    """The repository."""
    commit: str
    """The commit it was taken at."""
    licence: str
    """The licence that its card names; empty if it names none."""
    left_out: int
    """Number of its files that were not taken."""
    left_out_files: tuple[str, ...]
    """The first of them."""
    bytes: int
    """Its size in the bundle."""
    unpacked_bytes: int
    """The size of its files."""


@dataclass(frozen=True, kw_only=True)
class InspectedFile:
    """A file in a bundle."""

    layer: str
    """The layer's name."""
    path: str
    """Its path in the environment."""
    size: int
    """Its size in bytes."""
    sha256: str
    """Its digest."""


@dataclass(frozen=True, kw_only=True)
class InspectedSignature:
    """The signature beside a bundle."""

    file: Path
    """The signature."""
    accepted: bool
    """True if one of the signers that the settings allow has signed this bundle."""
    signer: str
    """Who, as ``trust.allowed-signers`` calls them; empty if it is nobody of these."""
    key: str
    """The key that has signed this bundle; empty if none has."""
    why: str
    """Why it is not accepted; empty if it is."""


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """The result of ``stager inspect``."""

    bundle: Path
    """The bundle."""
    id: str
    """Its id."""
    name: str
    """The project's name."""
    python: str
    """The version of Python it is for."""
    platform: str
    """The machine and the libc it needs."""
    bundle_bytes: int
    """Its size in bytes."""
    unpacked_bytes: int
    """The size of its files in bytes."""
    files: int
    """Number of its files."""
    imports: tuple[str, ...]
    """Modules that must import on each node."""
    layers: tuple[InspectedLayer, ...]
    """Its layers."""
    pruned: Pruned
    """What ``environment.prune`` left out."""
    hub: tuple[InspectedRepository, ...] = ()
    """Its models and data sets of a hub."""
    signature: InspectedSignature | None = None
    """Its signature; null if there is none beside it."""


@dataclass(frozen=True, kw_only=True)
class InspectionWithFiles(Inspection):
    """The result of ``stager inspect --files``."""

    listing: tuple[InspectedFile, ...]
    """Every file."""


def inspect(path: Path, *, asked: str = "") -> Inspection:
    """Return what is in a bundle.

    Raises:
        BundleError: it cannot be read, or is damaged.
    """
    with opened(path, asked) as bundle:
        return _inspection(path, bundle)


def inspect_files(path: Path, *, asked: str = "") -> InspectionWithFiles:
    """Return what is in a bundle, with every file; see :func:`inspect`."""
    with opened(path, asked) as bundle:
        return InspectionWithFiles(
            **vars(_inspection(path, bundle)), listing=tuple(_listing(bundle))
        )


def _listing(bundle: BundleFile) -> Iterator[InspectedFile]:
    for layer in bundle.manifest.layers:
        for entry in bundle.index(layer, bundle.head(layer), decompress_index).files:
            yield InspectedFile(
                layer=layer.name, path=entry.path, size=entry.size, sha256=entry.sha256
            )


def _inspection(path: Path, bundle: BundleFile) -> Inspection:
    manifest = bundle.manifest
    return Inspection(
        bundle=path,
        id=manifest.id,
        name=manifest.name,
        python=manifest.requires.python,
        platform=_platform(manifest),
        bundle_bytes=manifest.size,
        unpacked_bytes=manifest.unpacked_size,
        files=manifest.files,
        imports=manifest.imports,
        layers=tuple(_layer(layer) for layer in manifest.layers),
        pruned=noted(bundle),
        hub=tuple(_repositories(bundle)),
    )


def _repositories(bundle: BundleFile) -> Iterator[InspectedRepository]:
    for layer in bundle.manifest.layers:
        if layer.kind != "asset":
            continue
        said = origin_of(bundle.head(layer)).options.get("hub")
        if isinstance(said, dict):
            yield InspectedRepository(
                **{key: str(said.get(key, "")) for key in ("type", "name", "commit", "licence")},
                left_out=int(str(said.get("left-out", 0))),
                left_out_files=tuple(map(str, said.get("left-out-files", ()))),
                bytes=layer.size,
                unpacked_bytes=layer.unpacked_size,
            )


def _platform(manifest: Manifest) -> str:
    needs = manifest.requires
    pure = needs.libc_version == "0.0"
    libc = f"any {needs.libc}" if pure else f"{needs.libc} {needs.libc_version} or newer"
    return f"{needs.machine}, {libc}"


def _layer(layer: Layer) -> InspectedLayer:
    return InspectedLayer(
        kind=layer.kind,
        name=layer.name,
        version=layer.version,
        bytes=layer.size,
        unpacked_bytes=layer.unpacked_size,
        files=layer.files,
        id=layer.id,
    )
