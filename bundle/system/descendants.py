"""The descendants of a process: those with its mark, and orphans that are adopted.

:mod:`bundle.system.processes` starts them, and ends them.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from .parent_death import prctl

MARK = "STAGER_PROCESS"
"""The variable by which descendants are found that left for a session of their own.

It holds one token for each process started by us on the way from the first one, joined by slashes.
A process that has lost it, as by ``env -i``, is found where :func:`adopt_orphans` was called.
"""
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
waited_for: set[int] = set()
"""Processes started by us whose exit status nobody has collected yet."""
_adopting = [False]
"""True if orphans become children of this process; a list, as it changes."""


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent has ended; they are stopped, too.

    It is for a process that looks after the user's programs: these may start others in a session of
    their own and without our variable, and leave them behind. A process that calls this must not
    start processes in one thread and stop others in another at the same time: a new child could be
    mistaken for an orphan. A program that replaces this one (``execve``) keeps the role.
    """
    call = prctl()
    _adopting[0] = call is not None and call(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0


def reap_orphans() -> None:
    """Collect orphans that have ended: an adopted zombie stays until it is waited for.

    It costs one system call where there are none.
    """
    while _adopting[0]:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None or not _is_orphan(ended.si_pid):
                return  # its own waiter takes it soon, and those behind it come next time
        except (ChildProcessError, ProcessLookupError):
            return
        with suppress(ChildProcessError):  # another thread was quicker
            os.waitpid(ended.si_pid, os.WNOHANG)


def _is_orphan(child: int) -> bool:
    """Tell an adopted child; forked ones share our session, which started ones never rejoin."""
    return child not in waited_for and os.getsid(child) != os.getsid(0)


def members_of(group: int, mark: str) -> set[int]:
    """Return the living processes of a group or session, those with the mark, and orphans.

    If several processes are stopped, the orphans belong to the one that is stopped first.
    """
    reap_orphans()
    members = set()
    for name in filter(str.isdigit, os.listdir("/proc")):
        pid = int(name)
        if pid == os.getpid():
            continue
        with suppress(OSError):  # it ended meanwhile, or belongs to another user
            if _is_member(pid, group, mark):
                members.add(pid)
    return members


def _is_member(pid: int, group: int, mark: str) -> bool:
    """Tell a living process of a group or session, with a mark, or an orphan of ours."""
    line = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    # proc(5): the name, in parentheses, may hold anything; then state ppid pgrp session
    state, parent, process_group, session = line.rpartition(")")[2].split()[:4]
    if state in "ZX":
        return False
    if group in (int(process_group), int(session)):
        return True
    if _adopting[0] and int(parent) == os.getpid() and _is_orphan(pid):
        return True
    return bool(mark) and mark in _marks(Path(f"/proc/{pid}/environ").read_bytes())


def _marks(environ: bytes) -> list[str]:
    prefix = f"{MARK}=".encode()
    for item in environ.split(b"\0"):
        if item.startswith(prefix):
            return item[len(prefix) :].decode(errors="replace").split("/")
    return []
