"""Readers of a job's files: its user alone, or also the group of the log directory.

Ranks may print secrets, so the caller's umask does not decide; what was there keeps its mode.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import Callable

from ..protocol.enumerations import LogMode

Opener = Callable[[str, int], int]  # the type of the ``opener`` of :func:`open`


def make_folder(path: str, mode: LogMode) -> None:
    """Make a directory, and those above it that are missing."""
    path = os.path.abspath(path)
    if os.path.isdir(path):
        return
    make_folder(os.path.dirname(path), mode)
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        if not os.path.isdir(path):
            raise
        return
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        _set_mode(handle, os.path.dirname(path), 0o750, mode)
    finally:
        os.close(handle)


def make_opener(mode: LogMode) -> Opener:
    """Return a function that opens a job's files for writing; a file that exists may be planted."""

    def open_file(path: str, flags: int) -> int:
        flags |= os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # a planted pipe would never open
        try:
            handle, is_new = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600), True
        except FileExistsError:
            if flags & os.O_EXCL:
                raise
            handle, is_new = os.open(path, flags & ~os.O_TRUNC), False
        try:
            folder = os.path.dirname(os.path.abspath(path))
            if is_new:
                _set_mode(handle, folder, 0o640, mode)
            else:
                _refuse_planted_file(os.fstat(handle), folder, path)
                if flags & os.O_TRUNC:
                    os.ftruncate(handle, 0)
        except BaseException:
            os.close(handle)
            raise
        return handle

    return open_file


def _refuse_planted_file(status: os.stat_result, folder: str, path: str) -> None:
    why = ""
    if not stat.S_ISREG(status.st_mode):
        why = "is not a regular file"
    # The directory's owner may replace it anyway; some servers make every file somebody else's.
    elif status.st_uid not in (os.geteuid(), os.stat(folder).st_uid):
        why = f"belongs to somebody else (uid {status.st_uid})"
    elif status.st_nlink > 1:
        why = "has another name elsewhere (a hard link)"
    if why:
        raise OSError(errno.EINVAL, why, path)


def _set_mode(handle: int, folder: str, bits: int, mode: LogMode) -> None:
    """Set the mode of a new file; only the directory's own group may ever read it, by ``bits``."""
    try:
        if mode != LogMode.GROUP:
            bits &= 0o700
        else:
            os.fchown(handle, -1, os.stat(folder).st_gid)
    except OSError:  # the user is not in that group: nobody else may read it
        bits &= 0o700
    os.fchmod(handle, bits)
