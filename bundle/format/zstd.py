"""The zstd decompressor that travels in a bundle, or this Python's own."""

from __future__ import annotations

import ctypes
import importlib
import io
import os
import re
import struct
import sys
import zipfile
from collections.abc import Callable
from typing import IO

from ..protocol.problem import NodeError, Problem, ProblemCode
from ..system.own_program import short_version
from .layer import LayerError

_HEADER_SIZE, _64_LITTLE_ENDIAN = 64, b"\x7fELF\2\1"
_SEGMENTS_AT, _SECTIONS_AT, _SIZES_AT = 0x20, 0x28, 0x36
_SIZES, _SEGMENT = struct.Struct("<HHHHH"), struct.Struct("<II5Q8x")


def strip_unmapped_tail(library: IO[bytes]) -> bytes:
    """Return a shared library without debug information and section headers, which are not read.

    Loaders use the segments alone (elf(5)). One of an unusual shape is returned as it is.
    """
    head = library.read(_HEADER_SIZE)
    is_usual = len(head) == _HEADER_SIZE and (
        head.startswith(_64_LITTLE_ENDIAN)
        and struct.unpack_from("<Q", head, _SEGMENTS_AT) == (_HEADER_SIZE,)
        and _SIZES.unpack_from(head, _SIZES_AT)[0] == _SEGMENT.size
    )
    segments = _SIZES.unpack_from(head, _SIZES_AT)[:2] if is_usual else (0, 0)
    table = library.read(segments[0] * segments[1])
    if not is_usual or len(table) < segments[0] * segments[1]:
        return head + table + library.read()
    ends = [offset + length for _, _, offset, _, _, length, _ in _SEGMENT.iter_unpack(table)]
    whole = bytearray(head + table)
    whole += library.read(max(0, max(ends, default=0) - len(whole)))
    # No section headers, as in a library from which sstrip has removed them.
    struct.pack_into("<Q", whole, _SECTIONS_AT, 0)
    _SIZES.pack_into(whole, _SIZES_AT, *segments, 0, 0, 0)
    return bytes(whole)


# The cffi module of a zstandard wheel exports all of libzstd, for any Python.

Decompress = Callable[[bytes, int], bytes]  # of a zstd frame and its length; -1 for an index

_LIBRARY = re.compile(r"zstandard/_cffi\.[^/]*\.so")
_UNKNOWN, _NO_FRAME = (1 << 64) - 1, (1 << 64) - 2
"""``ZSTD_CONTENTSIZE_UNKNOWN`` and ``ZSTD_CONTENTSIZE_ERROR`` of zstd.h."""
_INDEX_LIMIT = 512 << 20


def load_decompressor(name: str, data: bytes | None, scratch: str) -> Decompress:
    """Return a zstd decompressor: that of a wheel, in ``scratch``, or this Python's own."""
    if data is None:
        return _standard_library_zstd()
    path = os.path.join(scratch, "zstd.so")
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as wheel:
            (member,) = filter(_LIBRARY.fullmatch, wheel.namelist())
            with wheel.open(member) as library, open(path, "wb") as file:
                file.write(strip_unmapped_tail(library))
        return _wrap_library(path)
    except Exception as exc:  # whatever the wheel holds
        reason = ascii(str(exc))[1:-1][:200] or type(exc).__name__
        values = {"how": "does not load", "name": name, "version": short_version(), "why": reason}
        raise NodeError(Problem(ProblemCode.DECOMPRESSOR_UNUSABLE, scratch, values)) from exc


def _wrap_library(path: str) -> Decompress:
    library = ctypes.CDLL(path)
    frame = (ctypes.c_char_p, ctypes.c_size_t)
    content_size = library.ZSTD_getFrameContentSize
    content_size.argtypes, content_size.restype = frame, ctypes.c_ulonglong
    frame_size = library.ZSTD_findFrameCompressedSize
    frame_size.argtypes, frame_size.restype = frame, ctypes.c_size_t
    decompress_to = library.ZSTD_decompress
    decompress_to.argtypes, decompress_to.restype = (*frame, *frame), ctypes.c_size_t
    new_bytes = ctypes.pythonapi.PyBytes_FromStringAndSize
    new_bytes.argtypes, new_bytes.restype = (ctypes.c_char_p, ctypes.c_ssize_t), ctypes.py_object

    def decompress(data: bytes, size: int) -> bytes:
        claimed = content_size(data, len(data))
        if claimed == _NO_FRAME:
            raise LayerError("a frame cannot be decompressed: it does not begin like one")
        _refuse_bomb(None if claimed == _UNKNOWN else claimed, size)
        if frame_size(data, len(data)) != len(data):
            raise LayerError("a frame is cut short, or something follows it")
        # A new object, filled before anybody else has it, as extension modules do: a buffer of
        # ctypes would be cleared before and copied after.
        content: bytes = new_bytes(None, claimed)
        if decompress_to(content, claimed, data, len(data)) != claimed:
            raise LayerError("a frame cannot be decompressed: it is damaged")
        return content

    return decompress


def _standard_library_zstd() -> Decompress:
    try:
        zstd = importlib.import_module("compression.zstd")
    except ImportError as exc:
        values = {"version": short_version()}
        raise NodeError(Problem(ProblemCode.NO_ZSTD, sys.executable, values)) from exc

    def decompress(data: bytes, size: int) -> bytes:
        try:
            _refuse_bomb(zstd.get_frame_info(data).decompressed_size, size)
            # One frame alone: ``zstd.decompress`` would go on with whatever follows it.
            decompressor = zstd.ZstdDecompressor()
            content: bytes = decompressor.decompress(data)
        except zstd.ZstdError as exc:
            raise LayerError(f"a frame cannot be decompressed: {exc}") from exc
        if not decompressor.eof or decompressor.unused_data:
            raise LayerError("a frame is cut short, or something follows it")
        return content

    return decompress


def _refuse_bomb(claimed: int | None, size: int) -> None:
    """Refuse a frame of unexpected length before any memory is allocated."""
    if claimed is None or claimed != (size if size >= 0 else min(claimed, _INDEX_LIMIT)):
        raise LayerError(f"a frame claims to hold {claimed} bytes")
