"""The look at a relay's source, a process on this host: whether it makes progress.

Where it was stopped, or its disk does not answer, the nodes wait for it for a minute, and can say
only that it is silent. This host sees why.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from ...protocol.events import Remark
from ...system import processes
from ...transfer.relay_process import RelayProcess
from .transport import OnEvent

STILL_SECONDS = 10.0
"""Time without a round of its loop after which a source stands still. It is less than the time for
which the nodes wait: the reason should be known before they give up."""
_MOST_SECONDS = 2.0
"""A pause between two looks counts no longer: this process may have been stopped with the source.
"""


class SourceWatch:
    """A source, while nodes wait for its bytes."""

    def __init__(
        self,
        source: RelayProcess,
        on_event: OnEvent,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._source, self._on_event, self._clock = source, on_event, clock
        self._rounds, self._seen = source.rounds, clock()
        self._still = 0.0
        """Seconds without a round."""
        self._told = False

    def failure(self) -> str:
        """Return why the source serves no longer; empty while it does, or may do so again.

        To be called every second or so.
        """
        now = self._clock()
        if self._source.rounds == self._rounds:
            self._still += min(now - self._seen, _MOST_SECONDS)
        else:
            self._rounds, self._still = self._source.rounds, 0.0
        self._seen = now
        if self._still >= STILL_SECONDS and not self._told:
            self._tell()
        return self._source.source_failure()

    def hung(self) -> str:
        """Return what the source hangs in; empty if it makes progress, or was merely stopped."""
        if self._still < STILL_SECONDS or self._source.rounds != self._rounds:
            return ""
        task = processes.task(self._source.pid)
        return "" if task is None or task.stopped else str(task)

    def _tell(self) -> None:
        task = processes.task(self._source.pid)
        if task is None:
            return
        self._told = True
        text = (
            f"the process on {os.uname().nodename} that sends the bundle has stood still for "
            f"{STILL_SECONDS:g} s: {task}; the nodes wait for it, for a minute at most"
        )
        self._on_event(Remark(text, warning=True))
