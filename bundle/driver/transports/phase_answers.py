"""The answers that the agents of one step have given so far."""

from __future__ import annotations

import collections
import time
from collections.abc import Collection, KeysView, Mapping
from dataclasses import replace

from ...protocol.events import FramesLost, RankOutput, read_agent_line
from ...protocol.messages import AgentEvent, Answer, OutOfReach, Ready, Relayed, Relaying, Unpacking
from ...protocol.reports import LaunchAnswer
from .transport import OnEvent, Requests


class PhaseAnswers:
    """The answers of the tasks of one step, taken in the order in which they come.

    Attributes:
        phase: the phase that is asked for.
        held: True while the tasks that are ready wait for permission to begin.
        ready: the nodes that wait for it.
        answered: how many tasks of each node have answered.
        bad: the nodes of which a task has failed.
        failed: those of them whose ranks were not told to end, the first of them first.
        step_id: the id of the step, as an agent that is ready gives it.
        listening: the agents that are ready to take part in a relay, and where they listen.
        out_of_reach: whom a node cannot connect to in a relay, with the reasons.
        relayed: the outcome of a relay on each node.
    """

    def __init__(self, requests: Requests, tasks: int, on_event: OnEvent, phase: str) -> None:
        self._requests, self._tasks, self._on_event = requests, tasks, on_event
        self.phase = phase
        self.held = False
        self.ready: set[str] = set()
        self.answered: dict[str, int] = {}
        self.bad: set[str] = set()
        self.failed: list[str] = []
        self.step_id = ""
        self.listening: dict[str, Ready] = {}
        self.out_of_reach: dict[str, dict[str, str]] = {}
        self.relayed: dict[str, Relayed] = {}
        self._unpacking: dict[str, Unpacking] = {}
        self._heard: list[str] = []
        self._done: dict[str, set[int]] = {}
        self._open = dict.fromkeys(requests)
        """The nodes of which a task has not answered; a dictionary keeps their order."""
        self._unknown: collections.Counter[str] = collections.Counter()
        self._first_end: float | None = None
        """The time at which the first node had ended well."""

    @property
    def nodes(self) -> KeysView[str]:
        """The nodes that are asked, in their order."""
        return self._requests.keys()

    def heard(self) -> list[str]:
        """Return the nodes that an event has come from since the last call, once for each."""
        heard, self._heard = self._heard, []
        return heard

    def unpacking(self) -> dict[str, Unpacking]:
        """Return the latest report of each node that has sent one since the last call."""
        reports, self._unpacking = self._unpacking, {}
        return reports

    def complete(
        self, lost: Collection[str], gone: Mapping[str, Collection[int]] | None = None
    ) -> bool:
        """Return whether every task has answered or has gone, or its node is lost."""
        gone = gone or {}
        # Called after each piece of input, so it stops at the first node that is still awaited.
        for node in self._open:
            if node in lost:
                continue
            if len({*self._done.get(node, ()), *gone.get(node, ())}) < self._tasks:
                return False
        return True

    def report_losses(self, lost: Mapping[str, int]) -> None:
        """Report the number of lost frames of each source, ``node:task``."""
        for source in {**lost, **self._unknown}:
            node, _, task = source.rpartition(":")
            frames, unknown = lost.get(source, 0), self._unknown.get(source, 0)
            self._on_event(FramesLost(node, task, frames, unknown))
        self._unknown.clear()

    def late(self, patience: int) -> list[str]:
        """Return the nodes that still run so long after the first has ended; 0 for no limit."""
        if not patience or self._first_end is None:
            return []
        if time.monotonic() < self._first_end + patience:
            return []
        return [node for node in self._requests if self.answered.get(node, 0) < self._tasks]

    def take(self, source: str, line: str) -> None:
        """Take one message of one task."""
        node, _, task = source.rpartition(":")
        event = read_agent_line(line.encode(errors="replace"), node, self.phase)
        if node not in self._requests:
            if isinstance(event, RankOutput):  # else a late answer of one that is left out already
                self._unknown[source] += 1
        elif isinstance(event, Unpacking):
            # Not heard from: nodes that are ready report, too, and nobody waits longer for others.
            self._unpacking[node] = event
        elif isinstance(event, (Ready, OutOfReach, Relaying, Relayed)):
            self._keep(node, event)
        else:
            self._pass_on(node, task, event)

    def _keep(self, node: str, event: Ready | OutOfReach | Relaying | Relayed) -> None:
        """Keep a message that is for the driver only."""
        self._heard.append(node)
        if isinstance(event, Ready):
            self.ready.add(node)
            self.step_id = event.step
            self.listening[node] = event
        elif isinstance(event, OutOfReach):
            self.out_of_reach[node] = dict(event.nodes)
        elif isinstance(event, Relayed):
            self.relayed[node] = event

    def _pass_on(self, node: str, task: str, event: AgentEvent) -> None:
        if not isinstance(event, RankOutput):
            self._heard.append(node)
        if isinstance(event, Answer):
            number = int(task) if task.isdigit() else None
            self._add(node, number or 0, ok=event.ok)
            if not event.ok and not (isinstance(event, LaunchAnswer) and event.stopped):
                self.failed.append(node)
            event = replace(event, task=number)
        self._on_event(event)

    def _add(self, node: str, task: int, *, ok: bool) -> None:
        self.answered[node] = self.answered.get(node, 0) + 1
        done = self._done.setdefault(node, set())
        done.add(task)
        if len(done) >= self._tasks:
            self._open.pop(node, None)
        if not ok:
            self.bad.add(node)
        elif self._first_end is None and self.answered[node] >= self._tasks:
            self._first_end = time.monotonic()
