"""The head of a layer, from which one learns what is in it before a byte of it is used.

It is a *skippable* zstd frame (RFC 8878, section 3.1.2), so ``zstd -d < layer | tar -t`` works. Its
content is a few numbers, the layer's origin as canonical JSON, and then the compressed index. The
origin describes the layer's source and options; the layer's id is its digest, so no layer can lie
under the id of another.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

from ..protocol.digest import canonical_json
from .layer import Entry, Frame, Index, LayerError, Link, check_index
from .layer_origin import ORIGIN_LIMIT, Origin, parse

INDEX_FORMAT = 2
_SKIPPABLE = 0x184D2A50
_FRAME_HEADER = 8
_HEAD = struct.Struct("<IIQQQI")
HEAD_PREFIX = _HEAD.size
"""Bytes that :func:`head_summary` needs."""


class HeadSummary(NamedTuple):
    """The lengths in the first bytes of a layer, which are not compressed."""

    head_size: int
    """Length in bytes of the head."""
    size: int
    """Length in bytes of the whole layer."""
    unpacked_size: int
    """Sum in bytes of the files inside."""
    files: int
    """Number of files inside."""
    origin_size: int
    """Length in bytes of the origin, which follows these numbers."""


def encode_head(index: Index, origin: Origin, compress: Callable[[bytes], bytes]) -> bytes:
    """Return the skippable frame that opens a layer."""
    origin_data = origin.to_bytes()
    body = compress(
        canonical_json(
            {
                "format": INDEX_FORMAT,
                "files": index.files,
                "links": index.links,
                "frames": index.frames,
            }
        )
    )
    head_size = _HEAD.size + len(origin_data) + len(body)
    total = head_size + sum(frame.size for frame in index.frames)
    counts = (index.unpacked_size, len(index.files), len(origin_data))
    return _HEAD.pack(_SKIPPABLE, head_size - _FRAME_HEADER, total, *counts) + origin_data + body


def head_summary(prefix: bytes) -> HeadSummary:
    """Read the lengths from the first ``HEAD_PREFIX`` bytes of a layer.

    Raises:
        LayerError: these are not the first bytes of a layer.
    """
    if len(prefix) < HEAD_PREFIX:
        raise LayerError("the layer is cut short")
    magic, frame_size, total, unpacked_size, files, origin_size = _HEAD.unpack_from(prefix)
    if magic != _SKIPPABLE:
        raise LayerError("the layer does not begin with an index")
    head_size = _FRAME_HEADER + frame_size
    if origin_size > min(ORIGIN_LIMIT, head_size - HEAD_PREFIX):
        raise LayerError("the layer does not say what it was made from")
    return HeadSummary(head_size, total, unpacked_size, files, origin_size)


def origin_of(head: bytes) -> Origin:
    """Return the origin in a layer's head.

    Raises:
        LayerError: there is none.
    """
    data = head[HEAD_PREFIX : HEAD_PREFIX + head_summary(head).origin_size]
    try:
        return parse(data)
    except ValueError as exc:
        raise LayerError(f"the layer does not say what it was made from: {exc}") from exc


def packed_index(head: bytes) -> bytes:
    """Return the compressed index in a layer's head.

    Raises:
        LayerError: these bytes are not a head.
    """
    return head[HEAD_PREFIX + head_summary(head).origin_size :]


def decode_head(
    head: bytes, decompress: Callable[[bytes], bytes], *, checked: bool = False
) -> Index:
    """Read a head whose digest has been checked, and refuse paths that leave the environment.

    Args:
        head: the first ``head_size`` bytes of a layer.
        decompress: turns one zstd frame into its content.
        checked: True if these very bytes have been read, and not refused, before.

    Raises:
        LayerError: these bytes are not a head, or name unsafe paths, modes or sizes.
    """
    summary = head_summary(head)
    if summary.head_size != len(head):
        raise LayerError("the layer's index is cut short")
    try:
        index = _index_from(json.loads(decompress(packed_index(head))))
        if not checked:
            check_index(index)
    except LayerError:
        raise
    except (ValueError, KeyError, TypeError, RecursionError) as exc:
        raise LayerError(f"the layer's index cannot be read: {exc}") from exc
    if (index.unpacked_size, len(index.files)) != (summary.unpacked_size, summary.files):
        raise LayerError("the layer's index does not agree with its summary")
    return index


def _index_from(raw: dict[str, Any]) -> Index:
    """Build an index whose fields may still have values of any type."""
    if raw["format"] != INDEX_FORMAT:
        raise LayerError(f"the layer has index format {raw['format']!r}, not {INDEX_FORMAT}")
    if not all(isinstance(raw[key], list) for key in ("files", "links", "frames")):
        raise TypeError("files, links and frames are lists")
    return Index(
        files=tuple(map(Entry._make, raw["files"])),
        links=tuple(map(Link._make, raw["links"])),
        frames=tuple(map(Frame._make, raw["frames"])),
    )
