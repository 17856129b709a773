"""The members of a bundle, each byte checked against the manifest while it is copied."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator

from bundle.format.archive import BundleFile
from bundle.format.layer import LayerError
from bundle.format.layer_head import decode_head, origin_of
from bundle.format.manifest import MANIFEST_NAME, Layer, Manifest
from bundle.protocol.digest import Digest

from ..layers.layer_file import decompress_index

Read = Callable[[int], bytes]
"""Returns the next bytes of a member, as many as are asked for."""


class MemberError(Exception):
    """A member is not what the manifest says; its text says which, and why."""


class CheckedMembers:
    """Checks members in the bundle's order: the head of a layer tells what its frames must be."""

    def __init__(self, manifest: Manifest) -> None:
        """Take what the members are compared with."""
        self.manifest = manifest
        self._layers = {name: layer for layer in manifest.layers for name, _ in layer.members}
        self._parts = {part.name: part for part in (manifest.node, manifest.decompressor) if part}
        self._frames: dict[str, tuple[tuple[int, str], ...]] = {}
        """Size and digest of each frame, by the name of the member that holds them."""

    def pieces(self, name: str, read: Read) -> Iterator[bytes]:
        """Yield the content of a member, each piece once it is known to be right.

        Args:
            name: the member's name in the bundle.
            read: reads it from its beginning.

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
            for size, digest in self._frames[name]:
                yield self._digested(_called(self._layers[name]), read(size), digest)

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
        frames = tuple((frame.size, frame.sha256) for frame in index.frames)
        if sum(size for size, _ in frames) != layer.size - layer.head_size:
            raise MemberError(f"{name}: its frames do not add up to its size")
        self._frames[layer.member] = frames
        return head


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
