"""The end of a process with its parent: the kernel sends it a signal then."""

from __future__ import annotations

import ctypes
import os
import signal
from typing import Any, Callable

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def prctl() -> Callable[..., Any] | None:
    """Return libc's function of this name; None where there is none."""
    try:
        function: Callable[..., Any] = ctypes.CDLL(None, use_errno=True).prctl
    except (OSError, AttributeError):
        return None
    return function


def signal_at_parent_death(number: int) -> None:
    """Ask for a signal when the thread that started this process ends."""
    call = prctl()
    if call is not None:
        call(_PR_SET_PDEATHSIG, number, 0, 0, 0)


def end_with_parent() -> Callable[[], None]:
    """Return what a child does between fork and exec, to get SIGTERM when its parent ends.

    libc is loaded now, as that is unsafe after a fork.
    """
    call = prctl()
    parent = os.getpid()

    def request() -> None:
        if call is None:
            return
        call(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:  # it ended before the request was made
            os._exit(1)

    return request
