"""Waiting for the nodes of a relay: one is looked at only when something has come from it.

A node that says nothing keeps nobody waiting: its agent may be stopped or wait for a disk, and its
network may be gone, which Slurm notices minutes later. A node that is merely slow says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable

from ...channel import agent_channel
from .phase_run import FIRST_SECONDS as _FIRST_SECONDS
from .phase_run import NEXT_SECONDS as _NEXT_SECONDS
from .phase_run import PhaseRun
from .relay_reach import Reachability

_REPORT_SECONDS = 30.0
"""Time between two questions to the nodes that do not have the file yet; one that has not answered
by the next question is lost. So a node that falls silent is noticed within a minute."""


class _Awaited:
    """The nodes still awaited; the caller removes those that are done."""

    def __init__(self, run: PhaseRun, nodes: Iterable[str]) -> None:
        self._run = run
        self.nodes = set(nodes)
        self._lost: Collection[str] = ()

    def news(self) -> list[str]:
        run = self._run
        run.step.pump(run.answers.take)
        lost = run.lost_nodes()
        if lost is not self._lost:
            self.nodes.difference_update(lost)
            self._lost = lost
        return run.answers.heard()


def await_listeners(run: PhaseRun, deadline: float) -> set[str]:
    """Wait until the agents listen, have failed, or are lost; return the silent ones."""
    awaited = _Awaited(run, run.answers.nodes)
    until = min(deadline, time.monotonic() + _FIRST_SECONDS)
    while awaited.nodes and not run.step.ended:
        late = time.monotonic() >= until
        heard = awaited.news()
        if heard:
            awaited.nodes.difference_update(heard)
            until = min(deadline, time.monotonic() + _patience(run))
        elif late:  # and nothing has come while this process itself stood still
            break
    return set() if run.step.ended else awaited.nodes


def settle_late(run: PhaseRun, silent: Collection[str]) -> dict[str, str]:
    """Return the nodes that listened too late, and why they have no file; the others are lost."""
    failed = {}
    for node in sorted(silent):
        if node in run.answers.ready:
            failed[node] = f"it began to listen more than {_patience(run):g} s after the others"
        elif node not in run.answers.answered and node not in run.lost_nodes():
            _lose(run, node, _patience(run))
    return failed


class SourceEnded(Exception):
    """The source of a relay has ended, and nodes still lack the file; its text says why."""


class RelayWait:
    """The wait for a relay that has begun."""

    def __init__(
        self, run: PhaseRun, nodes: tuple[str, ...], source_failure: Callable[[], str]
    ) -> None:
        """Wait for nodes in order of place; ``source_failure`` is empty while the source runs."""
        self._source_failure = source_failure
        self._run = run
        self._awaited = _Awaited(run, nodes)
        self._reachability = Reachability(len(nodes))
        self._ask_at = time.monotonic() + _REPORT_SECONDS
        self._asked: set[str] = set()
        """The nodes that have said nothing since the last question."""

    def failures(self, deadline: float) -> dict[str, str]:
        """Wait until every node has the file, has failed, or is lost; return why nodes failed.

        The wait ends at once where most nodes cannot connect to the others: this host would have
        to send to all of them.

        Raises:
            SourceEnded: the source has ended, and nodes still lack the file.
        """
        step, awaited, reached = self._run.step, self._awaited, self._reachability
        while awaited.nodes and not (reached.why or step.ended) and time.monotonic() < deadline:
            heard = awaited.news()
            for node in heard:
                self._take(node)
            if not heard:  # else an answer may be among what is still to be read
                self._ask()
                self._refuse_without_source()
        failed = {
            node: report.failure
            for node, report in self._run.answers.relayed.items()
            if report.failure
        }
        if not step.ended:
            failed.update(dict.fromkeys(awaited.nodes, reached.why or "it did not finish in time"))
        return failed

    def _refuse_without_source(self) -> None:
        why = self._source_failure() if self._awaited.nodes else ""
        if why:
            raise SourceEnded(why)

    def _take(self, node: str) -> None:
        answers = self._run.answers
        self._asked.discard(node)
        if node in answers.relayed or node in answers.answered:
            self._awaited.nodes.discard(node)
        if node in answers.out_of_reach:
            self._reachability.add(node, answers.out_of_reach[node])

    def _ask(self) -> None:
        if time.monotonic() < self._ask_at:
            return
        silent = self._asked & self._awaited.nodes
        for node in sorted(silent):
            _lose(self._run, node, _REPORT_SECONDS)
        self._asked = self._awaited.nodes - silent
        self._ask_at = time.monotonic() + _REPORT_SECONDS
        self._run.step.tell(agent_channel.REPORT)


def _patience(run: PhaseRun) -> float:
    """Return the time for each further agent once one listens; then the transfer begins."""
    return _FIRST_SECONDS if run.starts_slowly else _NEXT_SECONDS


def _lose(run: PhaseRun, node: str, seconds: float) -> None:
    run.lose_silent(node, seconds)
