"""Reading regular files only: reading a pipe or a device might never end."""

from __future__ import annotations

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path

_READING = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC


def opened(path: Path, *, unnoticed: bool = False) -> BufferedReader:
    """Open a regular file; a pipe would keep a reader waiting, a device may do anything.

    Args:
        path: the file.
        unnoticed: True to leave its access time as it is, where the file is one's own.

    Raises:
        OSError: there is none, or it cannot be read.
    """
    handle = _unnoticed(path) if unnoticed else os.open(path, _READING)
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        os.close(handle)
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        raise OSError(errno.EINVAL, "is not a regular file", str(path))
    return os.fdopen(handle, "rb")


def _unnoticed(path: Path) -> int:
    try:
        return os.open(path, _READING | os.O_NOATIME)
    except PermissionError:  # it is somebody else's: open(2)
        return os.open(path, _READING)


def bytes_of(path: Path) -> bytes:
    """Read a regular file.

    Raises:
        OSError: see :func:`opened`.
    """
    with opened(path) as handle:
        return handle.read()


def text_of(path: Path) -> str:
    """Read a regular file of UTF-8.

    Raises:
        OSError: see :func:`opened`.
        UnicodeDecodeError: it is none.
    """
    return bytes_of(path).decode("utf-8")
