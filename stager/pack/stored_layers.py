"""The layers in the store: their heads and frames, each compared with its digest."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from bundle.format.layer import Index, LayerError
from bundle.format.layer_head import decode_head
from bundle.format.manifest import Layer
from bundle.protocol.digest import Digest

from ..core.errors import BundleError
from ..core.regular_files import opened
from ..core.store import Store
from ..layers.layer_file import decompress_index

_AHEAD = 2
"""Frames that are hashed while one is written."""


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


def checked_frames(store: Store, layer: Layer, index: Index) -> Iterator[bytes]:
    """Yield a layer's frames, each checked: a damaged store must not make a bundle.

    While one is written, others are hashed by threads of their own.
    """
    waiting: deque[tuple[bytes, Future[bool]]] = deque()
    try:
        with opened(store.layer(layer.id)) as handle, ThreadPoolExecutor(_AHEAD) as pool:
            handle.seek(layer.head_size)
            for frame in index.frames:
                data = handle.read(frame.size)
                waiting.append((data, pool.submit(_is_sound, data, frame.sha256)))
                if len(waiting) > _AHEAD:
                    yield _sound(waiting)
            while waiting:
                yield _sound(waiting)
    except (LayerError, OSError) as exc:
        raise damaged(store, layer, str(exc)) from exc


def _is_sound(data: bytes, sha256: str) -> bool:
    return hashlib.sha256(data).hexdigest() == sha256


def _sound(waiting: deque[tuple[bytes, Future[bool]]]) -> bytes:
    """Return the first frame once it has been compared with its digest.

    Raises:
        LayerError: it differs.
    """
    data, sound = waiting.popleft()
    if not sound.result():
        raise LayerError("a frame has changed on disk")
    return data


def damaged(store: Store, layer: Layer, why: str) -> BundleError:
    """Remove a layer from the store; return the error that says so."""
    path = store.layer(layer.id)
    path.unlink(missing_ok=True)
    return BundleError(
        f"the stored layer of {named(layer)} is damaged ({why}); it has been removed",
        hint="run `stager build` again: only this layer is made again",
        context=[str(path)],
    )
