"""The disk of the host where the driver runs: where it is full or fails, no node is to blame."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Iterator

from ..node import removal
from ..protocol.problem import NodeError, ProblemCode
from ..system.files import disk_problem

_FAULTS = frozenset((errno.EROFS, errno.EIO, errno.ENOSPC, errno.EDQUOT))
"""Errors that are a file system's, whatever was written."""


@contextlib.contextmanager
def problems_of_own_disk() -> Iterator[None]:
    """Turn an error of a file system on this host into a problem of the host.

    Raises:
        NodeError: the block met one.
    """
    try:
        yield
    except OSError as exc:
        if exc.errno not in _FAULTS:
            raise
        raise _error(exc) from exc


@contextlib.contextmanager
def scratch() -> Iterator[str]:
    """Make a temporary directory, and remove it after the block; yield its path.

    Raises:
        NodeError: no directory for temporary files can be written to.
    """
    try:
        folder = tempfile.mkdtemp(prefix="stager-")
    except OSError as exc:
        raise _error(exc) from exc
    try:
        yield folder
    finally:
        removal.sweep(folder)


def _error(exc: OSError) -> NodeError:
    place = exc.filename or os.environ.get("TMPDIR") or "/tmp"  # noqa: S108 - only named
    full, other = ProblemCode.HOST_DISK_FULL, ProblemCode.HOST_DISK_UNWRITABLE
    return NodeError(disk_problem(exc, str(place), full, other))
