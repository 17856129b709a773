"""Locks of a node root: files that may be removed while others wait for them.

A lock on a file that has lost its name keeps nobody out, for the next one to come makes a new file.
So whoever gets a lock looks whether the name still leads to the file that is locked, and begins
again where it does not. The kernel gives a lock back when its holder ends, however that ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator

from .root import SUBDIRECTORIES, secure_root

ROOT_LOCK = ".lock"
"""In a node root: shared while something is put in there, exclusive while the root is removed."""


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
