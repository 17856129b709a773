"""The part of a shared library that the dynamic loader maps; the rest is not needed."""

from __future__ import annotations

import struct
from typing import IO

_HEADER = struct.Struct("<4sBB58x")
_MAGIC, _64_BIT, _LITTLE_ENDIAN = b"\x7fELF", 2, 1
_SEGMENTS_AT, _SECTIONS_AT = 0x20, 0x28
_SIZES = struct.Struct("<HHHHH")
_SIZES_AT = 0x36
_SEGMENT = struct.Struct("<II5Q8x")


def mapped(library: IO[bytes]) -> bytes:
    """Return a shared library without its tail of debug information and section headers.

    Loaders use the segments alone (elf(5): sections are for linking and for debuggers). Most of a
    library that was not stripped lies behind its last segment, and none of that is read here.

    Args:
        library: at its beginning; read in order, and no further than needed.

    Returns:
        All of it if it is not of the usual shape: 64 bits, little-endian, segments first.
    """
    head = library.read(_HEADER.size)
    if len(head) < _HEADER.size or _HEADER.unpack(head) != (_MAGIC, _64_BIT, _LITTLE_ENDIAN):
        return head + library.read()
    (start,) = struct.unpack_from("<Q", head, _SEGMENTS_AT)
    size, count, *_ = _SIZES.unpack_from(head, _SIZES_AT)
    if start != _HEADER.size or size != _SEGMENT.size:
        return head + library.read()
    table = library.read(size * count)
    if len(table) < size * count:
        return head + table
    ends = [offset + length for _, _, offset, _, _, length, _ in _SEGMENT.iter_unpack(table)]
    whole = bytearray(head + table)
    whole += library.read(max(0, max(ends, default=0) - len(whole)))
    # No section headers, as in a library from which sstrip has removed them.
    struct.pack_into("<Q", whole, _SECTIONS_AT, 0)
    segments = _SIZES.unpack_from(head, _SIZES_AT)[:2]
    _SIZES.pack_into(whole, _SIZES_AT, *segments, 0, 0, 0)
    return bytes(whole)
