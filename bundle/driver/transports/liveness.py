"""Which nodes are alive: every agent sends heartbeats, and each phase has a policy for silence.

Slurm notices that a node's network is gone only after ``SlurmdTimeout``, five minutes as a rule,
and never that a ``slurmstepd`` was killed. So a step is started on a node that is silent: ``srun``
names the nodes where it can start nothing, and the step looks whether the job still runs there.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

from ...channel.agent_channel import BEAT_SECONDS
from ...protocol.enumerations import PhaseName
from ...protocol.events import Remark
from ...protocol.messages import Answer, Heartbeat, RanksEnded
from ...protocol.problem import Problem, ProblemCode
from .transport import Ended, Event, OnEvent

LOOK_SECONDS = 3 * BEAT_SECONDS  # silence after which a node is checked, in every phase
LOST_SECONDS = 6 * BEAT_SECONDS  # the same for a node to be lost; while ranks run a check decides
START_SECONDS = 300.0  # the same before the first message: an image may be fetched
_INTERRUPTED_SECONDS = 1.5 * BEAT_SECONDS  # the same when the job is told to end
_CHECK_SECONDS = 1.0  # time between two rounds over all nodes, of which there may be thousands
_FIRST_PAUSE, _LONGEST_PAUSE = 10.0, 300.0  # between two checks; it doubles each time
_MOST_COUNTED = 2.0  # seconds that count at once: if more pass, this process itself was stopped


class Heartbeats:
    """The time of each node's last message; time in which this process was stopped is left out."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen, self._now = clock(), 0.0
        self._last: dict[str, float] = {}
        self._first = 0.0

    def now(self) -> float:
        """Return the seconds that count so far."""
        seen = self._clock()
        self._now += min(seen - self._seen, _MOST_COUNTED)
        self._seen = seen
        return self._now

    def note(self, node: str) -> None:
        """Note that a message has come from a node."""
        now = self.now()
        self._first = self._first if self._last else now
        self._last[node] = now

    def has_begun(self, node: str | None = None) -> bool:
        """Return whether a node, or some node, has sent anything."""
        return bool(self._last) if node is None else node in self._last

    def silence(self, node: str) -> float:
        """Return the seconds since a node's last message, else since the first of any node."""
        return self.now() - self._last.get(node, self._first) if self._last else 0.0


class SilenceCheck(Protocol):
    """A check whether silent nodes can be reached, and still have something of the job."""

    @property
    def has_ended(self) -> bool:
        """True once it has ended, or has taken too long."""

    def read_findings(self) -> tuple[Mapping[str, str], frozenset[str]]:
        """Return why nothing can be started on nodes, and the nodes without the job."""

    def close(self) -> None:
        """End it."""


class Liveness:
    """The nodes of one phase: which are done, and which are lost (``lost``), and why."""

    def __init__(
        self,
        phase: str,
        nodes: Collection[str],
        on_event: OnEvent,
        heartbeats: Heartbeats,
        begin_check: Callable[[Sequence[str]], SilenceCheck | None] = lambda nodes: None,
    ) -> None:
        self.lost: dict[str, Ended] = {}
        self._on_event, self._begin_check = on_event, begin_check
        self._heartbeats = heartbeats
        self._nodes = dict.fromkeys(nodes)
        self._last_events = (RanksEnded.event, phase)  # after which a node is done
        self._patience = math.inf if phase == PhaseName.LAUNCH else LOST_SECONDS
        self._done: set[str] = set()
        self._next_round = self._next_check = 0.0
        self._pause = _FIRST_PAUSE
        self._check: SilenceCheck | None = None
        self._deserted: frozenset[str] = frozenset()  # the nodes that the last check found deserted

    def take(self, event: Event) -> None:
        """Learn from an event of a node, and pass it on."""
        if isinstance(event, Heartbeat):
            values = {"seconds": f"{event.seconds:g}", "why": event.hung}
            self._give_up(event.node, ProblemCode.NO_ANSWER_HANGS, values)
            return
        if isinstance(event, (RanksEnded, Answer)) and event.event in self._last_events:
            self._done.add(event.node)
        self._on_event(event)

    def is_over(self, gone: Collection[str]) -> bool:
        """Return whether some nodes are gone and all others are done: nothing more will come."""
        gone = {*gone, *self.lost}
        return bool(gone) and bool(self._done) and {*self._done, *gone} >= {*self._nodes}

    def first_lost(self) -> str:
        """Return the node that was lost first, or seems to be; empty for none."""
        return next(iter([*self.lost, *self._list_silent(_INTERRUPTED_SECONDS, self._done)]), "")

    def check(self, gone: Collection[str]) -> None:
        """Give up nodes that are silent for too long, or gone by a check; to be called often."""
        if self._check is not None and self._check.has_ended:
            self._end_check(self._check)
        now = self._heartbeats.now()
        if now < self._next_round:
            return
        self._next_round = now + _CHECK_SECONDS
        known = {*self._done, *gone}
        for node, seconds in self._list_silent(LOOK_SECONDS, known).items():
            has_begun = self._heartbeats.has_begun(node)
            if seconds >= (self._patience if has_begun else max(self._patience, START_SECONDS)):
                self.give_up_silent(node, seconds)
        silent = self._list_silent(LOOK_SECONDS, {*known, *self.lost})
        if not silent:
            self._pause, self._next_check = _FIRST_PAUSE, now
        elif self._check is None and now >= self._next_check:
            self._check = self._begin_check(list(silent))
            self._next_check = now + self._pause
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)

    def give_up_silent(self, node: str, seconds: float) -> None:
        """Give up a node that has sent nothing for so many seconds."""
        self._give_up(node, ProblemCode.NO_ANSWER_SILENT, {"seconds": f"{seconds:.0f}"})

    def close(self) -> None:
        """End a check that is still going on."""
        if self._check is not None:
            self._check.close()
            self._check = None

    def _give_up(self, node: str, problem: ProblemCode, values: Mapping[str, str]) -> None:
        """Give a node up and say why, unless it is done; the first reason stays."""
        if node in self._nodes and node not in self._done and node not in self.lost:
            self.lost[node] = Ended(problem, values, 1)
            self._on_event(Remark(f"{node} is lost: {Problem(problem, node, values).why}"))

    def _list_silent(self, seconds: float, known: Collection[str]) -> dict[str, float]:
        silence = {
            node: self._heartbeats.silence(node) for node in self._nodes if node not in known
        }
        return {node: silent for node, silent in silence.items() if silent >= seconds}

    def _end_check(self, check: SilenceCheck) -> None:
        unreachable, deserted = check.read_findings()
        self.close()
        for node, why in unreachable.items():
            self._give_up(node, ProblemCode.NO_ANSWER_UNREACHABLE, {"why": why})
        # Twice in a row: its last word may have been on its way.
        for node in sorted(deserted & self._deserted):
            self._give_up(node, ProblemCode.NO_ANSWER_DESERTED, {})
        self._deserted = deserted
