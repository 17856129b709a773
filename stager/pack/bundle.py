"""Joining layers, the node program and a decompressor into a thin bundle in the offline root."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from io import BufferedReader
from pathlib import Path
from typing import NamedTuple

from packaging.utils import parse_wheel_filename

from bundle.environment.listing import is_document
from bundle.format.archive import END
from bundle.format.layer import Frame, Index, LayerError, decode_head
from bundle.format.manifest import (
    MANIFEST_NAME,
    NODE_NAME,
    Layer,
    Manifest,
    Part,
    count_padding,
    member_header,
)
from bundle.protocol.counts import format_count
from bundle.protocol.dataclass import dataclass
from bundle.protocol.digest import Digest
from bundle.protocol.job import Requires

from ..core import elf
from ..core.errors import BundleError, WheelError
from ..core.files import BUNDLE_SUFFIX, open_regular, read_bytes, read_text
from ..core.store import Store, digest_file
from ..core.values import Target, Wheel, libc_version
from ..layers.layer_file import LayerTar, decompress_index
from ..layers.tree import list_folders
from .bundle_file import is_sealed, list_checked_files, seal
from .members import describe_layer, write_member
from .node_program import make_node_program

# --- The layers in the store: their heads and frames, each compared with its digest --------------

_PIECE = 1 << 20  # bytes that are read and hashed at a time: they stay in the processor's cache


@contextmanager
def _open_stored_layer(store: Store, layer: Layer) -> Iterator[BufferedReader]:
    path = store.layer(layer.id)
    try:
        with open_regular(path) as handle:
            yield handle
    except (LayerError, OSError) as exc:
        path.unlink(missing_ok=True)
        raise BundleError(
            f"the stored layer of {describe_layer(layer)} is damaged ({exc}); it has been removed",
            hint="run `stager build` again: only this layer is made again",
            context=[str(path)],
        ) from exc


def read_stored_head(store: Store, layer: Layer) -> tuple[bytes, Index]:
    """Return the head of a layer in the store, and the index in it."""
    with _open_stored_layer(store, layer) as handle:
        head = handle.read(layer.head_size)
        if Digest.of(head) != layer.head:
            raise LayerError("its index has changed on disk")
        return head, decode_head(head, decompress_index)


@contextmanager
def open_stored_tar(store: Store, layer: Layer) -> Iterator[LayerTar]:
    """Open the files in a layer of the store; one that is damaged is removed."""
    _, index = read_stored_head(store, layer)
    with _open_stored_layer(store, layer) as handle:

        def read(place: int, frame: Frame) -> bytes:
            handle.seek(place)
            return handle.read(frame.size)

        yield LayerTar(index, layer.head_size, read)


def check_frames(store: Store, layer: Layer, index: Index) -> None:
    """Read all frames of a layer, and compare their digests."""
    buffer = memoryview(bytearray(_PIECE))
    with _open_stored_layer(store, layer) as handle:
        handle.seek(layer.head_size)
        for frame in index.frames:
            digest, left = hashlib.sha256(), frame.size
            while left and (size := handle.readinto(buffer[: min(left, _PIECE)])):
                digest.update(buffer[:size])
                left -= size
            if digest.hexdigest() != frame.sha256:
                raise LayerError("a frame has changed on disk")
        if handle.read(1):
            raise LayerError("it is longer than its index says")


# --- The C library that wheels need: what their tags promise, and what their files ask for -------

# A tag is what a publisher says, the loader reads ``.gnu.version_r``: both count, as in auditwheel.

FILE_NAME = "shared-libraries.json"
_LIBRARY = re.compile(r"\.so(\.[^/]+)?$")
_SITE = re.compile(r"^lib/python[^/]+/site-packages/")
_NONE = (0, 0)


class LibcNeed(NamedTuple):
    """Something in a bundle that needs a C library."""

    version: tuple[int, int]  # the oldest version that it runs with; (0, 0) for any
    package: str  # the package with its version, ``numpy 2.4.1``
    because: str  # the file that needs it, or the tag that says so

    def __str__(self) -> str:
        return f"{self.package} ({self.because})"


class _Libraries(NamedTuple):
    major: int = 0
    minor: int = 0  # the oldest glibc with which all of them load; 0.0 for any
    file: str = ""  # the one that needs it

    @property
    def version(self) -> tuple[int, int]:
        return self.major, self.minor


def _read_tag_need(wheel: Wheel, newest: tuple[int, int]) -> LibcNeed:
    versions = []
    for tag in parse_wheel_filename(wheel.path.name)[3]:
        version = newest if tag.platform.startswith("linux_") else libc_version(tag.platform)
        if version is not None:
            versions.append((version, tag.platform))
    version, platform = min(versions, default=(_NONE, ""))
    return LibcNeed(version, f"{wheel.name} {wheel.version}", platform)


def list_file_needs(
    wheels: Sequence[Wheel],
    layers: Sequence[Layer],
    store: Store,
    target: Target,
    note: Callable[[str], None],
) -> tuple[LibcNeed, ...]:
    """Return each wheel's file that needs the newest C library; the store keeps the answers."""
    libc, newest = target.libc
    if libc != "glibc":
        return ()
    tags = {str(wheel.name): _read_tag_need(wheel, newest) for wheel in wheels}
    native = [layer for layer in layers if layer.kind == "wheel" and any(tags[layer.name].version)]
    libraries = _read_libraries(native, store, target)
    found = [(tags[layer.name].package, libraries[layer.id]) for layer in native]
    needs = [LibcNeed(own.version, package, own.file) for package, own in found if any(own.version)]
    _note_understated(needs, tags, newest, note)
    _refuse_newer(needs, target)
    return tuple(needs)


def _note_understated(
    needs: Sequence[LibcNeed],
    tags: Mapping[str, LibcNeed],
    newest: tuple[int, int],
    note: Callable[[str], None],
) -> None:
    promised = max((need.version for need in tags.values()), default=_NONE)
    for need in (one for one in needs if promised < one.version <= newest):
        tag = tags[need.package.split()[0]]
        note(
            f"{need} needs {_glibc(need.version)}, though its tag is {tag.because}: nodes with "
            "an older one are refused"
        )


def _refuse_newer(needs: Sequence[LibcNeed], target: Target) -> None:
    needs = [need for need in needs if need.version > target.libc[1]]
    if not needs:
        return
    newest = max(need.version for need in needs)
    platform = f"manylinux_{newest[0]}_{newest[1]}_{target.machine}"
    first = needs[0]
    raise WheelError(
        f"{format_count(len(needs), 'package')} cannot be loaded on {target.platform}: the "
        "libraries inside need a newer glibc, whatever the tags of the wheels say",
        hint=f'if all nodes have it, set environment.platform = "{platform}"; else pin another '
        "version, or leave out a library that no rank loads: environment.prune = "
        f'["{first.package.split()[0]}:/{first.because}"]',
        context=[f"{need.package} needs {_glibc(need.version)} ({need.because})" for need in needs],
    )


def _glibc(version: tuple[int, int]) -> str:
    return f"glibc {version[0]}.{version[1]}"


def _read_libraries(
    layers: Sequence[Layer], store: Store, target: Target
) -> Mapping[Digest, _Libraries]:
    known = _read_record(store)
    missing = [layer for layer in layers if layer.id not in known]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        found = pool.map(lambda layer: _inspect_libraries(layer, store, target.machine), missing)
        new = {layer.id: libraries for layer, libraries in zip(missing, found, strict=True)}
    if new:
        kept = {key: value for key, value in known.items() if store.layer(key).exists()}
        raw = {key: value._asdict() for key, value in (kept | new).items()}
        with store.publish(store.root / FILE_NAME) as unfinished:
            unfinished.write_text(json.dumps(raw, sort_keys=True, indent=0), encoding="utf-8")
    return {**known, **new}


def _read_record(store: Store) -> dict[Digest, _Libraries]:
    with suppress(OSError, ValueError, TypeError, AttributeError):
        raw = json.loads(read_text(store.root / FILE_NAME))
        return {Digest(key): _Libraries(**value) for key, value in raw.items()}
    return {}


def _inspect_libraries(layer: Layer, store: Store, machine: str) -> _Libraries:
    newest, file = _NONE, ""
    with open_stored_tar(store, layer) as tar:
        for entry in tar.index.files:
            if not _LIBRARY.search(entry.path):
                continue
            header = elf.parse(partial(tar.file, entry))
            if header is not None and header.machine == machine and header.glibc > newest:
                newest, file = header.glibc, _SITE.sub("", entry.path)
    return _Libraries(*newest, file)


@dataclass(frozen=True, kw_only=True)
class Contents:
    """Everything that goes into a bundle besides the files themselves."""

    name: str
    target: Target
    wheels: tuple[Wheel, ...]  # their tags decide what a node must have
    layers: tuple[Layer, ...]  # the layers, in the order in which they are stored
    decompressor: Wheel | None  # the zstandard wheel for the target; None if its Python has zstd
    packages: tuple[str, ...]
    imports: tuple[str, ...]
    bundled_glibc: tuple[int, int] | None = None  # None without a Python of its own
    files: tuple[LibcNeed, ...] = ()


class Packed(NamedTuple):
    """A bundle in the store."""

    path: Path
    manifest: Manifest
    reused: bool


def pack(contents: Contents, store: Store) -> Packed:
    """Write the bundle, unless the store has it already. The store's lock must be held."""
    node = make_node_program()
    manifest = _manifest(contents, node)
    path = bundle_path(store, manifest)
    if is_sealed(store, path, manifest):
        return Packed(path=path, manifest=manifest, reused=True)
    heads = [(layer, *read_stored_head(store, layer)) for layer in manifest.layers]
    _refuse_conflicts([(layer, index) for layer, _, index in heads])
    checked = list_checked_files(store, manifest)
    for layer, _, index in heads:
        if store.layer(layer.id).name not in checked:
            check_frames(store, layer, index)
    if contents.decompressor is not None:
        _keep(contents.decompressor, store, checked)
    store.require_space(manifest.thin_size, "the bundle")
    data = {MANIFEST_NAME: manifest.to_bytes(), NODE_NAME: node}
    data |= {layer.head_member: head for layer, head, _ in heads}
    with store.publish(path) as partial, partial.open("wb") as out:
        for name, content in data.items():
            write_member(out, name, len(content), (content,))
        out.write(END)
        for member in manifest.external_members:
            out.write(member_header(member.name, member.size) + bytes(count_padding(member.size)))
    seal(store, path, manifest, thin=True)
    return Packed(path=path, manifest=manifest, reused=False)


def _keep(decompressor: Wheel, store: Store, checked: Collection[str]) -> None:
    """Store the decompressor beside the layers: its wheel may be removed or changed."""
    path = store.layers / f"{decompressor.sha256}.whl"
    if path.name in checked:
        return
    with suppress(OSError):  # it is not there, or something else is
        if digest_file(path) == decompressor.sha256:
            return
    store.require_space(decompressor.size, "the bundle")
    with store.publish(path) as partial:
        partial.write_bytes(read_bytes(decompressor.path))


def bundle_path(store: Store, manifest: Manifest) -> Path:
    """Return the path of a bundle in the store."""
    return store.bundles / f"{manifest.name}-{manifest.id[:12]}{BUNDLE_SUFFIX}"


def make_requires(
    target: Target,
    wheels: Sequence[Wheel],
    bundled_glibc: tuple[int, int] | None = None,
    files: Sequence[LibcNeed] = (),
) -> Requires:
    """Return the requirements on a node: the newest C library that anything inside needs."""
    libc, newest = target.libc
    needs = [*files, *(_read_tag_need(wheel, newest) for wheel in wheels)]
    if bundled_glibc is not None:
        own, because = f"Python {target.python}", "which the bundle brings"
        needs.append(LibcNeed(bundled_glibc, own, because))
    greatest = max(needs, key=lambda need: need.version, default=LibcNeed(_NONE, "", ""))
    version = greatest.version
    return Requires(
        python=target.python,
        machine=target.machine,
        libc=libc,
        libc_version=f"{version[0]}.{version[1]}",
        libc_needed_by=str(greatest) if any(version) else "",
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
        requires=make_requires(
            contents.target, contents.wheels, contents.bundled_glibc, contents.files
        ),
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


def _refuse_conflicts(layers: Sequence[tuple[Layer, Index]]) -> None:
    owners: dict[str, tuple[Layer, str]] = {}
    faults = []
    for layer, index in layers:
        for entry in index.files:
            owner, digest = owners.setdefault(entry.path, (layer, entry.sha256))
            if digest != entry.sha256 and not is_document(entry.path):
                faults.append(
                    f"{entry.path}: in {describe_layer(owner)} and {describe_layer(layer)}"
                )
    for layer, index in layers:
        for path in sorted(list_folders(entry.path for entry in index.files) & owners.keys()):
            owner = owners[path][0]
            faults.append(
                f"{path}: a file in {describe_layer(owner)}, a directory in {describe_layer(layer)}"
            )
    if faults:
        raise WheelError(
            f"packages conflict: {format_count(len(faults), 'file')} of one would replace "
            "another's",
            hint="leave one of the packages out of the requirements, or pin versions that agree",
            context=faults,
        )
