"""Locks of a node root: files that may be removed while others wait for them.

A lock on a file that has lost its name keeps nobody out, because the next process makes a new file.
So a process that gets a lock checks that the name still leads to the locked file, and begins again
if it does not. The kernel releases a lock when its holder ends, for whatever reason.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator

from .root import SUBDIRECTORIES, secure_root

ROOT_LOCK = ".lock"
"""In a node root: shared while something is put in there, exclusive while the root is removed."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def take(path: str, operation: int, *, create: bool = True) -> int:
    """Open a lock file and lock it; the lock lasts until the descriptor's last copy is closed.

    Args:
        path: the file; a symbolic link is refused.
        operation: as for ``fcntl.flock``.
        create: True to make the file if it is missing.

    Raises:
        BlockingIOError: another process holds it, and ``LOCK_NB`` was given.
        OSError: it cannot be opened or locked.
    """
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if create else 0)
    while True:
        handle = os.open(path, flags, 0o600)
        try:
            fcntl.flock(handle, operation)
            if _leads_to(path, handle):
                return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


@contextlib.contextmanager
def taken(path: str, operation: int, *, create: bool = True) -> Iterator[None]:
    """Hold a lock file while the block runs; see :func:`take`."""
    handle = take(path, operation, create=create)
    try:
        yield
    finally:
        os.close(handle)


def make_held(path: str) -> int:
    """Make a directory and lock it until the descriptor is closed or its holder ends.

    Only a process that holds it alone (:func:`alone`) may remove it.

    Raises:
        OSError: it cannot be made, or is there already.
    """
    while True:
        os.makedirs(path, mode=0o700)
        try:
            handle = os.open(path, _FOLDER)
        except FileNotFoundError:  # another process removed it as a left-over
            continue
        with contextlib.suppress(OSError):  # without locks nobody can hold it alone, either
            fcntl.flock(handle, fcntl.LOCK_SH)
        if _leads_to(path, handle):
            return handle
        os.close(handle)


@contextlib.contextmanager
def alone(path: str) -> Iterator[None]:
    """Hold a directory that nobody else holds while the block runs.

    Raises:
        OSError: another process holds it, it is gone or no directory, or it cannot be locked.
    """
    handle = os.open(path, _FOLDER)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not _leads_to(path, handle):  # it was removed, and the name is now another directory's
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        yield
    finally:
        os.close(handle)


@contextlib.contextmanager
def using_root(root: str) -> Iterator[None]:
    """Keep a node root from being removed while the block runs; make it if it is missing.

    Raises:
        NodeError: it is not there any more, and cannot be made; see :func:`secure_root`.
        OSError: it cannot be locked.
    """
    base, lock = os.path.dirname(root), os.path.join(root, ROOT_LOCK)
    while True:
        try:
            handle = take(lock, fcntl.LOCK_SH)
            break
        except FileNotFoundError:
            secure_root(base)
    try:
        # A process that failed to remove it may have removed a part.
        if not all(os.path.isdir(os.path.join(root, name)) for name in SUBDIRECTORIES):
            secure_root(base)
        yield
    finally:
        os.close(handle)


def _leads_to(path: str, handle: int) -> bool:
    try:
        status = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(status, os.fstat(handle))
