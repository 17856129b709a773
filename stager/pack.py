"""Joining layers, the far side's program and a decompressor into one bundle file."""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import BinaryIO

import zstandard
from packaging.utils import parse_wheel_filename

from bundle.layer import Index, LayerError, decode_head
from bundle.manifest import (
    BLOCK,
    MANIFEST_NAME,
    NODE_NAME,
    Digest,
    Layer,
    Manifest,
    Part,
    Requires,
    member_header,
    padding,
)

from .errors import BundleError, WheelError
from .model import Target, Wheel
from .store import Store

_EPOCH = (1980, 1, 1, 0, 0, 0)


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
    node = node_program()
    manifest = _manifest(contents, node)
    path = bundle_path(store, manifest)
    size = sum(BLOCK + length + padding(length) for _, length in manifest.members()) + 2 * BLOCK
    if path.exists() and path.stat().st_size == size:
        return Packed(path=path, manifest=manifest, size=size, reused=True)
    indexes = [stored_index(store, layer) for layer in manifest.layers]
    _refuse_conflicts(manifest.layers, indexes)
    store.require_space(size, "the bundle")
    with store.publishing(path) as partial, partial.open("wb") as out:
        _member(out, MANIFEST_NAME, manifest.to_bytes())
        _member(out, NODE_NAME, node)
        if manifest.decompressor is not None and contents.decompressor is not None:
            _member(out, manifest.decompressor.name, contents.decompressor.path.read_bytes())
        for layer, index in zip(manifest.layers, indexes, strict=True):
            _copy_layer(out, store, layer, index)
        out.write(bytes(2 * BLOCK))
    return Packed(path=path, manifest=manifest, size=size, reused=False)


def bundle_path(store: Store, manifest: Manifest) -> Path:
    """Where a bundle lies in the store."""
    return store.bundles / f"{manifest.name}-{manifest.id[:12]}.pkgs.tar"


def node_program() -> bytes:
    """The far side as one zip that Python can run: the modules of ``bundle``, byte for byte."""
    content = {"__main__.py": _NODE_MAIN}
    for item in resources.files("bundle").iterdir():
        if item.name.endswith(".py"):
            content[f"bundle/{item.name}"] = item.read_bytes()
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w", zipfile.ZIP_STORED) as archive:
        for name in sorted(content):
            info = zipfile.ZipInfo(name, _EPOCH)
            info.create_system, info.external_attr = 3, 0o644 << 16
            archive.writestr(info, content[name])
    return memory.getvalue()


_NODE_MAIN = b"""import sys

from bundle.__main__ import main

sys.exit(main(sys.argv[1:]))
"""


def requires(target: Target, wheels: Iterable[Wheel]) -> Requires:
    """What a node must have: the newest C library that any wheel's tags ask for.

    That is often much older than the target's own, so a bundle built on a new login node runs on
    older compute nodes whenever its wheels allow it.
    """
    libc, newest = target.libc
    needed = (0, 0)
    for wheel in wheels:
        lowest = [
            version
            for tag in parse_wheel_filename(wheel.path.name)[3]
            if (version := _libc_version(tag.platform)) is not None
        ]
        if lowest:
            needed = max(needed, min(lowest))
    # A wheel tagged plainly `linux_...` was built here, against this machine's own library.
    if any("-linux_" in wheel.path.name for wheel in wheels):
        needed = newest
    return Requires(
        python=target.python,
        machine=target.machine,
        libc=libc,
        libc_version=f"{needed[0]}.{needed[1]}",
    )


def _libc_version(platform: str) -> tuple[int, int] | None:
    legacy = {"manylinux1": (2, 5), "manylinux2010": (2, 12), "manylinux2014": (2, 17)}
    family, _, rest = platform.partition("_")
    if family in legacy:
        return legacy[family]
    if family not in ("manylinux", "musllinux"):
        return None
    major, minor = rest.split("_")[:2]
    return int(major), int(minor)


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
    try:
        with store.layer(layer.id).open("rb") as handle:
            head = handle.read(layer.head_size)
        if Digest.of(head) != layer.head:
            raise LayerError("its index has changed on disk")
        return decode_head(head, zstandard.ZstdDecompressor().decompress)
    except (LayerError, zstandard.ZstdError, OSError) as exc:
        raise _damaged(store, layer, str(exc)) from exc


def _refuse_conflicts(layers: Sequence[Layer], indexes: Sequence[Index]) -> None:
    owners: dict[str, tuple[Layer, str]] = {}
    faults = []
    for layer, index in zip(layers, indexes, strict=True):
        for entry in index.files:
            owner, digest = owners.setdefault(entry.path, (layer, entry.sha256))
            if digest != entry.sha256:
                names = f"{owner.name} {owner.version} and {layer.name} {layer.version}"
                faults.append(f"{entry.path}: in {names}")
    if faults:
        raise WheelError(
            f"{len(faults)} files are in two packages, with different content",
            hint="leave one of the packages out of the requirements, or pin versions that agree",
            context=faults,
        )


def _member(out: BinaryIO, name: str, data: bytes) -> None:
    out.write(member_header(name, len(data)) + data + bytes(padding(len(data))))


def _copy_layer(out: BinaryIO, store: Store, layer: Layer, index: Index) -> None:
    """Copy a layer, checking each frame on the way: a damaged store must not make a bundle."""
    out.write(member_header(layer.member, layer.size))
    with store.layer(layer.id).open("rb") as handle:
        out.write(handle.read(layer.head_size))
        for frame in index.frames:
            data = handle.read(frame.size)
            if hashlib.sha256(data).hexdigest() != frame.sha256:
                raise _damaged(store, layer, "a frame has changed on disk")
            out.write(data)
    out.write(bytes(padding(layer.size)))


def _damaged(store: Store, layer: Layer, why: str) -> BundleError:
    path = store.layer(layer.id)
    path.unlink(missing_ok=True)
    return BundleError(
        f"the stored layer of {layer.name} {layer.version} is damaged ({why}); it was removed",
        hint="run `stager build` again: only this layer is made anew",
        context=[str(path)],
    )
