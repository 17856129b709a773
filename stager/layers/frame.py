"""One zstd frame of a layer: compressed, or stored as it is; and its content.

Weights of a model are nearly random numbers: bfloat16 shrinks by a quarter, float32 by a tenth,
quantized ones not at all, at a hundredth of the speed of a copy. A sample of the content decides,
not the name of a file. A frame that is stored is a zstd frame all the same (RFC 8878, section
3.1.1), of raw blocks, which every decoder copies.
"""

from __future__ import annotations

import struct

import zstandard

from bundle.format.layer import LayerError

SAMPLES = 8
"""Pieces of a frame's content that are tried."""
SAMPLE = 64 << 10
"""Bytes of each of them."""
PAYS = 0.9
"""The share of its size that a sample must at most keep when it is compressed."""
_MAGIC = 0xFD2FB528
_BLOCK = 128 << 10
"""The most that a block holds."""
_FULL_SIZE = 0xE0
"""Frame header descriptor: one segment, eight bytes of content size, no dictionary, no checksum."""


def pays(piece: bytes | bytearray) -> bool:
    """Return whether compressing shrinks a sample of the content enough."""
    if len(piece) <= SAMPLES * SAMPLE:
        return True  # it takes no time either way
    step = (len(piece) - SAMPLE) // (SAMPLES - 1)
    sample = b"".join(piece[i * step : i * step + SAMPLE] for i in range(SAMPLES))
    packed = zstandard.ZstdCompressor(level=1).compress(sample)
    return len(packed) <= PAYS * len(sample)


def stored(piece: bytes | bytearray) -> bytes:
    """Return a frame that holds the content as it is."""
    parts: list[bytes | bytearray] = [struct.pack("<IBQ", _MAGIC, _FULL_SIZE, len(piece))]
    starts = range(0, len(piece), _BLOCK) or range(1)
    for start in starts:
        block = piece[start : start + _BLOCK]
        last = start + _BLOCK >= len(piece)
        parts.append((len(block) << 3 | last).to_bytes(3, "little"))  # block type 0: raw
        parts.append(block)
    return b"".join(parts)


def content_of(frame: bytes, size: int) -> bytes:
    """Return the content of a frame, whatever length it claims to have.

    Raises:
        LayerError: it cannot be decompressed, or has another length.
    """
    content = bytearray()
    try:
        with zstandard.ZstdDecompressor().stream_reader(frame) as reader:
            while len(content) <= size and (piece := reader.read(size + 1 - len(content))):
                content += piece
    except zstandard.ZstdError as exc:
        raise LayerError(f"a frame cannot be decompressed: {exc}") from exc
    if len(content) != size:
        raise LayerError("a frame does not hold as much as its index says")
    return bytes(content)
