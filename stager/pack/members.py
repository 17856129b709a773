"""The members of a bundle, each byte checked against the manifest while it is copied."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Protocol

from bundle.format.archive import END, BundleFile
from bundle.format.layer import Index, LayerError, decode_head, origin_of
from bundle.format.manifest import MANIFEST_NAME, Layer, Manifest, member_header, padding
from bundle.protocol.digest import Digest

from ..core.errors import BundleError
from ..layers.layer_file import content_of, decompress_index

Read = Callable[[int], bytes]
"""Returns the next bytes of a member, as many as are asked for."""


class Writable(Protocol):
    """A file, or what counts what is written to one."""

    def write(self, data: bytes, /) -> object:
        """Write all of it."""


class MemberError(Exception):
    """A member is not what the manifest says; its text says which, and why."""


class CheckedMembers:
    """Checks members in the bundle's order: the head of a layer tells what its frames must be."""

    def __init__(self, manifest: Manifest, *, files: bool = False) -> None:
        """``files`` checks each file, too: frame digests do not prove that the index is true."""
        self.manifest = manifest
        self._compare_files = files
        self._layers = {name: layer for layer in manifest.layers for name, _ in layer.members}
        self._parts = {part.name: part for part in (manifest.node, manifest.decompressor) if part}
        self._indexes: dict[str, Index] = {}
        """By the name of the member that holds the frames."""

    def pieces(self, name: str, read: Read) -> Iterator[bytes]:
        """Yield the content of a member, each piece once it is known to be right.

        Raises:
            MemberError: it is damaged, or another build's.
        """
        if name == MANIFEST_NAME:
            yield self._whole(name, read, self.manifest.to_bytes())
        elif name in self._parts:
            part = self._parts[name]
            yield self._digested(name, read(part.size), part.sha256)
        elif name == self._layers[name].head_member:
            yield self._head(self._layers[name], read)
        else:
            yield from self._of_frames(_called(self._layers[name]), self._indexes[name], read)

    def _of_frames(self, name: str, index: Index, read: Read) -> Iterator[bytes]:
        files = _Files(index)
        try:
            for frame in index.frames:
                data = self._digested(name, read(frame.size), frame.sha256)
                if self._compare_files:
                    files.compare(content_of(data, frame.unpacked_size))
                yield data
        except LayerError as exc:
            raise MemberError(f"{name}: {exc}") from exc

    def _whole(self, name: str, read: Read, expected: bytes) -> bytes:
        data = read(len(expected))
        if data != expected:
            raise MemberError(f"{name} is another one")
        return data

    def _digested(self, name: str, data: bytes, expected: str) -> bytes:
        if hashlib.sha256(data).hexdigest() != expected:
            raise MemberError(f"{name} does not have the digest that it must have")
        return data

    def _head(self, layer: Layer, read: Read) -> bytes:
        name = _called(layer)
        head = self._digested(name, read(layer.head_size), layer.head)
        try:
            index = decode_head(head, decompress_index)
            if Digest(origin_of(head).id) != layer.id:
                raise LayerError("it was made from something else")
        except LayerError as exc:
            raise MemberError(f"{name}: {exc}") from exc
        if sum(frame.size for frame in index.frames) != layer.size - layer.head_size:
            raise MemberError(f"{name}: its frames do not add up to its size")
        self._indexes[layer.member] = index
        return head


class _Files:
    """Compare the files of a layer with their digests while its frames are read."""

    def __init__(self, index: Index) -> None:
        self._waiting = deque(index.files)  # in the order in which they lie there
        self._digest = hashlib.sha256()
        self._start = 0

    def compare(self, content: bytes) -> None:
        """Compare the next frame; LayerError if a file that ends in it has another digest."""
        end = self._start + len(content)
        while self._waiting and self._waiting[0].offset < end:
            entry = self._waiting[0]
            begin = max(entry.offset - self._start, 0)
            self._digest.update(content[begin : entry.offset + entry.size - self._start])
            if entry.offset + entry.size > end:
                break
            if self._digest.hexdigest() != entry.sha256:
                raise LayerError(f"{entry.path} does not have the digest in the index")
            self._waiting.popleft()
            self._digest = hashlib.sha256()
        self._start = end


def refuse_damage(bundle: BundleFile) -> None:
    """Read all of a bundle, and compare each byte with what its id says it must be.

    Raises:
        MemberError: it is damaged.
        NodeError: it cannot be read.
    """
    members = CheckedMembers(bundle.manifest)
    for name, _ in bundle.manifest.members():
        for _ in members.pieces(name, reader(bundle, name)):
            pass


def write_member(out: Writable, name: str, size: int, pieces: Iterable[bytes]) -> None:
    """Write one member of a tar."""
    out.write(member_header(name, size))
    for piece in pieces:
        out.write(piece)
    out.write(bytes(padding(size)))


def write_members(bundle: BundleFile, out: Writable, left_out: Collection[str] = ()) -> None:
    """Write a bundle's members, each byte of them checked, and the end of a tar.

    Raises:
        BundleError: it is damaged.
        NodeError: it cannot be read.
    """
    members = CheckedMembers(bundle.manifest)
    try:
        for name, size in bundle.manifest.members():
            if name in left_out:
                continue
            write_member(out, name, size, members.pieces(name, reader(bundle, name)))
    except MemberError as exc:
        raise BundleError(
            f"{bundle.path} is damaged: {exc}", hint="make it again with `stager build`"
        ) from exc
    out.write(END)


def reader(bundle: BundleFile, name: str) -> Read:
    """Return what reads a member of an open bundle from its beginning.

    It raises NodeError where the bundle cannot be read.
    """
    place = bundle.offset(name)

    def read(size: int) -> bytes:
        nonlocal place
        place += size
        return bundle.read(place - size, size)

    return read


def _called(layer: Layer) -> str:
    return f"{layer.name} {layer.version}".strip()
