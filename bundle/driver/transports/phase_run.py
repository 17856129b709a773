"""One phase on the agents of a step: when it is complete, and when it is cut short."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from typing import Protocol

from ...agent import agent
from ...channel import agent_channel
from ...protocol.enumerations import PhaseName
from ...protocol.events import NodesLate, StrayLines
from ...protocol.job import Job
from ...protocol.problem import ProblemCode
from .driver_channel import DriverChannel
from .phase_answers import PhaseAnswers
from .timeouts import Watch
from .transport import OnEvent

SECONDS: dict[str, float] = {
    PhaseName.PREFLIGHT: 180.0,
    PhaseName.UNPACK: 3600.0,
    PhaseName.PROBE: agent.PROBE_SECONDS + 120,
    PhaseName.DEEP: 3600.0,
    PhaseName.TIDY: 600.0,
    PhaseName.CLEAN: 3600.0,
}
"""Time that a phase may take; nodes that have not answered by then are named."""
FIRST_SECONDS = 300.0
"""Time for the first agent to be ready for a file: a step may still have to begin, and Slurm's
controller to come back before (:data:`bundle.driver.transports.timeouts.CONTROLLER_SECONDS`)."""
NEXT_SECONDS = 20.0
"""Time for each further one, unless agents are still to be started in containers."""
SILENT_SECONDS = 3 * agent_channel.BEAT_SECONDS
"""Time without a sign of life after which a node is looked at."""
_CHECK_SECONDS = 1.0
"""Time between two checks which nodes are silent."""
_ELASTIC_GRACE = 2.0
"""Seconds that the rest of an elastic group gets to end by itself when too few nodes are left.

Short: the grace period after SIGTERM comes on top of it.
"""
_STRAY_LINES, _STRAY_CHARACTERS = 5, 200
"""Limits of the stray lines of ``srun`` that are shown."""


class PhaseRun:
    """A step, the answers of its agents to one phase, and the watch over its nodes."""

    def __init__(
        self,
        step: DriverChannel,
        answers: PhaseAnswers,
        watch: Watch,
        *,
        in_container: bool = False,
    ) -> None:
        self.step, self.answers, self.watch = step, answers, watch
        self.starts_slowly = in_container and not step.heard
        """True if agents are still to be started, each in a container that may have to be fetched
        and unpacked first."""
        self._silent: Collection[str] = ()
        """The nodes that sent no heartbeat lately."""
        self._next_check = 0.0
        self._lost: frozenset[str] = frozenset()
        self._lost_of: tuple[Mapping[str, object], int] = ({}, 0)
        """What they were made from: the step's faults, and the number of nodes given up."""

    def lost_nodes(self) -> frozenset[str]:
        """Return the nodes on which something went wrong, or that cannot be reached any more.

        It is the same object as the last time, unless there are more.
        """
        faults, lost = self.step.faults, self.watch.lost
        now = time.monotonic()
        if (
            now >= self._next_check
        ):  # not after each piece of input: there may be thousands of nodes
            self._next_check = now + _CHECK_SECONDS
            self._silent = self.step.silent_nodes(SILENT_SECONDS)
        self.watch.look(faults, self._silent)
        known, count = self._lost_of
        if faults is not known or len(lost) != count:
            self._lost = frozenset(faults.keys() & self.answers.nodes | lost.keys())
            self._lost_of = faults, len(lost)
        return self._lost

    def first_lost(self) -> str:
        """Return the node that was lost first, or seems to be, as nothing comes from it."""
        silent = self.step.silent_nodes(1.5 * agent_channel.BEAT_SECONDS)
        lost = [*self.watch.lost, *silent - self.answers.answered.keys()]
        return min(lost, key=lambda node: node not in self.watch.lost, default="")

    def patience(self, *, first: bool) -> float:
        """Return how many seconds to wait for agents that have sent nothing yet."""
        return FIRST_SECONDS if first or self.starts_slowly else NEXT_SECONDS

    def lose_hung(self) -> list[str]:
        """Give up the nodes that report a hang; return all that have reported since the last call.

        Nodes that make progress are among them.
        """
        reports = self.answers.unpacking()
        for node, report in reports.items():
            if report.hung:
                values = {"seconds": f"{report.seconds:g}", "why": report.hung}
                self.watch.lose(node, ProblemCode.NO_ANSWER_HANGS, values)
        return list(reports)

    def lose_silent(self, node: str, seconds: float) -> None:
        """Give up a node from which nothing has come for so many seconds."""
        self.watch.lose(node, ProblemCode.NO_ANSWER_SILENT, {"seconds": f"{seconds:g}"})

    def settled(self) -> bool:
        """Return whether every task has answered, or is known to have ended without an answer."""
        gone = self.step.gone
        lost = {*self.watch.lost, *(self.step.faults.keys() - gone.keys())}
        return self.answers.complete(lost, gone)

    def finish(self, grace: float) -> None:
        """End the step; where ranks run, only once all of their output has come."""
        complete = self.settled if self.answers.phase == PhaseName.LAUNCH else None
        self.step.finish(self.answers.take, grace, complete)

    def report_losses(self, on_event: OnEvent) -> None:
        """Report messages that were lost on their way, and the stray lines of srun."""
        self.answers.report_losses(self.step.losses())
        lines = self.step.stray_lines()
        if lines:
            shown = tuple(line[:_STRAY_CHARACTERS] for line in lines[:_STRAY_LINES])
            on_event(StrayLines(len(lines), shown))


class Limit(Protocol):
    """The reasons to end a step before all of its nodes have answered."""

    def reached(self, run: PhaseRun, lost: Collection[str], *, complete: bool) -> bool:
        """Return whether the step is to be ended now."""


class TimeLimit:
    """The limit of every phase but the launch: its time."""

    def __init__(self, phase: str) -> None:
        self._deadline = time.monotonic() + SECONDS[phase]

    def reached(self, run: PhaseRun, lost: Collection[str], *, complete: bool) -> bool:
        """Return whether the time is over."""
        return time.monotonic() > self._deadline


class LaunchLimit:
    """The limit of a launch, which takes any time: nodes that fail, hang or are lost."""

    def __init__(self, job: Job, nodes: int, patience: int) -> None:
        """Allow nodes ``patience`` seconds after the first has ended well; 0 for no limit."""
        elastic = job.launch.elastic
        self._spare = max(0, nodes - elastic[0]) if elastic else 0
        self._grace = _ELASTIC_GRACE if elastic else 0.0
        self._patience = patience
        self._deadline: float | None = None
        """The time at which the rest is ended, once too many nodes have failed."""

    def reached(self, run: PhaseRun, lost: Collection[str], *, complete: bool) -> bool:
        """Return whether the ranks that are left are to be ended; nodes that hang are reported."""
        if self._deadline is None and len({*run.answers.bad, *lost}) > self._spare:
            self._deadline = time.monotonic() + self._grace
        late = run.answers.late(self._patience)
        if late:
            run.watch.take(NodesLate(tuple(late), self._patience))
            return True
        if not complete and run.watch.over(lost):
            return True
        return self._deadline is not None and time.monotonic() > self._deadline
