"""The limit on open files: its soft value is for programs that cannot handle many."""

from __future__ import annotations

import contextlib
import resource

_FILES = resource.RLIMIT_NOFILE
_ENOUGH = 1 << 16
"""Higher limits are of no use, and some programs close every number up to the limit."""
_previous: list[tuple[int, int]] = []


def raise_open_files() -> None:
    """Let this process open as many files as it may; what it starts keeps the limit it had."""
    soft, hard = resource.getrlimit(_FILES)
    wanted = min(_finite(hard), _ENOUGH)
    if _finite(soft) >= wanted:
        return
    with contextlib.suppress(OSError, ValueError):  # forbidden: the limit stays
        resource.setrlimit(_FILES, (wanted, hard))
        _previous[:] = [(soft, hard)]


def restore_open_files() -> None:
    """Restore the former limit, in a child before it becomes another program."""
    for limit in _previous:
        resource.setrlimit(_FILES, limit)


def open_files() -> int:
    """Return the number of files that this process may have open."""
    return _finite(resource.getrlimit(_FILES)[0])


def _finite(limit: int) -> int:
    return _ENOUGH if limit == resource.RLIM_INFINITY else limit
