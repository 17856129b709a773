"""The description of a bundle, and the layout of its bytes.

A bundle is one uncompressed tar. Its members, in this order::

    manifest.json            canonical JSON: the content of the bundle, and its id
    node.pyz                 the far side's program
    <decompressor>.whl       a zstandard wheel for the target, stored raw (absent where not needed)
    heads/<layer id>         one for each layer: the index of its files and frames
    layers/<layer id>.tar.zst    the frames of each layer, in the same order

All heads come before all frames: a node can place each frame as it comes. The manifest determines
the whole tar, headers and padding included; a reader compares each: no byte goes unchecked.

A *thin* bundle is a tar without the decompressor and the frames, which are in ``../layers/`` of its
directory; their headers and padding follow behind its end mark.

Digests form a tree: ``Manifest.id`` covers the manifest, the manifest each layer's head, a head its
origin, each compressed frame behind it and each file inside: parts of a layer can be checked
independently, in parallel.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import NamedTuple

from ..protocol.codec import decode
from ..protocol.dataclass import dataclass
from ..protocol.digest import Digest, canonical_json
from ..protocol.job import Requires, require_printable

FORMAT = 4  # version of the bundle's layout
MANIFEST_NAME = "manifest.json"
NODE_NAME = "node.pyz"
BLOCK = 512
PART_LIMIT = 64 << 20  # the largest member that is read whole, whatever a hostile bundle claims
HEAD_LIMIT = 256 << 20  # the same for the head of a layer
PYTHON = "python"  # the kind of the layer with a bundle's own Python
KINDS = ("wheel", "project", "trainer", "asset", PYTHON)

_SIZE_LIMIT = 1 << 60
_DISK_BLOCK = 4096
_LISTED = 64  # bytes that a file takes in the listing of an environment, generously
_OWN_BYTES, _OWN_INODES = 256 << 10, 96  # files that every environment has: hooks, links


class ManifestError(ValueError):
    """The manifest cannot be understood, or does not agree with itself."""


class FormatError(ManifestError):
    """The manifest is of another version of the layout."""

    def __init__(self, found: object) -> None:
        super().__init__(f"the bundle has format {found!r}; this program reads format {FORMAT}")
        self.found = found  # the version, or whatever is in its place


class StoredMember(NamedTuple):
    """A member that is not in the file of a thin bundle."""

    name: str
    size: int
    file: str  # the name of the file in the offline root that ends with it
    start: int  # where it begins there
    digest: Digest  # the digest in the manifest that its content follows from


@dataclass(frozen=True)
class Part:
    """A member that is stored as it is."""

    name: str
    sha256: Digest
    size: int


@dataclass(frozen=True)
class Layer:
    """One wheel, the project, the trainer, an asset or a Python, as a compressed tar."""

    id: Digest  # digest of the layer's origin; known before the layer is built
    kind: str  # one of :data:`KINDS`
    name: str  # the distribution's normalized name, or the project's or asset's
    version: str  # the distribution's or the interpreter's version; empty for the other kinds
    head: Digest  # digest of the first ``head_size`` bytes, which hold the index of all the rest
    head_size: int  # length in bytes of the head
    size: int  # length in bytes of the whole layer, head included
    unpacked_size: int  # sum in bytes of the files inside
    files: int

    @property
    def member(self) -> str:
        """The name of its frames in the outer tar."""
        return f"layers/{self.id}.tar.zst"

    @property
    def head_member(self) -> str:
        """The name of its head in the outer tar."""
        return f"heads/{self.id}"

    @property
    def members(self) -> tuple[tuple[str, int], tuple[str, int]]:
        """Name and size in bytes of its head and of its frames in the outer tar."""
        return (self.head_member, self.head_size), (self.member, self.size - self.head_size)


@dataclass(frozen=True)
class Manifest:
    """Everything that a node must know about a bundle."""

    name: str
    requires: Requires
    node: Part
    decompressor: Part | None  # the zstandard wheel; None where the target's Python has zstd
    layers: tuple[Layer, ...]  # in the order of their storing; the first writes equal paths
    packages: tuple[str, ...]  # those asked for by the user, which a probe reports
    imports: tuple[str, ...]  # modules that must import on every node
    format: int = FORMAT

    @functools.cached_property  # it takes milliseconds
    def id(self) -> Digest:
        """The bundle's identity: the digest of all the fields above."""
        return Digest.of(canonical_json(asdict(self)))

    @functools.cached_property
    def _bytes(self) -> bytes:
        return canonical_json({**asdict(self), "id": self.id})

    @property
    def unpacked_size(self) -> int:
        """Sum in bytes of the files of all layers."""
        return sum(layer.unpacked_size for layer in self.layers)

    @property
    def files(self) -> int:
        """Number of files in all layers."""
        return sum(layer.files for layer in self.layers)

    @property
    def size(self) -> int:
        """Length in bytes of the bundle, as one file."""
        return sum(BLOCK + size + count_padding(size) for _, size in self.members()) + 2 * BLOCK

    @property
    def thin_size(self) -> int:
        """Length in bytes of the file of a thin bundle."""
        return self.size - sum(member.size for member in self.external_members)

    @property
    def external_members(self) -> list[StoredMember]:
        """The members that a thin bundle does not have in its file, in order."""
        part, members = self.decompressor, []
        if part is not None:
            file = f"{part.sha256}.whl"
            members.append(StoredMember(part.name, part.size, file, 0, part.sha256))
        for layer in self.layers:
            _, (name, size) = layer.members
            file = name.rpartition("/")[2]
            members.append(StoredMember(name, size, file, layer.head_size, layer.head))
        return members

    def to_bytes(self) -> bytes:
        """Return the content of ``manifest.json``."""
        return self._bytes

    def members(self) -> list[tuple[str, int]]:
        """Return name and size of every member of the outer tar, in order."""
        parts = [part for part in (self.node, self.decompressor) if part is not None]
        return [
            (MANIFEST_NAME, len(self.to_bytes())),
            *((part.name, part.size) for part in parts),
            *(layer.members[0] for layer in self.layers),
            *(layer.members[1] for layer in self.layers),
        ]


@functools.lru_cache(maxsize=1)
def parse(data: bytes) -> Manifest:
    """Read ``manifest.json``, or raise ManifestError; the last one is remembered."""
    try:
        raw = json.loads(data)
        claimed = raw.pop("id")
        version = raw["format"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
        raise ManifestError("manifest.json is not a stager manifest") from exc
    if version != FORMAT:
        raise FormatError(version)
    try:
        manifest = decode(Manifest, raw)
        _check(manifest)
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise ManifestError(f"manifest.json does not have the expected fields: {exc}") from exc
    if manifest.id != claimed or manifest.to_bytes() != data:
        raise ManifestError("manifest.json has been changed: its content does not fit its id")
    return manifest


def member_header(name: str, size: int, mode: int = 0o644) -> bytes:
    """Return the tar header of a file: POSIX ustar (IEEE Std 1003.1); GNU's size from 8 GiB on."""
    if len(name.encode()) > 100:
        raise ManifestError(f"member name is longer than 100 bytes: {name}")
    number = b"%011o\0" % size if size < 8**11 else b"\x80" + size.to_bytes(11, "big")
    start = name.encode().ljust(100, b"\0") + b"%07o\0" % mode + b"0000000\0" * 2 + number
    start += b"00000000000\0"
    end = b"0".ljust(101, b"\0") + b"ustar\x0000".ljust(72, b"\0") + b"0000000\0" * 2 + bytes(167)
    return start + b"%06o\0 " % sum(start + b" " * 8 + end) + end


def estimate_room(layers: Sequence[Layer], whole: Manifest | None = None) -> tuple[int, int]:
    """Return bytes and inodes of layers in whole blocks; with ``whole``, its own files as well."""
    files = sum(layer.files + 1 for layer in layers)  # each keeps its head
    size = sum(layer.unpacked_size + layer.head_size for layer in layers)
    inodes = files + files // 4
    if whole is not None:
        if whole.decompressor is not None:
            # The wheel is kept, and loaded from a copy of its program, which is the smaller half.
            size += whole.decompressor.size + whole.decompressor.size // 2
        size += len(whole.to_bytes()) + whole.files * _LISTED + _OWN_BYTES
        inodes += _OWN_INODES
    return size + files * _DISK_BLOCK // 2, inodes


def count_padding(size: int) -> int:
    """Return the number of zero bytes after a member of this size, up to the next full block."""
    return -size % BLOCK


def _check(manifest: Manifest) -> None:
    # They become file names, offsets and memory sizes.
    for value in (manifest.name, *manifest.packages, *manifest.imports):
        require_printable(value, "name, packages or imports")
    for part in filter(None, (manifest.node, manifest.decompressor)):
        if "/" in require_printable(part.name, "a part's name") or not part.name:
            raise ValueError(f"a part is called {part.name!r}")
        _check_size(part.size, PART_LIMIT, part.name)
    for layer in manifest.layers:
        _check_layer(layer)
    has_python = any(layer.kind == PYTHON for layer in manifest.layers)
    if manifest.requires.bundled_python != has_python:
        raise ValueError("requires.bundled_python does not fit the layers")
    names = [name for name, _ in manifest.members()]
    if len(set(names)) != len(names):
        raise ValueError("two members have the same name")


def _check_layer(layer: Layer) -> None:
    require_printable(layer.name, "a layer's name")
    require_printable(layer.version, "a layer's version")
    if layer.kind not in KINDS:
        raise ValueError(f"{layer.name} is a layer of kind {layer.kind!r}")
    for size in (layer.size, layer.unpacked_size, layer.files):
        _check_size(size, _SIZE_LIMIT, layer.name)
    _check_size(layer.head_size, min(layer.size, HEAD_LIMIT), layer.name)


def _check_size(value: int, limit: int, what: str) -> None:
    if not 0 <= value <= limit:
        raise ValueError(f"{what} has an impossible size, {value!r}")
