"""One phase on the agents of a step: when it is complete, and when it is cut short."""

from __future__ import annotations

import collections
import math
import time
from collections.abc import Collection, KeysView, Mapping
from dataclasses import replace

from ...agent import agent
from ...protocol.enumerations import PhaseName
from ...protocol.events import FramesLost, NodesLate, RankOutput, StrayLines, read_agent_line
from ...protocol.job import Job
from ...protocol.messages import Answer, Heartbeat, LaunchAnswer, OutOfReach, Ready, Relayed
from .driver_channel import DriverChannel
from .liveness import START_SECONDS, Liveness
from .transport import OnEvent, Requests


class PhaseAnswers:
    """The answers of the tasks of one step, taken in the order in which they come."""

    def __init__(self, requests: Requests, tasks: int, on_event: OnEvent, phase: str) -> None:
        self.requests, self._tasks, self._on_event = requests, tasks, on_event
        self.phase = phase
        self.held = False  # true while the tasks that are ready wait for permission to begin
        self.ready: dict[str, Ready] = {}  # to begin, or to take part in a relay
        self.answered: dict[str, set[int]] = {}  # the tasks of each node
        self.bad: set[str] = set()  # the nodes of which a task has failed
        self.failed: list[str] = []  # those whose ranks were not told to end, the first one first
        self.out_of_reach: dict[str, dict[str, str]] = {}  # by node the others, and the reasons
        self.relayed: dict[str, Relayed] = {}
        self.active: list[str] = []  # the nodes that an event has come from since it was read
        self._open = dict.fromkeys(requests)  # a task has not answered; in order
        self._unknown: collections.Counter[str] = collections.Counter()
        self._first_end: float | None = None

    @property
    def nodes(self) -> KeysView[str]:
        """The nodes that are asked, in their order."""
        return self.requests.keys()

    def is_complete(
        self, lost: Collection[str], gone: Mapping[str, Collection[int]] | None = None
    ) -> bool:
        """Return whether every task has answered or has gone, or its node is lost."""
        gone = gone or {}
        # Called after each piece of input: it stops at the first node that is still awaited.
        return all(
            node in lost or len({*self.answered.get(node, ()), *gone.get(node, ())}) >= self._tasks
            for node in self._open
        )

    def report_losses(self, lost: Mapping[str, int]) -> None:
        """Report the number of lost frames of each source, ``node:task``."""
        for source in {**lost, **self._unknown}:
            node, _, task = source.rpartition(":")
            frames, unknown = lost.get(source, 0), self._unknown.get(source, 0)
            self._on_event(FramesLost(node, task, frames, unknown))
        self._unknown.clear()

    def list_late_nodes(self, patience: int) -> list[str]:
        """Return the nodes that still run so long after the first has ended; 0 for no limit."""
        ended = self._first_end
        if not patience or ended is None or time.monotonic() < ended + patience:
            return []
        return [node for node in self.requests if node in self._open]

    def take(self, source: str, line: str) -> None:
        """Take one message of one task."""
        node, _, task = source.rpartition(":")
        event = read_agent_line(line.encode(errors="replace"), node, self.phase)
        if node not in self.requests:
            if isinstance(event, RankOutput):  # else a late answer of one that is left out already
                self._unknown[source] += 1
            return
        if not isinstance(event, (Heartbeat, RankOutput)):  # nobody waits longer for these
            self.active.append(node)
        if isinstance(event, Ready):
            self.ready[node] = event
        elif isinstance(event, OutOfReach):
            self.out_of_reach[node] = dict(event.nodes)
        elif isinstance(event, Relayed):
            self.relayed[node] = event
        else:
            if isinstance(event, Answer):
                event = replace(event, task=int(task) if task.isdigit() else None)
                self._add(node, event)
            self._on_event(event)

    def _add(self, node: str, answer: Answer) -> None:
        tasks = self.answered.setdefault(node, set())
        tasks.add(answer.task or 0)
        if len(tasks) >= self._tasks:
            self._open.pop(node, None)
        if not answer.ok:
            self.bad.add(node)
            if not (isinstance(answer, LaunchAnswer) and answer.stopped):
                self.failed.append(node)
        elif self._first_end is None and node not in self._open:
            self._first_end = time.monotonic()


SECONDS: dict[str, float] = {
    PhaseName.PREFLIGHT: 180.0,
    PhaseName.UNPACK: 3600.0,
    PhaseName.PROBE: agent.PROBE_SECONDS + 120,
    PhaseName.DEEP: 3600.0,
    PhaseName.TIDY: 600.0,
    PhaseName.CLEAN: 3600.0,
}  # time that a phase may take; nodes that have not answered by then are named
FIRST_SECONDS = START_SECONDS  # until an agent is ready for a file: its step may have to begin
NEXT_SECONDS = 20.0  # for each further one, unless agents start in containers
_ELASTIC_GRACE = 2.0  # seconds for too few ranks of an elastic group to end, before SIGTERM
_STRAY_LINES, _STRAY_CHARACTERS = 5, 200  # limits of the stray lines of ``srun`` that are shown


class PhaseRun:
    """A step, the answers of its agents to one phase, and which of its nodes are alive."""

    def __init__(
        self,
        step: DriverChannel,
        answers: PhaseAnswers,
        liveness: Liveness,
        *,
        in_container: bool = False,
    ) -> None:
        self.step, self.answers, self.liveness = step, answers, liveness
        self._starts_slowly = in_container and not step.heartbeats.has_begun()  # it may be fetched
        self._lost: frozenset[str] = frozenset()
        self._lost_of: tuple[Mapping[str, object], int] = ({}, 0)  # faults, and nodes given up

    def lost_nodes(self) -> frozenset[str]:
        """Return the nodes that are at fault or given up: the same object unless there are more."""
        faults, lost = self.step.faults, self.liveness.lost
        self.liveness.check(faults)
        known, count = self._lost_of
        if faults is not known or len(lost) != count:
            self._lost = frozenset(faults.keys() & self.answers.nodes | lost.keys())
            self._lost_of = faults, len(lost)
        return self._lost

    def patience(self, *, first: bool = False) -> float:
        """Return how many seconds to wait for agents that are not ready for a file yet."""
        return FIRST_SECONDS if first or self._starts_slowly else NEXT_SECONDS

    def receive_events(self, awaited: set[str]) -> list[str]:
        """Return the nodes that have sent an event; await none that is lost, none at the end."""
        self.step.pump(self.answers.take)
        awaited.difference_update(awaited if self.step.has_ended else self.lost_nodes())
        active, self.answers.active = self.answers.active, []
        return active

    def await_ready(self, deadline: float) -> set[str]:
        """Wait until agents are ready for a file, have failed, or are lost; return the others."""
        awaited = set(self.answers.nodes)
        until = min(deadline, time.monotonic() + self.patience(first=True))
        while awaited:
            is_late = time.monotonic() >= until
            active = self.receive_events(awaited)
            if active:
                awaited.difference_update(active)
                until = min(deadline, time.monotonic() + self.patience())
            elif is_late:  # and nothing has come while this process itself stood still
                break
        return awaited

    def give_up_late(self, nodes: Collection[str]) -> None:
        """Give up those nodes that are still neither ready nor done."""
        for node in sorted({*nodes} - self.answers.ready.keys() - self.answers.answered.keys()):
            if node not in self.lost_nodes():
                self.liveness.give_up_silent(node, self.patience())

    def is_settled(self) -> bool:
        """Return whether every task has answered, or has ended without an answer."""
        gone = self.step.gone
        lost = {*self.liveness.lost, *(self.step.faults.keys() - gone.keys())}
        return self.answers.is_complete(lost, gone)

    def finish(self, grace: float) -> None:
        """End the step; where ranks run, only once all of their output has come."""
        complete = self.is_settled if self.answers.phase == PhaseName.LAUNCH else None
        self.step.finish(self.answers.take, grace, complete)

    def report_losses(self) -> None:
        """Report messages that were lost on their way, and the stray lines of srun."""
        lost, lines = self.step.pop_losses()
        self.answers.report_losses(lost)
        if lines:
            shown = tuple(line[:_STRAY_CHARACTERS] for line in lines[:_STRAY_LINES])
            self.liveness.take(StrayLines(len(lines), shown))


class PhaseLimit:
    """When to end a step before all of its nodes have answered; a launch takes any time."""

    def __init__(self, phase: str, job: Job, nodes: int, patience: int) -> None:
        elastic = job.launch.elastic
        self._spare = max(0, nodes - elastic[0]) if elastic else 0
        self._grace = _ELASTIC_GRACE if elastic else 0.0
        self._patience = patience
        self._launches = phase == PhaseName.LAUNCH
        # In a launch only once too many nodes have failed.
        self._deadline = math.inf if self._launches else time.monotonic() + SECONDS[phase]

    def is_reached(self, run: PhaseRun, lost: Collection[str], *, complete: bool) -> bool:
        """Return whether the step is to be ended now; ranks that hang are reported."""
        if self._launches:
            if len({*run.answers.bad, *lost}) > self._spare:
                self._deadline = min(self._deadline, time.monotonic() + self._grace)
            late = run.answers.list_late_nodes(self._patience)
            if late:
                run.liveness.take(NodesLate(tuple(late), self._patience))
            if late or (not complete and run.liveness.is_over(lost)):
                return True
        return time.monotonic() > self._deadline
