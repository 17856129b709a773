"""The layers in the store: their heads and frames, each compared with its digest."""

from __future__ import annotations

import hashlib

from bundle.format.layer import Index, LayerError, decode_head
from bundle.format.manifest import Layer
from bundle.protocol.digest import Digest

from ..core.errors import BundleError
from ..core.files import opened
from ..core.store import Store
from ..layers.layer_file import decompress_index

_PIECE = 1 << 20
"""Bytes that are read and hashed at a time: they stay in the processor's cache."""


def stored_index(store: Store, layer: Layer) -> Index:
    """Return the index of a layer in the store.

    Raises:
        BundleError: it is damaged; it has been removed.
    """
    return index_of(store, layer, stored_head(store, layer))


def stored_head(store: Store, layer: Layer) -> bytes:
    """Return the head of a layer in the store.

    Raises:
        BundleError: it is damaged; it has been removed.
    """
    try:
        with opened(store.layer(layer.id)) as handle:
            head = handle.read(layer.head_size)
    except OSError as exc:
        raise damaged(store, layer, str(exc)) from exc
    if Digest.of(head) != layer.head:
        raise damaged(store, layer, "its index has changed on disk")
    return head


def index_of(store: Store, layer: Layer, head: bytes) -> Index:
    """Return the index in a layer's head.

    Raises:
        BundleError: it is damaged; it has been removed.
    """
    try:
        return decode_head(head, decompress_index)
    except LayerError as exc:
        raise damaged(store, layer, str(exc)) from exc


def named(layer: Layer) -> str:
    """Return a layer's name for a message."""
    return f"{layer.name} {layer.version}".strip()


def check_frames(store: Store, layer: Layer, index: Index) -> None:
    """Read all frames of a layer, and compare their digests.

    Raises:
        BundleError: one is damaged; the layer has been removed.
    """
    buffer = memoryview(bytearray(_PIECE))
    try:
        with opened(store.layer(layer.id)) as handle:
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
    except (LayerError, OSError) as exc:
        raise damaged(store, layer, str(exc)) from exc


def damaged(store: Store, layer: Layer, why: str) -> BundleError:
    """Remove a layer from the store; return the error that says so."""
    path = store.layer(layer.id)
    path.unlink(missing_ok=True)
    return BundleError(
        f"the stored layer of {named(layer)} is damaged ({why}); it has been removed",
        hint="run `stager build` again: only this layer is made again",
        context=[str(path)],
    )
