"""Timeouts: for Slurm's controller, and for nodes that are silent or lag behind others.

A node whose network is gone ends no connection: ``srun`` waits for its tasks, and Slurm notices
only after ``SlurmdTimeout``, five minutes as a rule. So once a node has sent no heartbeat for a
while, or other nodes are done and nothing comes from it, a step is started on it: ``srun`` then
names the nodes on which it can start nothing. Neither does ``srun`` notice that the ``slurmstepd``
of a node was killed, by the kernel where memory ran out for example: so the step also looks whether
the job still runs there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Protocol

from ...protocol.events import Remark
from ...protocol.messages import Answer
from ...protocol.problem import Problem, ProblemCode
from ...protocol.reports import RanksEnded
from . import slurm_text
from .driver_channel import DriverChannel
from .step import StepErrors, StepFault
from .transport import Ended, Event, OnEvent, Requests

CONTROLLER_SECONDS = 180.0
"""Time that Slurm's controller may be away before a step that has not started is given up.

A restart takes seconds; a backup controller takes over after ``SlurmctldTimeout``, 120 s.
"""
_SETTLING_SECONDS = 30.0
"""Time that it may refuse a step once it is back."""
_RETRY_SECONDS = 3.0
QUIET_SECONDS = 10.0
"""Time without an event after which silent nodes are looked for; each further look comes later."""
_LONGEST_SECONDS = 300.0


class Look(Protocol):
    """A look whether silent nodes can be reached, and still have something of the job."""

    @property
    def ended(self) -> bool:
        """True once it has ended, or has taken too long."""

    def unreachable(self) -> Mapping[str, str]:
        """Return the nodes on which nothing can be started, and why."""

    def deserted(self) -> frozenset[str]:
        """Return the nodes on which it has found nothing of the job."""

    def close(self) -> None:
        """End it."""


class Waiting:
    """Waits for a controller that does not answer: for a while, and saying so only once."""

    def __init__(
        self,
        on_event: Callable[[Remark], None],
        seconds: float = CONTROLLER_SECONDS,
        fault: Callable[[str], str] = slurm_text.controller_fault,
    ) -> None:
        """Wait for a controller that does not answer: ``fault`` returns such a reason, or empty."""
        self._on_event, self._seconds, self._fault = on_event, seconds, fault
        self._until = 0.0
        """The time at which the controller is given up; 0 before it has failed to answer."""
        self._settled = 0.0
        """The time from which it may not refuse a step; 0 before it has refused one."""

    def again(self, errors: str) -> bool:
        """Return whether a command is to be tried again; pause before that."""
        now = time.monotonic()
        fault = self._fault(errors)
        if fault and not self._until:
            self._until = now + self._seconds
            self._note(fault)
        elif not self._until and slurm_text.is_of_new_controller(errors):
            self._until = now + self._seconds
        waits = bool(fault) or self._is_settling(errors, now)
        if not waits or now > self._until:
            return False
        time.sleep(_RETRY_SECONDS)
        return True

    def _note(self, fault: str) -> None:
        text = (
            f"Slurm's controller does not answer ({fault}); trying again for up to "
            f"{self._seconds:.0f} s"
        )
        self._on_event(Remark(text))

    def _is_settling(self, errors: str, now: float) -> bool:
        """Tell whether the controller is back, but most nodes have not registered yet."""
        if not self._until or not slurm_text.not_created(errors):
            return False
        self._settled = self._settled or now + _SETTLING_SECONDS
        return now < self._settled


class Watch:
    """The nodes of one phase: which are done, and which cannot be reached any more.

    Attributes:
        lost: the nodes that are given up, and why.
    """

    def __init__(
        self,
        phase: str,
        nodes: Collection[str],
        on_event: OnEvent,
        look_at: Callable[[Sequence[str]], Look | None] = lambda nodes: None,
    ) -> None:
        """Watch nodes; ``look_at`` begins a check of which can be reached, None if it cannot."""
        self.lost: dict[str, Ended] = {}
        self._on_event, self._look_at = on_event, look_at
        self._nodes = dict.fromkeys(nodes)
        self._last_events = (RanksEnded.event, phase)
        """Names of the events after which nothing is waited for."""
        self._done: set[str] = set()
        self._pause = self._silence_pause = QUIET_SECONDS
        self._next_look = self._next_look_at_silent = 0.0
        self._look: Look | None = None
        self._deserted: frozenset[str] = frozenset()
        """The nodes that the last look found deserted."""

    def take(self, event: Event) -> None:
        """Learn from an event of a node, and pass it on."""
        if isinstance(event, (RanksEnded, Answer)) and event.event in self._last_events:
            self._done.add(event.node)
        self._next_look = time.monotonic() + self._pause
        self._on_event(event)

    def over(self, gone: Collection[str]) -> bool:
        """Return whether some nodes are gone and all others are done: nothing more will come."""
        gone = {*gone, *self.lost}
        return bool(gone) and bool(self._done) and {*self._done, *gone} >= {*self._nodes}

    def look(self, gone: Collection[str], silent: Collection[str] = ()) -> None:
        """Check for unreachable nodes if it is time; never block. Slurm names the ``gone`` ones."""
        now = time.monotonic()
        if silent:
            silent = ({*silent} & {*self._nodes}) - {*self._done, *gone, *self.lost}
        if self._look is not None:
            self._end_look(self._look)
        elif silent and now >= self._next_look_at_silent:
            if self._begin_look(gone, silent):
                self._next_look_at_silent = now + self._silence_pause
                self._silence_pause = min(2 * self._silence_pause, _LONGEST_SECONDS)
        elif self._done and now >= self._next_look and self._begin_look(gone, self._nodes):
            self._pause = min(2 * self._pause, _LONGEST_SECONDS)
            self._next_look = now + self._pause
        if not silent:
            self._silence_pause = QUIET_SECONDS

    def lose(self, node: str, problem: ProblemCode, values: Mapping[str, str]) -> None:
        """Give a node up and say why, unless it is done."""
        if node in self._nodes and node not in self._done:
            self.lost[node] = Ended(1, problem, values)
            text = f"{node} is lost: {_words(node, problem, values)}"
            self._on_event(Remark(text))

    def close(self) -> None:
        """End a look that is still going on."""
        if self._look is not None:
            self._look.close()
            self._look = None

    def _begin_look(self, gone: Collection[str], among: Collection[str]) -> bool:
        known = {*self._done, *gone, *self.lost}
        nodes = [node for node in self._nodes if node in among and node not in known]
        if nodes:
            self._look = self._look_at(nodes)
        return bool(nodes)

    def _end_look(self, look: Look) -> None:
        if not look.ended:
            return
        unreachable, deserted = look.unreachable(), look.deserted()
        self.close()
        for node, why in unreachable.items():
            self.lose(node, ProblemCode.NO_ANSWER_UNREACHABLE, {"why": why})
        # Twice in a row: its last word may have been on its way.
        for node in sorted(deserted & self._deserted):
            self.lose(node, ProblemCode.NO_ANSWER_DESERTED, {})
        self._deserted = deserted


def _words(node: str, problem: ProblemCode, values: Mapping[str, str]) -> str:
    return Problem(problem, node, values).why


def endings(
    requests: Requests,
    step: DriverChannel,
    reader: StepErrors,
    unreachable: Collection[ProblemCode],
    failed: Iterable[str] = (),
) -> dict[str, Ended]:
    """Return how each node's part of a step has ended, for the case that it gave no answer."""
    general = reader.general_fault(step.code, step.errors)
    blamed = next(iter(failed), "")
    first = blamed or next(iter(step.faults), "")
    if step.stopped and first:  # the others were to end with that node, and took too long
        general = StepFault(ProblemCode.NO_ANSWER_FOLLOWED, {"first": first}, general.status)
    endings = {}
    for node in requests:
        fault = step.faults.get(node, general)
        if blamed and fault.status in slurm_text.TOLD_TO_END:
            fault = StepFault(ProblemCode.NO_ANSWER_FOLLOWED, {"first": blamed}, fault.status)
        code = fault.status
        if code is None:  # srun itself may have ended well
            code = step.code or int(fault.problem in unreachable)
        endings[node] = Ended(code, fault.problem, fault.values)
    return endings
