"""Processes that hang in the kernel: whether they make progress, and what they wait for, by /proc.

A disk or file server that does not answer puts a process to sleep from which no signal wakes it
(state D). One that is merely slow wakes it again and again, and each time counts: so whoever waits
in that state, and was not switched to once in a minute, hangs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_HANGING = "DTt"
"""States of a process that nothing but others can wake: it waits in the kernel, or is stopped."""
_WORDS = {"D": "state D", "T": "stopped, state T", "t": "traced, state t"}
_UNKNOWN = ("", "0")
"""What /proc has as the place of a wait where it is not shown."""


@dataclass(frozen=True)
class TaskState:
    """A process as it was at some moment."""

    pid: int
    """Its id."""
    state: str
    """The letter of its state, see proc(5)."""
    switches: int
    """The number of times that it was switched away from, by its own doing or not."""

    @property
    def hangs(self) -> bool:
        """True if it is in a state from which it cannot wake by itself."""
        return self.state in _HANGING

    @property
    def stopped(self) -> bool:
        """True if another process has stopped it, by a signal or to trace it."""
        return self.state in "Tt"

    def __str__(self) -> str:
        """Return its command, its state and the kernel's function that it waits in."""
        wait = _text(f"/proc/{self.pid}/wchan").strip()
        place = "" if wait in _UNKNOWN else f" in {wait}"
        command = _text(f"/proc/{self.pid}/comm").strip() or "a process"
        return f"{command} (pid {self.pid}, {_WORDS.get(self.state, self.state)}{place})"


def own_tasks() -> tuple[TaskState, ...]:
    """Return this process by its first thread, and the children that it has forked.

    Programs that it has started are in sessions of their own, and do not count.
    """
    return tuple(found for pid in _own_pids() if (found := task(pid)) is not None)


def made_progress(before: tuple[TaskState, ...], now: tuple[TaskState, ...]) -> bool:
    """Return whether some of these processes works, or all of them wait for what may come."""
    if before != now:
        return True
    return any(task.state == "R" for task in now) or not any(task.hangs for task in now)


def _own_pids() -> Iterator[int]:
    own, session = os.getpid(), os.getsid(0)
    yield own
    for thread in os.listdir(f"/proc/{own}/task"):
        for child in map(int, _text(f"/proc/{own}/task/{thread}/children").split()):
            with suppress(ProcessLookupError):
                if os.getsid(child) == session:
                    yield child


def task(pid: int) -> TaskState | None:
    """Return a process as it is; None for one that has ended."""
    fields = dict(
        line.split(":", 1) for line in _text(f"/proc/{pid}/status").splitlines() if ":" in line
    )
    state = fields.get("State", "").split()
    if not state or state[0] in "ZX":
        return None
    kinds = ("voluntary_ctxt_switches", "nonvoluntary_ctxt_switches")
    return TaskState(pid, state[0], sum(int(fields.get(kind, 0)) for kind in kinds))


def _text(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:  # it has ended, or this kernel does not show it
        return ""
