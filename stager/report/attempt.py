"""The last attempt of a job: its events, nodes and phases."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from bundle.protocol.events import (
    Event,
    FileSent,
    JobBegins,
    JobEnds,
    NodesLeftOut,
    PhaseBegins,
    PhaseEnds,
)
from bundle.protocol.messages import Answer, ProbeAnswer
from bundle.protocol.problem import Problem
from bundle.protocol.reports import LaunchAnswer, Started

from ..logs.job_record import JobRecord

# --- The last attempt of a job by its events, each with a moment even where it has no time -------

TIMED = (Answer, PhaseEnds, FileSent)
"""Events that tell how long something took."""


def moments(job: JobRecord) -> Iterator[tuple[float, Event]]:
    """Yield each event with its moment in seconds: since the epoch, or since the beginning.

    Events of older drivers have no time. A phase's length is told at its end, though, and a
    node's with its answer, so one phase is put after the other. A clock that was set back
    while the job ran makes no phase end before it has begun.
    """
    begun = now = job.begun or 0.0
    for record in job.records:
        at = record.time
        if at is None:
            at = now if not isinstance(record.event, TIMED) else begun + record.event.seconds
        at = max(at, begun)
        now = max(now, at)
        if isinstance(record.event, PhaseBegins):
            begun = at
        yield at, record.event


# --- The facts about each node of a job: its Python, its packages, its network interface ---------

WELL, NODE_FAILED, LEFT_OUT, NOT_YET = "ok", "failed", "left out", "not known"


@dataclass(frozen=True, kw_only=True)
class Node:
    """A node, as far as it has reported about itself."""

    name: str
    """Its name."""
    state: str
    """``ok``, ``failed``, ``left out`` or ``not known``."""
    python: str = ""
    """The version of its Python."""
    packages: Mapping[str, str] = field(default_factory=dict)
    """Versions by name, of the packages it has."""
    interface: str = ""
    """The network interface by which it reaches the first node."""
    address: str = ""
    """Its address on it."""
    exit_code: int | None = None
    """The exit status of the ranks there."""
    problems: tuple[str, ...] = ()
    """Its problems, a line each."""

    @property
    def ending(self) -> str:
        """The exit status, with a signal's name."""
        if self.exit_code is None:
            return ""
        number = -self.exit_code if self.exit_code < 0 else self.exit_code - 128
        try:
            return f"{self.exit_code} ({signal.Signals(number).name})"
        except ValueError:
            return str(self.exit_code)


def nodes(job: JobRecord) -> tuple[Node, ...]:
    """Return every node, in the job's order."""
    reports = {node: _Learned() for node in job.nodes}
    for record in job.records:
        event = record.event
        if isinstance(event, NodesLeftOut):
            for name in reports.keys() & event.nodes.keys():
                reports[name].leave_out(event.nodes[name])
        elif isinstance(event, Answer) and event.node in reports:
            reports[event.node].take(event)
    for name, learned in reports.items():
        learned.conclude(job.result, name)
    return tuple(learned.node(name, job.result) for name, learned in reports.items())


def apart(every: tuple[Node, ...]) -> dict[str, dict[str, list[str]]]:
    """Return the packages whose versions differ: the nodes by package and version.

    Nodes that have said nothing of packages do not count.
    """
    checked = [node for node in every if node.packages]
    different: dict[str, dict[str, list[str]]] = {}
    for package in sorted({name for node in checked for name in node.packages}):
        for node in checked:
            version = node.packages.get(package, "")
            different.setdefault(package, {}).setdefault(version, []).append(node.name)
    return {package: versions for package, versions in different.items() if len(versions) > 1}


@dataclass
class _Learned:
    probe: ProbeAnswer | None = None
    exit_code: int | None = None
    out: bool = False
    bad: bool = False
    heard: bool = False
    problems: dict[str, None] = field(default_factory=dict)

    def take(self, answer: Answer) -> None:
        self.heard = True
        if isinstance(answer, ProbeAnswer):
            self.probe = answer
        if isinstance(answer, LaunchAnswer):
            # Of several tasks the first that failed.
            self.exit_code = self.exit_code or answer.exit_code
        # What is not ok is tried again sometimes; what counts then is the result.
        for problem in answer.problems:
            self.problems[_shown(problem, answer.node)] = None

    def leave_out(self, why: Sequence[str]) -> None:
        self.out = True
        self.problems = dict.fromkeys(why)

    def conclude(self, result: JobEnds | None, name: str) -> None:
        if result is None:
            return
        self.bad = name in result.problems
        for problem in result.problems.get(name, ()):
            self.problems[_shown(problem, "")] = None
        code = (result.exit_codes or {}).get(name)
        self.exit_code = self.exit_code if code is None else code

    def node(self, name: str, result: JobEnds | None) -> Node:
        over = result is not None
        failed = self.bad or bool(self.exit_code) or (bool(self.problems) and not over)
        probe = self.probe or ProbeAnswer()
        return Node(
            name=name,
            state=_state(self, failed=failed, over=over),
            python=probe.python,
            packages={package: version or "" for package, version in probe.packages.items()},
            interface=probe.interface,
            address=probe.address,
            exit_code=self.exit_code,
            problems=tuple(self.problems),
        )


def _state(learned: _Learned, *, failed: bool, over: bool) -> str:
    if learned.out:
        return LEFT_OUT
    if failed:
        return NODE_FAILED
    return WELL if learned.heard and (over or learned.exit_code == 0) else NOT_YET


def _shown(problem: Problem, node: str) -> str:
    return problem.without_place if problem.where == node else str(problem)


# --- The phases of a job, with the times of each node in each of them ----------------------------

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
    """The moment of its beginning, as :func:`moments` counts."""
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


def job_phases(job: JobRecord, now: float | None = None) -> JobPhases:
    """Return the phases of the nodes; those of a running job last until ``now``."""
    collected = _Collected()
    begin = end = None
    for at, event in moments(job):
        begin = at if begin is None else begin
        end = at if end is None else max(at, end)
        collected.take(at, event)
    if begin is None or end is None:
        return JobPhases()
    end = end if now is None or job.begun is None else max(end, now)
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
