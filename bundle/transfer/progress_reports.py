"""Reports while a node unpacks: that it makes progress, or what its processes hang in."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

from ..channel.agent_channel import AgentChannel
from ..protocol.messages import Unpacking
from ..system import processes

LOOK_SECONDS = 5.0
"""Time between two looks at this node's processes."""
REPORT_SECONDS = 20.0
"""Time between two reports; none is sent meanwhile by a node that makes no progress."""
HANG_SECONDS = 60.0
"""Time without progress after which processes hang: no disk takes as long for one request."""
_MOST_NAMED = 3
"""Processes that a report names."""


@contextlib.contextmanager
def reporting(channel: AgentChannel) -> Iterator[None]:
    """Report while the block runs, from a thread: this one may be what hangs.

    Nothing is reported where the driver is on this machine itself.
    """
    if not channel.in_step:
        yield
        return
    over = threading.Event()
    thread = threading.Thread(target=_report, args=(channel, over), daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(LOOK_SECONDS)  # the answer, which follows, is to be this phase's last word


def _report(channel: AgentChannel, over: threading.Event) -> None:
    progress = UnpackProgress(processes.own_tasks())
    next_report = time.monotonic() + REPORT_SECONDS
    while not over.wait(LOOK_SECONDS):
        hung = progress.look(processes.own_tasks(), LOOK_SECONDS)
        if time.monotonic() < next_report or not (hung or progress.has_moved):
            continue
        event = Unpacking(hung=hung, seconds=round(progress.still_seconds, 1))
        with contextlib.suppress(OSError):  # the driver has gone
            channel.emit(event)
        progress.has_moved = False
        next_report = time.monotonic() + REPORT_SECONDS


class UnpackProgress:
    """The progress of some processes.

    Attributes:
        still_seconds: the time for which none of them has made progress.
        has_moved: True if one has made progress; who reports it makes it False again.
    """

    def __init__(self, tasks: tuple[processes.TaskState, ...]) -> None:
        self._tasks = tasks
        self.still_seconds = 0.0
        self.has_moved = False

    def look(self, tasks: tuple[processes.TaskState, ...], seconds: float) -> str:
        """Return what the processes hang in, or empty; no clock: all may have been stopped."""
        moved = processes.made_progress(self._tasks, tasks)
        self._tasks = tasks
        if moved:
            self.still_seconds, self.has_moved = 0.0, True
            return ""
        self.still_seconds += seconds
        if self.still_seconds < HANG_SECONDS:
            return ""
        hung = [task for task in tasks if task.hangs]
        more = len(hung) - _MOST_NAMED
        named = "; ".join(map(str, hung[:_MOST_NAMED]))
        return f"{named}; and {more} more" if more > 0 else named
