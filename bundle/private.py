"""Who may read what a job leaves: its user alone, or also the group of the log directory.

Arguments and what ranks print may hold secrets, so the caller's umask does not decide. What was
there before is left as it is: its mode is somebody's own choice.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import Callable

PRIVATE, GROUP = "private", "group"
MODES = (PRIVATE, GROUP)
"""The values of ``cluster.log-mode``."""

_FOLDER = {PRIVATE: 0o700, GROUP: 0o750}
_FILE = {PRIVATE: 0o600, GROUP: 0o640}

Opener = Callable[[str, int], int]
"""What :func:`open` takes as its ``opener``."""


def make_folder(path: str, mode: str) -> None:
    """Make a directory, and those above it that are missing.

    Raises:
        OSError: it cannot be made.
    """
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
        _share(handle, os.path.dirname(path), _FOLDER[mode], mode)
    finally:
        os.close(handle)


def opener(mode: str) -> Opener:
    """Return what opens the files of a job for writing, and makes those that are missing."""

    def opened(path: str, flags: int) -> int:
        flags |= os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # a planted pipe would never open
        try:
            handle = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            if flags & os.O_EXCL:
                raise
            return _regular(os.open(path, flags, 0o600), path)
        try:
            _share(handle, os.path.dirname(os.path.abspath(path)), _FILE[mode], mode)
        except BaseException:
            os.close(handle)
            raise
        return handle

    return opened


def _regular(handle: int, path: str) -> int:
    if stat.S_ISREG(os.fstat(handle).st_mode):
        return handle
    os.close(handle)
    raise OSError(errno.EINVAL, "is no regular file", path)


def _share(handle: int, folder: str, bits: int, mode: str) -> None:
    """Set the mode of what was just made; only the directory's own group may ever read it."""
    if mode == GROUP:
        try:
            os.fchown(handle, -1, os.stat(folder).st_gid)
        except OSError:  # the user is not in that group: then nobody else reads it
            bits &= 0o700
    os.fchmod(handle, bits)
