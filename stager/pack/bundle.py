"""Joining layers, the far side's program and a decompressor into a bundle.

The file in the offline root is thin (:mod:`bundle.format.manifest`): an edit of a project writes a
few megabytes, whatever the size of the bundle.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from bundle.environment.listing import is_document
from bundle.format.archive import END
from bundle.format.layer import Index
from bundle.format.manifest import (
    MANIFEST_NAME,
    NODE_NAME,
    Layer,
    Manifest,
    Part,
    member_header,
    padding,
)
from bundle.protocol.counts import counted
from bundle.protocol.digest import Digest
from bundle.protocol.job import Requires

from ..core.errors import WheelError
from ..core.files import BUNDLE_SUFFIX, bytes_of
from ..core.store import Store, sha256_of
from ..core.values import Target, Wheel
from ..layers.tree import folders_of
from .libc_needs import LibcNeed, tag_need
from .members import write_member
from .program import make_node_program
from .seals import checked_files, is_sealed, seal
from .stored_layers import check_frames, index_of, named, stored_head


@dataclass(frozen=True, kw_only=True)
class Contents:
    """Everything that goes into a bundle besides the files themselves."""

    name: str
    """The project's name."""
    target: Target
    """The target the environment was resolved for."""
    wheels: tuple[Wheel, ...]
    """The wheels behind the layers; their tags decide what a node must have."""
    layers: tuple[Layer, ...]
    """The layers, in the order in which they are stored."""
    decompressor: Wheel | None
    """The zstandard wheel for the target; None if its Python has zstd."""
    packages: tuple[str, ...]
    """Names of the packages in the user's requirements."""
    imports: tuple[str, ...]
    """Modules that must import on every node."""
    bundled_glibc: tuple[int, int] | None = None
    """The oldest glibc that the bundle's own Python runs with; None without one."""
    files: tuple[LibcNeed, ...] = ()
    """What the files in the wheels need of the C library."""


@dataclass(frozen=True, kw_only=True)
class Packed:
    """A bundle in the store."""

    path: Path
    """The file."""
    manifest: Manifest
    """Its manifest."""
    size: int
    """Its length in bytes, with all its layers."""
    reused: bool
    """True if the store had it already."""


def pack(contents: Contents, store: Store) -> Packed:
    """Write the bundle, unless the store has it already. The store's lock must be held.

    Raises:
        WheelError: two layers hold different files of the same name; all such files are listed.
        BundleError: a layer in the store is damaged; it has been removed.
        SpaceError: there is no room for the bundle.
    """
    node = make_node_program()
    manifest = _manifest(contents, node)
    path = bundle_path(store, manifest)
    if is_sealed(store, path, manifest):
        return Packed(path=path, manifest=manifest, size=manifest.size, reused=True)
    heads = [stored_head(store, layer) for layer in manifest.layers]
    indexes = [
        index_of(store, layer, head) for layer, head in zip(manifest.layers, heads, strict=True)
    ]
    _refuse_conflicts(manifest.layers, indexes)
    checked = checked_files(store, manifest)
    for layer, index in zip(manifest.layers, indexes, strict=True):
        if store.layer(layer.id).name not in checked:
            check_frames(store, layer, index)
    if contents.decompressor is not None:
        _keep(contents.decompressor, store, checked)
    store.require_space(manifest.thin_size, "the bundle")
    data = {MANIFEST_NAME: manifest.to_bytes(), NODE_NAME: node}
    data |= {layer.head_member: head for layer, head in zip(manifest.layers, heads, strict=True)}
    with store.publishing(path) as partial, partial.open("wb") as out:
        for name, content in data.items():
            write_member(out, name, len(content), (content,))
        out.write(END)
        for member in manifest.stored:
            out.write(member_header(member.name, member.size) + bytes(padding(member.size)))
    seal(store, path, manifest, thin=True)
    return Packed(path=path, manifest=manifest, size=manifest.size, reused=False)


def _keep(decompressor: Wheel, store: Store, checked: Collection[str]) -> None:
    """Store the decompressor beside the layers: its wheel may be removed or changed."""
    path = store.layers / f"{decompressor.sha256}.whl"
    if path.name in checked:
        return
    with suppress(OSError):  # it is not there, or something else is
        if sha256_of(path) == decompressor.sha256:
            return
    store.require_space(decompressor.size, "the bundle")
    with store.publishing(path) as partial:
        partial.write_bytes(bytes_of(decompressor.path))


def bundle_path(store: Store, manifest: Manifest) -> Path:
    """Return the path of a bundle in the store."""
    return store.bundles / f"{manifest.name}-{manifest.id[:12]}{BUNDLE_SUFFIX}"


def requires(
    target: Target,
    wheels: Sequence[Wheel],
    bundled_glibc: tuple[int, int] | None = None,
    files: Sequence[LibcNeed] = (),
) -> Requires:
    """Return the requirements on a node: the newest C library that anything inside needs.

    It is often much older than the target's own, so a bundle built on a new login node runs on
    older compute nodes if its wheels allow it.
    """
    libc, newest = target.libc
    needs = [*files, *(tag_need(wheel, newest) for wheel in wheels)]
    if bundled_glibc is not None:
        because = "which the bundle brings"
        own = LibcNeed(version=bundled_glibc, package=f"Python {target.python}", because=because)
        needs.append(own)
    greatest = max(needs, key=lambda need: need.version, default=None)
    version = greatest.version if greatest else (0, 0)
    return Requires(
        python=target.python,
        machine=target.machine,
        libc=libc,
        libc_version=f"{version[0]}.{version[1]}",
        libc_needed_by=str(greatest) if greatest and any(version) else "",
        bundled_python=bundled_glibc is not None,
    )


def _manifest(contents: Contents, node: bytes) -> Manifest:
    wheel = contents.decompressor
    decompressor = None
    if wheel is not None:
        name = short_name(wheel.path.name)
        decompressor = Part(name=name, sha256=wheel.sha256, size=wheel.size)
    return Manifest(
        name=contents.name,
        requires=requires(contents.target, contents.wheels, contents.bundled_glibc, contents.files),
        node=Part(name=NODE_NAME, sha256=Digest.of(node), size=len(node)),
        decompressor=decompressor,
        layers=contents.layers,
        packages=contents.packages,
        imports=contents.imports,
    )


def short_name(filename: str) -> str:
    """Return a wheel's name with one platform tag: tar names have room for 100 bytes."""
    stem, _, platforms = filename.removesuffix(".whl").rpartition("-")
    return f"{stem}-{platforms.split('.')[0]}.whl"


def _refuse_conflicts(layers: Sequence[Layer], indexes: Sequence[Index]) -> None:
    """Refuse layers of which one would overwrite or block a path of another."""
    owners: dict[str, tuple[Layer, str]] = {}
    faults = []
    for layer, index in zip(layers, indexes, strict=True):
        for entry in index.files:
            owner, digest = owners.setdefault(entry.path, (layer, entry.sha256))
            if digest != entry.sha256 and not is_document(entry.path):
                faults.append(f"{entry.path}: in {named(owner)} and {named(layer)}")
    for layer, index in zip(layers, indexes, strict=True):
        for path in sorted(folders_of(entry.path for entry in index.files) & owners.keys()):
            owner = owners[path][0]
            faults.append(f"{path}: a file in {named(owner)}, a directory in {named(layer)}")
    if faults:
        raise WheelError(
            f"packages conflict: {counted(len(faults), 'file')} of one would replace another's",
            hint="leave one of the packages out of the requirements, or pin versions that agree",
            context=faults,
        )
