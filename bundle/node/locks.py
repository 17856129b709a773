"""Locks of a node root: files that may be removed while others wait for them.

A lock on a file that has lost its name keeps nobody out, for the next one to come makes a new file.
So whoever gets a lock looks whether the name still leads to the file that is locked, and begins
again where it does not. The kernel gives a lock back when its holder ends, however that ends.
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
        create: whether the file is made where it is missing.

    Raises:
        BlockingIOError: somebody else holds it, and ``LOCK_NB`` was asked for.
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
    """Hold a lock file for as long as the block runs; see :func:`take`."""
    handle = take(path, operation, create=create)
    try:
        yield
    finally:
        os.close(handle)


def make_held(path: str) -> int:
    """Make a directory, and lock it, until the descriptor is closed or its holder ends.

    Whoever holds it alone (:func:`alone`) may remove it; so does nobody in between.

    Raises:
        OSError: it cannot be made, or is there already.
    """
    while True:
        os.makedirs(path, mode=0o700)
        try:
            handle = os.open(path, _FOLDER)
        except FileNotFoundError:  # it was taken for a left-over
            continue
        with contextlib.suppress(OSError):  # without locks nobody holds it alone, either
            fcntl.flock(handle, fcntl.LOCK_SH)
        if _leads_to(path, handle):
            return handle
        os.close(handle)


@contextlib.contextmanager
def alone(path: str) -> Iterator[None]:
    """Hold a directory that nobody holds.

    Raises:
        OSError: somebody does, it is gone or no directory, or it cannot be locked.
    """
    handle = os.open(path, _FOLDER)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not _leads_to(path, handle):  # it was removed, and the name is another one's by now
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        yield
    finally:
        os.close(handle)


@contextlib.contextmanager
def using_root(root: str) -> Iterator[None]:
    """Keep a node root from being removed for as long as the block runs; it is made if need be.

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
        # Whoever wanted to remove it, and could not, may have removed a part.
        if not all(os.path.isdir(os.path.join(root, name)) for name in SUBDIRECTORIES):
            secure_root(base)
        yield
    finally:
        os.close(handle)


def _leads_to(path: str, handle: int) -> bool:
    """Whether a name still leads to an open file."""
    try:
        found = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(found, os.fstat(handle))
