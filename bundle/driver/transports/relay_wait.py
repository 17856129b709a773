"""Waiting for the nodes of a relay: each is looked at when it has said something, and no other.

A node that says nothing keeps nobody waiting: its agent may be stopped or wait for a disk, and its
network may be gone, which Slurm notices minutes later. A node that is merely slow says so.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable

from ...channel import agent_channel
from ...protocol.problem import ProblemCode
from .phase_run import PhaseRun
from .relay_reach import Reach

_FIRST_SECONDS = 300.0
"""Time for the first agent to listen: a step may still have to begin, and its controller to come
back before (:data:`bundle.driver.transports.timeouts.CONTROLLER_SECONDS`)."""
_NEXT_SECONDS = 20.0
"""Time for each further one; then the transfer begins without the rest."""
_REPORT_SECONDS = 30.0
"""Time between two questions to the nodes that have not got the file; who has not answered one by
the next is lost. So a node that falls silent is noticed within a minute."""


class _Awaited:
    """The nodes of which something is still to come.

    Attributes:
        nodes: their names; who uses this takes out those that have said it.
    """

    def __init__(self, run: PhaseRun, nodes: Iterable[str]) -> None:
        self._run = run
        self.nodes = set(nodes)
        self._lost: Collection[str] = ()

    def news(self) -> list[str]:
        """Wait a moment for what comes, and return the nodes that it came from."""
        run = self._run
        run.step.pump(run.answers.take)
        lost = run.lost_nodes()
        if lost is not self._lost:
            self.nodes.difference_update(lost)
            self._lost = lost
        return run.answers.fresh()


def await_listeners(run: PhaseRun, deadline: float) -> set[str]:
    """Wait until the agents listen, have failed, or are lost; return those that said nothing.

    Args:
        run: the step of the agents.
        deadline: the time at which the phase is over.
    """
    awaited = _Awaited(run, run.answers.nodes)
    until = min(deadline, time.monotonic() + _FIRST_SECONDS)
    while awaited.nodes and not run.step.ended and time.monotonic() < until:
        fresh = awaited.news()
        if fresh:
            awaited.nodes.difference_update(fresh)
            until = min(deadline, time.monotonic() + _NEXT_SECONDS)
    return set() if run.step.ended else awaited.nodes


def settle_late(run: PhaseRun, silent: Collection[str]) -> dict[str, str]:
    """Return the nodes that listened too late, and why they have no file; the others are lost.

    Args:
        run: the step.
        silent: the nodes that did not listen when the transfer began.
    """
    failed = {}
    for node in sorted(silent):
        if node in run.answers.ready:
            failed[node] = f"it began to listen more than {_NEXT_SECONDS:g} s after the others"
        elif node not in run.answers.answered and node not in run.lost_nodes():
            _lose(run, node, _NEXT_SECONDS)
    return failed


class RelayWait:
    """The wait for a relay that has begun."""

    def __init__(self, run: PhaseRun, nodes: tuple[str, ...]) -> None:
        """Begin.

        Args:
            run: the step of the nodes.
            nodes: those that take part, in the order of their places.
        """
        self._run = run
        self._awaited = _Awaited(run, nodes)
        self._reach = Reach(nodes)
        self._ask_at = time.monotonic() + _REPORT_SECONDS
        self._asked: set[str] = set()
        """The nodes that have said nothing since the last question."""

    def failures(self, deadline: float) -> dict[str, str]:
        """Wait until every node has the file, has failed, or is lost; return who has failed.

        Where most nodes cannot connect to the others, none is waited for: then it would be this
        host that sends to all of them.

        Args:
            deadline: the time at which nobody is waited for any more.
        """
        step, awaited, reach = self._run.step, self._awaited, self._reach
        while awaited.nodes and not (reach.why or step.ended) and time.monotonic() < deadline:
            fresh = awaited.news()
            for node in fresh:
                self._take(node)
            if not fresh:  # else an answer may be among what is still to be read
                self._ask()
        failed = {
            node: report.failure
            for node, report in self._run.answers.relayed.items()
            if report.failure
        }
        if not step.ended:
            failed.update(dict.fromkeys(awaited.nodes, reach.why or "it was not done in time"))
        return failed

    def _take(self, node: str) -> None:
        """Learn from what a node has said."""
        answers = self._run.answers
        self._asked.discard(node)
        if node in answers.relayed or node in answers.answered:
            self._awaited.nodes.discard(node)
        if node in answers.out_of_reach:
            self._reach.add(node, answers.out_of_reach[node])

    def _ask(self) -> None:
        """Give up the nodes that have not answered, and ask again, if it is time to."""
        if time.monotonic() < self._ask_at:
            return
        silent = self._asked & self._awaited.nodes
        for node in sorted(silent):
            _lose(self._run, node, _REPORT_SECONDS)
        self._asked = self._awaited.nodes - silent
        self._ask_at = time.monotonic() + _REPORT_SECONDS
        self._run.step.tell(agent_channel.REPORT)


def _lose(run: PhaseRun, node: str, seconds: float) -> None:
    run.watch.lose(node, ProblemCode.NO_ANSWER_SILENT, {"seconds": f"{seconds:g}"})
