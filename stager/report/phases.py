"""The last attempt of a job: the facts about each node, and the phases that it went through."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from bundle.protocol.events import (
    Event,
    JobBegins,
    JobEnds,
    NodesLeftOut,
    PhaseBegins,
    PhaseEnds,
)
from bundle.protocol.messages import Answer, LaunchAnswer, ProbeAnswer, Started

from ..diagnosis.process_exits import SIGNAL_NAMES, find_signal
from ..logs.job_record import JobRecord


def _list_moments(job: JobRecord) -> Iterator[tuple[float, Event]]:
    """Yield each event with its moment, none before its phase: a clock may be set back."""
    begun = job.begun or 0.0
    for record in job.records:
        at = max(begun, record.time or begun)
        if isinstance(record.event, PhaseBegins):
            begun = at
        yield at, record.event


# --- The facts about each node of a job: its Python, its packages, its network interface ---------


class Node(NamedTuple):
    """A node, as far as it has reported about itself."""

    name: str
    state: str
    exit_status: str
    problems: tuple[str, ...]
    python: str
    packages: Mapping[str, str]
    interface: str  # the network interface by which it reaches the first node
    address: str


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
    result = job.result or JobEnds(ok=False)
    last = result.problems.get(name, ())
    problems = _list_problems(name, answers) if left_out is None else left_out
    code = _find_exit_code(name, answers, result)
    is_bad, is_known = bool(problems), code == 0
    if job.result is not None:  # what is not ok is tried again sometimes; then the result counts
        is_bad, is_known = name in result.problems, True
    state = "failed" if any((is_bad, code)) else "ok" if answers and is_known else "not known"
    probe = job.probes.get(name, ProbeAnswer())
    return Node(
        name=name,
        state=state if left_out is None else "left out",
        exit_status=_describe_exit(code),
        problems=tuple(dict.fromkeys([*problems, *map(str, last)])),
        python=probe.python,
        packages={package: version or "" for package, version in probe.packages.items()},
        interface=probe.interface,
        address=probe.address,
    )


def _list_problems(name: str, answers: Sequence[Answer]) -> list[str]:
    every = [problem for answer in answers for problem in answer.problems]
    return [problem.sentence if problem.where == name else str(problem) for problem in every]


def _describe_exit(code: int | None) -> str:
    if code is None:
        return ""
    name = SIGNAL_NAMES.get(find_signal(code))
    return f"{code} ({name})" if name else str(code)


def _find_exit_code(name: str, answers: Sequence[Answer], result: JobEnds) -> int | None:
    """Return the exit status of a node's ranks: of several tasks the first that failed."""
    codes = [answer.exit_code for answer in answers if isinstance(answer, LaunchAnswer)]
    code = next(filter(None, codes), codes[-1] if codes else None)
    return (result.exit_codes or {}).get(name, code)


# --- The phases of a job, with the times of each node in each of them ----------------------------

PLACE, LAUNCH, TRAIN = "place", "launch", "train"
STAGING = ("preflight", PLACE, "unpack", "probe", "deep", LAUNCH)
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
ENDED, FAILED, SILENT, OPEN = "ended", "failed", "silent", "open"  # silent: without an answer
STATES = {FAILED: "failed", SILENT: "no answer", OPEN: "not ended"}


class PhaseSpan(NamedTuple):
    """A node in a phase."""

    phase: str
    begin: float  # a moment, as :func:`_list_moments` counts
    end: float  # of an open one, the moment of the last event
    state: str = ENDED

    @property
    def seconds(self) -> float:
        """Its length in seconds."""
        return self.end - self.begin


class NodePhases(NamedTuple):
    """The phases of one node, in order of time."""

    node: str
    spans: tuple[PhaseSpan, ...] = ()

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


class JobPhases(NamedTuple):
    """The phases of all nodes, in the job's order; they begin with the job."""

    rows: tuple[NodePhases, ...] = ()
    begin: float = 0.0
    end: float = 0.0

    @property
    def spans(self) -> list[PhaseSpan]:
        """The phases of all nodes in one list."""
        return [span for row in self.rows for span in row.spans]


def find_phases(job: JobRecord, now: float | None = None) -> JobPhases:
    """Return the phases of the nodes; those of a running job last until ``now``."""
    collector = _Collector()
    moments = list(_list_moments(job))
    if not moments:
        return JobPhases()
    for at, event in moments:
        collector.take(at, event)
    end = max(now or 0.0, *(at for at, _ in moments))
    collector.close(end, OPEN)
    rows = (NodePhases(node, tuple(spans)) for node, spans in collector.spans.items())
    return JobPhases(tuple(rows), moments[0][0], end)


class _Collector:
    def __init__(self) -> None:
        self.spans: dict[str, list[PhaseSpan]] = {}
        self._there: list[str] = []
        self._begin("", 0.0)

    def _begin(self, phase: str, at: float) -> None:
        self._phase, self._since = phase, at
        self._answers: dict[str, tuple[float, bool]] = {}
        self._started: dict[str, float] = {}

    def take(self, at: float, event: Event) -> None:
        if isinstance(event, JobBegins):
            self._there = list(dict.fromkeys(event.nodes))
            self.spans = {node: [] for node in self._there}
        elif isinstance(event, PhaseBegins):
            self.close(at, OPEN)
            self._begin(event.phase, at)
        elif isinstance(event, PhaseEnds):
            self.close(at, SILENT)
        elif isinstance(event, NodesLeftOut):
            self._there = [node for node in self._there if node not in event.nodes]
        elif isinstance(event, Started):
            self._started.setdefault(event.node, at)
        elif isinstance(event, Answer):
            self._take_answer(at, event)

    def _take_answer(self, at: float, answer: Answer) -> None:
        # The answers of an all-reduce have the name of a launch.
        if answer.event == (LAUNCH if self._phase == "all_reduce" else self._phase):
            # Each task of a launch has its own answer; an unpacking is tried again.
            _, was_good = self._answers.get(answer.node, (at, True))
            self._answers[answer.node] = at, answer.ok and (was_good or answer.event != LAUNCH)

    def close(self, at: float, silent: str) -> None:
        """End the phase; ``silent`` is the state of a node without an answer."""
        if self._phase in PHASES:
            for node in self.spans:
                if node in self._there or node in self._answers:
                    self._add_spans(node, at, silent)
        self._begin("", at)

    def _add_spans(self, node: str, end: float, silent: str) -> None:
        end, state = max(self._since, end), silent
        if self._phase == PLACE:  # decided by the driver alone
            state = ENDED if silent == SILENT else silent
        elif node in self._answers:
            stop, is_good = self._answers[node]
            end, state = max(self._since, stop), ENDED if is_good else FAILED
        if self._phase == LAUNCH and node in self._started:
            started = min(self._started[node], end)
            self.spans[node] += [
                PhaseSpan(LAUNCH, self._since, started),
                PhaseSpan(TRAIN, started, end, state),
            ]
        else:
            self.spans[node].append(PhaseSpan(self._phase, self._since, end, state))
