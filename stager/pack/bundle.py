"""Joining layers, the far side's program and a decompressor into one bundle file."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from packaging.utils import parse_wheel_filename

from bundle.format.layer import Index, LayerError, decode_head
from bundle.format.manifest import (
    BLOCK,
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
from bundle.protocol.requires import Requires

from ..core.errors import BundleError, WheelError
from ..core.regular_files import bytes_of, opened, text_of
from ..core.store import Store, stamp
from ..core.values import Target, Wheel
from ..layers.layer_file import decompress_index
from ..layers.tree import folders_of
from .program import make_node_program


@dataclass(frozen=True, kw_only=True)
class Contents:
    """Everything that goes into a bundle besides the files themselves."""

    name: str
    """The project's name."""
    target: Target
    """What the environment was resolved for."""
    wheels: tuple[Wheel, ...]
    """The wheels behind the layers; their tags decide what a node must have."""
    layers: tuple[Layer, ...]
    """In the order in which they are to be stored."""
    decompressor: Wheel | None
    """The zstandard wheel for the target, or None where its Python has zstd."""
    packages: tuple[str, ...]
    """Names of the packages the user asked for."""
    imports: tuple[str, ...]
    """Modules that must import on every node."""


@dataclass(frozen=True, kw_only=True)
class Packed:
    """A bundle in the store."""

    path: Path
    """The file."""
    manifest: Manifest
    """What is in it."""
    size: int
    """Its length in bytes."""
    reused: bool
    """Whether it was there already."""


def pack(contents: Contents, store: Store) -> Packed:
    """Write the bundle, unless the same one is there. The store's lock must be held.

    Raises:
        WheelError: two layers hold different files of the same name; all such files are listed.
        BundleError: a layer in the store is damaged; it has been removed.
        SpaceError: there is no room for the bundle.
    """
    node = make_node_program()
    manifest = _manifest(contents, node)
    path = bundle_path(store, manifest)
    size = sum(BLOCK + length + padding(length) for _, length in manifest.members()) + 2 * BLOCK
    if _is_sealed(store, path, size, manifest.id):
        return Packed(path=path, manifest=manifest, size=size, reused=True)
    heads = [_stored_head(store, layer) for layer in manifest.layers]
    indexes = [
        _index(store, layer, head) for layer, head in zip(manifest.layers, heads, strict=True)
    ]
    _refuse_conflicts(manifest.layers, indexes)
    store.require_space(size, "the bundle")
    with store.publishing(path) as partial, partial.open("wb") as out:
        _member(out, MANIFEST_NAME, manifest.to_bytes())
        _member(out, NODE_NAME, node)
        if manifest.decompressor is not None and contents.decompressor is not None:
            _member(out, manifest.decompressor.name, bytes_of(contents.decompressor.path))
        for layer, head in zip(manifest.layers, heads, strict=True):
            _member(out, layer.head_member, head)
        for layer, index in zip(manifest.layers, indexes, strict=True):
            _copy_frames(out, store, layer, index)
        out.write(bytes(2 * BLOCK))
    with store.publishing(_seal(store, path)) as partial:
        partial.write_text(_stamp(path, manifest.id), encoding="utf-8")
    return Packed(path=path, manifest=manifest, size=size, reused=False)


def bundle_path(store: Store, manifest: Manifest) -> Path:
    """Where a bundle lies in the store."""
    return store.bundles / f"{manifest.name}-{manifest.id[:12]}.pkgs.tar"


def _is_sealed(store: Store, path: Path, size: int, key: Digest) -> bool:
    """Whether a bundle is the very file that was written, and nobody has touched it since.

    To read all of it again would cost more than the rest of a build in which nothing has changed.
    """
    try:
        written = text_of(_seal(store, path))
        return path.stat().st_size == size and written == _stamp(path, key)
    except (OSError, UnicodeDecodeError):
        return False


def _seal(store: Store, path: Path) -> Path:
    return store.seals / f"{path.name}.txt"


def _stamp(path: Path, key: Digest) -> str:
    return " ".join(map(str, [*stamp(path.stat()), key])) + "\n"


def requires(target: Target, wheels: Sequence[Wheel]) -> Requires:
    """What a node must have: the newest C library that any wheel's tags ask for.

    That is often much older than the target's own, so a bundle built on a new login node runs on
    older compute nodes whenever its wheels allow it.
    """
    libc, newest = target.libc
    needed = (0, 0)
    for wheel in wheels:
        platforms = [tag.platform for tag in parse_wheel_filename(wheel.path.name)[3]]
        versions = [version for version in map(_libc_version, platforms) if version is not None]
        # A wheel tagged plainly `linux_...` was built here, against this machine's own library.
        if any(platform.startswith("linux_") for platform in platforms):
            versions = [newest]
        if versions:
            needed = max(needed, min(versions))
    return Requires(
        python=target.python,
        machine=target.machine,
        libc=libc,
        libc_version=f"{needed[0]}.{needed[1]}",
    )


def _libc_version(platform: str) -> tuple[int, int] | None:
    """The C library's version in a platform tag (PEP 600, PEP 656 and their forerunners)."""
    legacy = {"manylinux1": (2, 5), "manylinux2010": (2, 12), "manylinux2014": (2, 17)}
    found = re.match(r"(?:manylinux|musllinux)_(\d+)_(\d+)_", platform)
    if found:
        return int(found[1]), int(found[2])
    return legacy.get(platform.partition("_")[0])


def _manifest(contents: Contents, node: bytes) -> Manifest:
    wheel = contents.decompressor
    return Manifest(
        name=contents.name,
        requires=requires(contents.target, contents.wheels),
        node=Part(name=NODE_NAME, sha256=Digest.of(node), size=len(node)),
        decompressor=None
        if wheel is None
        else Part(name=_short_name(wheel.path.name), sha256=wheel.sha256, size=wheel.size),
        layers=contents.layers,
        packages=contents.packages,
        imports=contents.imports,
    )


def _short_name(filename: str) -> str:
    """The decompressor's name with one platform tag: tar member names have room for 100 bytes."""
    stem, _, platforms = filename.removesuffix(".whl").rpartition("-")
    return f"{stem}-{platforms.split('.')[0]}.whl"


def stored_index(store: Store, layer: Layer) -> Index:
    """What a layer in the store holds.

    Raises:
        BundleError: it is damaged; it has been removed.
    """
    return _index(store, layer, _stored_head(store, layer))


def _stored_head(store: Store, layer: Layer) -> bytes:
    try:
        with opened(store.layer(layer.id)) as handle:
            head = handle.read(layer.head_size)
    except OSError as exc:
        raise _damaged(store, layer, str(exc)) from exc
    if Digest.of(head) != layer.head:
        raise _damaged(store, layer, "its index has changed on disk")
    return head


def _index(store: Store, layer: Layer, head: bytes) -> Index:
    try:
        return decode_head(head, decompress_index)
    except LayerError as exc:
        raise _damaged(store, layer, str(exc)) from exc


def _refuse_conflicts(layers: Sequence[Layer], indexes: Sequence[Index]) -> None:
    """Refuse layers that cannot lie in one tree, or where the last one to be unpacked would win."""
    owners: dict[str, tuple[Layer, str]] = {}
    faults = []
    for layer, index in zip(layers, indexes, strict=True):
        for entry in index.files:
            owner, digest = owners.setdefault(entry.path, (layer, entry.sha256))
            if digest != entry.sha256:
                faults.append(f"{entry.path}: in {_named(owner)} and {_named(layer)}")
    for layer, index in zip(layers, indexes, strict=True):
        for path in sorted(folders_of(entry.path for entry in index.files) & owners.keys()):
            owner = owners[path][0]
            faults.append(f"{path}: a file in {_named(owner)}, a directory in {_named(layer)}")
    if faults:
        raise WheelError(
            f"packages do not fit together: {counted(len(faults), 'file')} in each other's way",
            hint="leave one of the packages out of the requirements, or pin versions that agree",
            context=faults,
        )


def _named(layer: Layer) -> str:
    return f"{layer.name} {layer.version}".strip()


def _member(out: BinaryIO, name: str, data: bytes) -> None:
    out.write(member_header(name, len(data)) + data + bytes(padding(len(data))))


def _copy_frames(out: BinaryIO, store: Store, layer: Layer, index: Index) -> None:
    size = layer.size - layer.head_size
    out.write(member_header(layer.member, size))
    for piece in _checked_frames(store, layer, index):
        out.write(piece)
    out.write(bytes(padding(size)))


def _checked_frames(store: Store, layer: Layer, index: Index) -> Iterator[bytes]:
    """A layer's frames, each checked on the way: a damaged store must not make a bundle."""
    try:
        with opened(store.layer(layer.id)) as handle:
            handle.seek(layer.head_size)
            for frame in index.frames:
                data = handle.read(frame.size)
                if hashlib.sha256(data).hexdigest() != frame.sha256:
                    raise LayerError("a frame has changed on disk")
                yield data
    except (LayerError, OSError) as exc:
        raise _damaged(store, layer, str(exc)) from exc


def _damaged(store: Store, layer: Layer, why: str) -> BundleError:
    path = store.layer(layer.id)
    path.unlink(missing_ok=True)
    return BundleError(
        f"the stored layer of {_named(layer)} is damaged ({why}); it has been removed",
        hint="run `stager build` again: only this layer is made anew",
        context=[str(path)],
    )
