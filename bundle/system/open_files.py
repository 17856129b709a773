"""How many files may be open: the soft limit is for programs that are older than it."""

from __future__ import annotations

import contextlib
import resource

_FILES = resource.RLIMIT_NOFILE
_ENOUGH = 1 << 16
"""More is of no use, and some programs close every number up to the limit."""
_given: list[tuple[int, int]] = []


def raise_open_files() -> None:
    """Let this process open as many files as it may; what it starts keeps the limit it had."""
    soft, hard = resource.getrlimit(_FILES)
    wanted = _ENOUGH if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    with contextlib.suppress(OSError, ValueError):  # where that is forbidden, it is as it was
        resource.setrlimit(_FILES, (wanted, hard))
        _given[:] = [(soft, hard)]


def restore_open_files() -> None:
    """Take the limit back, in a child before it becomes another program."""
    for limit in _given:
        resource.setrlimit(_FILES, limit)


def open_files() -> int:
    """Return how many files this process may have open."""
    soft = resource.getrlimit(_FILES)[0]
    return _ENOUGH if soft == resource.RLIM_INFINITY else soft
