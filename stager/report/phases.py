"""The last attempt of a job: the facts about each node, and the phases that it went through."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from bundle.protocol.events import (
    Event,
    FileSent,
    JobBegins,
    NodesLeftOut,
    PhaseBegins,
    PhaseEnds,
)
from bundle.protocol.messages import Answer, LaunchAnswer, ProbeAnswer, Started
from bundle.protocol.problem import Problem

from ..logs.job_record import JobRecord

# --- The events of a job, each with a moment even where it has no time ---------------------------

TIMED = (Answer, PhaseEnds, FileSent)
"""Events that tell how long something took."""


def list_moments(job: JobRecord) -> Iterator[tuple[float, Event]]:
    """Yield each event with its moment in seconds: since the epoch, or since the beginning.

    Events of older drivers have no time. A phase's length is told at its end, though, and a node's
    with its answer, so one phase is put after the other. A clock that was set back while the job
    ran makes no phase end before it has begun.
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


def describe_nodes(job: JobRecord) -> tuple[Node, ...]:
    """Return every node, in the job's order."""
    answers: dict[str, list[Answer]] = {node: [] for node in job.nodes}
    for answer in job.find_events(Answer):
        if answer.node in answers:
            answers[answer.node].append(answer)
    left_out: dict[str, Sequence[str]] = {}
    for event in job.find_events(NodesLeftOut):
        left_out |= event.nodes
    return tuple(
        _describe_node(job, name, listed, left_out.get(name)) for name, listed in answers.items()
    )


def _describe_node(
    job: JobRecord, name: str, answers: Sequence[Answer], left_out: Sequence[str] | None
) -> Node:
    # What is not ok is tried again sometimes; what counts then is the result.
    problems = left_out
    if problems is None:
        problems = [
            _describe_problem(problem, name) for answer in answers for problem in answer.problems
        ]
    codes = [answer.exit_code for answer in answers if isinstance(answer, LaunchAnswer)]
    # Of several tasks the first that failed.
    exit_code = next(filter(None, codes), codes[-1] if codes else None)
    is_bad = bool(problems)
    if (result := job.result) is not None:
        is_bad = name in result.problems
        problems = [*problems, *map(str, result.problems.get(name, ()))]
        exit_code = (result.exit_codes or {}).get(name, exit_code)
    if left_out is not None:
        state = LEFT_OUT
    elif is_bad or exit_code:
        state = NODE_FAILED
    else:
        state = WELL if answers and (result is not None or exit_code == 0) else NOT_YET
    probes = [answer for answer in answers if isinstance(answer, ProbeAnswer)]
    probe = probes[-1] if probes else ProbeAnswer()
    return Node(
        name=name,
        state=state,
        python=probe.python,
        packages={package: version or "" for package, version in probe.packages.items()},
        interface=probe.interface,
        address=probe.address,
        exit_code=exit_code,
        problems=tuple(dict.fromkeys(problems)),
    )


def _describe_problem(problem: Problem, node: str) -> str:
    return problem.sentence if problem.where == node else str(problem)


def find_differences(every: tuple[Node, ...]) -> dict[str, dict[str, list[str]]]:
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


# --- The phases of a job, with the times of each node in each of them ----------------------------

PLACE, LAUNCH, TRAIN = "place", "launch", "train"
STAGING = ("preflight", PLACE, "unpack", "probe", "deep", LAUNCH)
"""The phases before the ranks run, in order."""
PHASES = {
    "preflight": ("preflight", "until the node had reported what it has and what it lacks"),
    PLACE: ("plan", "planning what to send"),
    "unpack": ("unpack", "sending and unpacking, until the environment was there"),
    "probe": ("probe", "until it was checked"),
    "deep": ("close look", "until every file was read again"),
    LAUNCH: ("launch", "until the ranks' launcher was started"),
    TRAIN: ("train", "until it had ended, its imports included"),
    "all_reduce": ("all-reduce", "until all ranks had exchanged data"),
    "clean": ("clean", "until old environments were gone"),
}
"""The phases in order, each with its title and its meaning."""
ENDED, FAILED, SILENT, OPEN = "ended", "failed", "silent", "open"
STATES = {FAILED: "failed", SILENT: "no answer", OPEN: "not ended"}
"""The states that are no good end, in words."""
_ANSWERED_BY = {"all_reduce": LAUNCH}
"""Phases whose answers have another's name."""


@dataclass(frozen=True, kw_only=True)
class PhaseSpan:
    """A node in a phase."""

    phase: str
    """One of :data:`PHASES`."""
    begin: float
    """The moment of its beginning, as :func:`list_moments` counts."""
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
    def has_failed(self) -> bool:
        """Return whether a phase failed there."""
        return any(span.state in (FAILED, SILENT) for span in self.spans)

    @property
    def sign(self) -> str:
        """A sign where something failed, or has no end; else empty."""
        if self.has_failed:
            return "\u2717 "
        return "\u2026 " if any(span.state == OPEN for span in self.spans) else ""

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
    def spans(self) -> list[PhaseSpan]:
        """The phases of all nodes in one list."""
        return [span for row in self.rows for span in row.spans]

    @property
    def running(self) -> float | None:
        """The moment when ranks ran on all nodes that came so far; None where they never did."""
        return max((span.begin for span in self.spans if span.phase == TRAIN), default=None)


def find_phases(job: JobRecord, now: float | None = None) -> JobPhases:
    """Return the phases of the nodes; those of a running job last until ``now``."""
    collected = _Collected()
    moments = []
    for at, event in list_moments(job):
        moments.append(at)
        collected.take(at, event)
    if not moments:
        return JobPhases()
    end = max(moments)
    if now is not None and job.begun is not None:
        end = max(end, now)
    collected.close(end, OPEN)
    rows = (NodePhases(node=node, spans=tuple(spans)) for node, spans in collected.spans.items())
    return JobPhases(rows=tuple(rows), begin=moments[0], end=end)


@dataclass
class _Phase:
    name: str
    begin: float
    answers: dict[str, tuple[float, bool]] = field(default_factory=dict)
    """The moment of each node's answer, and whether it was good."""
    started: dict[str, float] = field(default_factory=dict)

    def take(self, at: float, event: Event) -> None:
        if isinstance(event, Started):
            self.started.setdefault(event.node, at)
        elif isinstance(event, Answer) and event.event == _ANSWERED_BY.get(self.name, self.name):
            # Each task of a launch has its own answer; an unpacking is tried again.
            _, was_good = self.answers.get(event.node, (at, True))
            self.answers[event.node] = at, event.ok and (was_good or event.event != LAUNCH)

    def find_spans(self, node: str, end: float, silent: str) -> list[PhaseSpan]:
        """Return a node's spans; ``silent`` is its state without an answer."""
        if self.name == PLACE:  # decided by the driver alone
            return [_span(PLACE, self.begin, end, ENDED if silent == SILENT else silent)]
        stop, state = end, silent
        if node in self.answers:
            stop, is_good = self.answers[node]
            state = ENDED if is_good else FAILED
        if self.name == LAUNCH and node in self.started:
            started = min(self.started[node], stop)
            return [_span(LAUNCH, self.begin, started), _span(TRAIN, started, stop, state)]
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
        for node in self.spans:
            if node in self._there or node in phase.answers:
                self.spans[node] += phase.find_spans(node, at, silent)


def _span(phase: str, begin: float, end: float, state: str = ENDED) -> PhaseSpan:
    return PhaseSpan(phase=phase, begin=begin, end=max(begin, end), state=state)
