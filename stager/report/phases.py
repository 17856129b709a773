"""The phases of a job, with the times of each node in each of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from bundle.protocol.events import Event, JobBegins, NodesLeftOut, PhaseBegins, PhaseEnds
from bundle.protocol.messages import Answer
from bundle.protocol.reports import Started

from .attempt import Attempt

PLACE, LAUNCH, TRAIN = "place", "launch", "train"
STAGING = ("preflight", PLACE, "unpack", "probe", "deep", LAUNCH)
"""The phases before the ranks run, in order."""
PHASES = (*STAGING, TRAIN, "all_reduce", "clean")
ENDED, FAILED, SILENT, OPEN = "ended", "failed", "silent", "open"
_ANSWERED_BY = {"all_reduce": LAUNCH}
"""Phases whose answers have another's name."""


@dataclass(frozen=True, kw_only=True)
class PhaseSpan:
    """A node in a phase."""

    phase: str
    """One of :data:`PHASES`."""
    begin: float
    """The moment of its beginning, as :meth:`Attempt.moments` counts."""
    end: float
    """The moment of its end, or of the last event."""
    state: str = ENDED
    """``ended``; ``failed``: with a problem; ``silent``: without an answer; ``open``: not yet."""

    @property
    def seconds(self) -> float:
        """Its length in seconds."""
        return self.end - self.begin


@dataclass(frozen=True, kw_only=True)
class NodePhases:
    """The phases of one node."""

    node: str
    """Its name."""
    spans: tuple[PhaseSpan, ...] = ()
    """In order of time."""

    @property
    def failed(self) -> bool:
        """Return whether a phase failed there."""
        return any(span.state in (FAILED, SILENT) for span in self.spans)

    @property
    def staging(self) -> float:
        """Seconds until its ranks ran."""
        return sum(span.seconds for span in self.spans if span.phase in STAGING)


@dataclass(frozen=True, kw_only=True)
class JobPhases:
    """The phases of all nodes."""

    rows: tuple[NodePhases, ...] = ()
    """One a node, in the job's order."""
    begin: float = 0.0
    """The moment of the job's beginning."""
    end: float = 0.0
    """The moment of its end, or of the last event."""

    @property
    def running(self) -> float | None:
        """The moment when ranks ran on all nodes that came so far; None where they never did."""
        begins = [span.begin for row in self.rows for span in row.spans if span.phase == TRAIN]
        return max(begins, default=None)


def job_phases(attempt: Attempt, now: float | None = None) -> JobPhases:
    """Return the phases of the nodes; those of a running job last until ``now``."""
    collected = _Collected()
    begin = end = None
    for at, event in attempt.moments():
        begin = at if begin is None else begin
        end = at if end is None else max(at, end)
        collected.take(at, event)
    if begin is None or end is None:
        return JobPhases()
    end = end if now is None or attempt.first is None else max(end, now)
    collected.close(end, OPEN)
    rows = (NodePhases(node=node, spans=tuple(spans)) for node, spans in collected.spans.items())
    return JobPhases(rows=tuple(rows), begin=begin, end=end)


@dataclass
class _NodeAnswer:
    at: float
    ok: bool


@dataclass
class _Phase:
    name: str
    begin: float
    answers: dict[str, _NodeAnswer] = field(default_factory=dict)
    started: dict[str, float] = field(default_factory=dict)

    def take(self, at: float, event: Event) -> None:
        if isinstance(event, Started):
            self.started.setdefault(event.node, at)
        elif isinstance(event, Answer) and event.event == _ANSWERED_BY.get(self.name, self.name):
            before = self.answers.get(event.node)
            # Each task of a launch has its own answer; an unpacking is tried again.
            good = before is None or before.ok or event.event != LAUNCH
            self.answers[event.node] = _NodeAnswer(at, event.ok and good)

    def of(self, node: str, end: float, silent: str) -> list[PhaseSpan]:
        """Return a node's spans; ``silent`` is its state without an answer."""
        if self.name == PLACE:  # decided by the driver alone
            return [_span(PLACE, self.begin, end, ENDED if silent == SILENT else silent)]
        answer = self.answers.get(node)
        if answer is None:
            stop, state = end, silent
        else:
            stop, state = answer.at, ENDED if answer.ok else FAILED
        if self.name == LAUNCH and node in self.started:
            started = min(self.started[node], stop)
            return [
                _span(LAUNCH, self.begin, started, ENDED),
                _span(TRAIN, started, stop, state),
            ]
        return [_span(self.name, self.begin, stop, state)]


@dataclass
class _Collected:
    spans: dict[str, list[PhaseSpan]] = field(default_factory=dict)
    _there: list[str] = field(default_factory=list)
    _phase: _Phase | None = None

    def take(self, at: float, event: Event) -> None:
        if isinstance(event, JobBegins):
            self._there = list(dict.fromkeys(event.nodes))
            self.spans = {node: [] for node in self._there}
        elif isinstance(event, PhaseBegins):
            self.close(at, OPEN)
            self._phase = _Phase(event.phase, at)
        elif isinstance(event, PhaseEnds):
            self.close(at, SILENT)
        elif isinstance(event, NodesLeftOut):
            self._there = [node for node in self._there if node not in event.nodes]
        elif self._phase is not None:
            self._phase.take(at, event)

    def close(self, at: float, silent: str) -> None:
        phase, self._phase = self._phase, None
        if phase is None or phase.name not in PHASES:
            return
        for node in self._asked(phase):
            self.spans[node] += phase.of(node, at, silent)

    def _asked(self, phase: _Phase) -> Iterable[str]:
        return [node for node in self.spans if node in self._there or node in phase.answers]


def _span(phase: str, begin: float, end: float, state: str) -> PhaseSpan:
    return PhaseSpan(phase=phase, begin=begin, end=max(begin, end), state=state)
