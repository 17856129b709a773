"""Waiting for nodes that unpack: one that hangs is given up a minute later, a slow one never is.

Each node reports that it makes progress, or what its processes hang in
(:mod:`bundle.channel.agent_channel`); one that says neither is stopped as a whole, or cannot be
reached.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from ...channel.agent_channel import HANG_SECONDS, REPORT_SECONDS
from ...protocol.enumerations import PhaseName
from .phase_run import SECONDS, PhaseRun

SILENT_SECONDS = HANG_SECONDS + REPORT_SECONDS
"""Time without a report after which a node is lost."""
_START_SECONDS = 300.0
"""Time that agents get to start where nothing has come from their step yet."""
_LOOK_SECONDS = 5.0
"""Time between two looks at all nodes."""


class UnpackWait:
    """The limit of unpacking: its time, and the nodes that are given up before."""

    def __init__(self, run: PhaseRun, clock: Callable[[], float] = time.monotonic) -> None:
        now = clock()
        self._clock = clock
        self._deadline = now + SECONDS[PhaseName.UNPACK]
        self._begun = now if run.step.heard else now + _START_SECONDS
        self._next_look = now + _LOOK_SECONDS
        self._heard: dict[str, float] = {}
        """The time of the last report of each node."""

    def reached(self, run: PhaseRun, lost: Collection[str], *, complete: bool) -> bool:
        """Give up the nodes that hang; return whether the time is over."""
        now = self._clock()
        self._heard.update(dict.fromkeys(run.lose_hung(), now))
        if now >= self._next_look:
            self._next_look = now + _LOOK_SECONDS
            self._lose_silent(run, now)
        return now > self._deadline

    def _lose_silent(self, run: PhaseRun, now: float) -> None:
        lost = run.watch.lost
        for node in run.answers.nodes - run.answers.answered.keys() - lost.keys():
            if now - self._heard.get(node, self._begun) > SILENT_SECONDS:
                run.lose_silent(node, SILENT_SECONDS)
