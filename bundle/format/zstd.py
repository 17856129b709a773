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
from ..system.own_program import loads_modules_for, short_version
from .layer import LayerError

# --- The part of a shared library that the dynamic loader maps; the rest is not needed -----------

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


# --- The zstd library inside a zstandard wheel for another version of Python ---------------------

# The wheel's cffi module contains all of libzstd, and exports its functions, which know nothing of
# Python. So any Python can call them, one that could not import the module included.

_CFFI = re.compile(r"zstandard/_cffi\.[^/]*\.so")
_UNKNOWN, _NO_FRAME = (1 << 64) - 1, (1 << 64) - 2
"""``ZSTD_CONTENTSIZE_UNKNOWN`` and ``ZSTD_CONTENTSIZE_ERROR`` of zstd.h."""
_FOR = re.compile(r"-cp(\d)(\d+)-")


class ZstdError(ValueError):
    """A frame is damaged, cut short, or followed by something."""


def is_library(member: str) -> bool:
    """Return True for the member of a zstandard wheel that has the library."""
    return _CFFI.fullmatch(member) is not None


def python_of(wheel: str) -> str:
    """Return the version of CPython that a wheel is for, from its name; empty for any other."""
    named = _FOR.search(wheel)
    return f"{named[1]}.{named[2]}" if named else ""


class ForeignZstd:
    """The functions of the library that are needed here."""

    def __init__(self, path: str) -> None:
        """Load the library.

        Raises:
            OSError: it does not load here.
            AttributeError: it does not export the functions.
        """
        library = ctypes.CDLL(path)
        frame = (ctypes.c_char_p, ctypes.c_size_t)
        self._claimed = library.ZSTD_getFrameContentSize
        self._claimed.argtypes, self._claimed.restype = frame, ctypes.c_ulonglong
        self._length = library.ZSTD_findFrameCompressedSize
        self._length.argtypes, self._length.restype = frame, ctypes.c_size_t
        self._decompress = library.ZSTD_decompress
        self._decompress.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *frame]
        self._decompress.restype = ctypes.c_size_t

    def claimed_size(self, frame: bytes) -> int | None:
        """Return the length of the content as a frame has it; None if it does not say.

        Raises:
            ZstdError: it is no frame.
        """
        size: int = self._claimed(frame, len(frame))
        if size == _NO_FRAME:
            raise ZstdError("it does not begin like one")
        return None if size == _UNKNOWN else size

    def decompress(self, frame: bytes, size: int) -> bytes:
        """Return the content of one frame.

        Raises:
            ZstdError: it is damaged, cut short, or something follows it.
        """
        if self._length(frame, len(frame)) != len(frame):
            raise ZstdError("it is cut short, or something follows it")
        content = ctypes.create_string_buffer(max(1, size))
        if self._decompress(content, size, frame, len(frame)) != size:
            raise ZstdError("it is damaged")
        return content.raw[:size]


# --- The zstd decompressor that travels in a bundle, or this Python's own ------------------------

Decompress = Callable[[bytes, int], bytes]
"""Turns one zstd frame into its content, which must have the given length; -1 for an index."""

_INDEX_LIMIT = 512 << 20


def load_decompressor(name: str, data: bytes | None, scratch: str) -> Decompress:
    """Return a zstd decompressor: the one that travels in a bundle, or this Python's own.

    Args:
        name: the zstandard wheel's name.
        data: the wheel, its digest checked; None for this Python's own.
        scratch: a private directory for the compiled module; it must exist while that is used.

    Raises:
        NodeError: it does not load here.
    """
    if data is None:
        return _standard_library_zstd()
    version = python_of(name)
    if version and not loads_modules_for(version):
        return _foreign_zstd(name, data, scratch)
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as wheel:
            _extract(wheel, scratch)
        sys.path.insert(0, scratch)
        try:
            zstandard = importlib.import_module("zstandard")
        finally:
            sys.path.remove(scratch)
        decompressor = zstandard.ZstdDecompressor()
        frame_error, claimed_size = zstandard.ZstdError, zstandard.frame_content_size
        isinstance(None, frame_error)  # it has to be a class
    except (Exception, SystemExit) as exc:  # the code of that wheel runs here
        raise NodeError(_unusable(name, scratch, "does not load", exc)) from exc

    def decompress(data: bytes, size: int) -> bytes:
        try:
            _refuse_bomb(claimed_size(data), size)
            content: bytes = decompressor.decompress(data, allow_extra_data=False)
        except LayerError:
            raise
        except (Exception, SystemExit) as exc:
            if isinstance(exc, frame_error):
                raise LayerError(f"a frame cannot be decompressed: {exc}") from exc
            raise NodeError(_unusable(name, scratch, "does not work", exc)) from exc
        if not isinstance(content, bytes):
            why = TypeError(f"it made a {type(content).__name__} of a frame")
            raise NodeError(_unusable(name, scratch, "does not work", why))
        return content

    return decompress


def _foreign_zstd(name: str, data: bytes, scratch: str) -> Decompress:
    """Return the decompressor of a wheel for another Python, which the bundle has."""
    path = os.path.join(scratch, "zstd.so")
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as wheel:
            (member,) = filter(is_library, wheel.namelist())
            with wheel.open(member) as library, open(path, "wb") as file:
                file.write(mapped(library))
        zstd = ForeignZstd(path)
    except Exception as exc:  # whatever the wheel holds
        raise NodeError(_unusable(name, scratch, "does not load", exc)) from exc

    def decompress(data: bytes, size: int) -> bytes:
        try:
            claimed = zstd.claimed_size(data)
            _refuse_bomb(claimed, size)
            return zstd.decompress(data, claimed or 0)
        except ZstdError as exc:
            raise LayerError(f"a frame cannot be decompressed: {exc}") from exc

    return decompress


def _unusable(name: str, where: str, how: str, exc: BaseException) -> Problem:
    reason = ascii(str(exc))[1:-1][:200] or type(exc).__name__
    values = {"how": how, "name": name, "version": short_version(), "why": reason}
    return Problem(ProblemCode.DECOMPRESSOR_UNUSABLE, where, values)


def _extract(wheel: zipfile.ZipFile, scratch: str) -> None:
    """Write the 5 % that an import needs: no cffi backend, and no debug information."""
    names = [name for name in wheel.namelist() if name.startswith("zstandard/")]
    wheel.extractall(scratch, [name for name in names if name.endswith(".py")])
    for name in names:
        if not name.endswith(".so") or "/_cffi" in name:
            continue
        target = os.path.join(scratch, "zstandard", os.path.basename(name))
        with wheel.open(name) as library, open(target, "wb") as file:
            file.write(mapped(library))


def _standard_library_zstd() -> Decompress:
    """Return the decompressor of Python 3.14 and later (PEP 784)."""
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
    if not _is_expected(claimed, size):
        raise LayerError(f"a frame claims to hold {claimed} bytes")


def _is_expected(claimed: int | None, size: int) -> bool:
    """Return True if a frame claims to have the given length, or that of any index for -1."""
    if size >= 0:
        return claimed == size
    return claimed is not None and 0 <= claimed <= _INDEX_LIMIT
