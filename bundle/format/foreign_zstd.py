"""The zstd library inside a zstandard wheel for another version of Python.

The wheel's cffi module contains all of libzstd, and exports its functions, which know nothing of
Python. So any Python can call them, one that could not import the module included.
"""

from __future__ import annotations

import ctypes
import re

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
