"""A time limit that a busy machine does not decide."""

from __future__ import annotations

import os
import time
from pathlib import Path

_LOAD = Path("/proc/loadavg")
_PROCESSORS = os.cpu_count() or 1
_MOST_SECONDS = 1.0  # between two looks: where this process stood still, so did others


class Deadline:
    """A time after which something counts as hanging.

    A second counts as much of a second as a process gets of a processor in it: where six processes
    want to run on two processors, a third. So what a round is given does not depend on who else
    works on the machine, and what waits for nothing is found on a busy one too.
    """

    def __init__(self, seconds: float) -> None:
        self._left = seconds
        self._seen = time.monotonic()

    def passed(self) -> bool:
        """Return whether the time is over; to be asked often, for the load changes."""
        now = time.monotonic()
        runnable = max(1, int(_LOAD.read_text().split()[3].partition("/")[0]))
        passed = min(now - self._seen, _MOST_SECONDS)
        self._left -= passed * min(1.0, _PROCESSORS / runnable)
        self._seen = now
        return self._left <= 0
