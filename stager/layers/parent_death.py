"""Processes of a build that must not outlive it."""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
import os
import signal

from bundle.system.processes import signal_at_parent_death


def end_with_parent() -> None:
    """Make the kernel kill this child of ``multiprocessing`` when the process that forked it ends.

    A fork server ends with the process that started it: as soon as no process holds the other end
    of a pipe, of which each child gets a copy for children of its own.
    """
    server = multiprocessing.forkserver._forkserver
    handle = getattr(server, "_forkserver_alive_fd", None)
    if handle is not None:
        os.close(handle)
        setattr(server, "_forkserver_alive_fd", None)  # noqa: B010 - unknown to its stubs
    signal_at_parent_death(signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():
        os._exit(1)  # it ended before the line above
