"""Failures of nodes: which count, in which job, how often on each node."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from bundle.protocol.codec import AnyText
from bundle.protocol.counts import counted
from bundle.protocol.enumerations import Ending, FailureClass, NodeFault
from bundle.protocol.events import JobEnds
from bundle.protocol.problem import Problem

from ..diagnosis.failure import FirstFailure

# --- An incident: what failed on one node in one job, taken from the end of that job -------------

MAX_CAUSE = 300
"""Characters of a cause that are kept."""


@dataclass(frozen=True, kw_only=True)
class Incident:
    """A failure that is a node's."""

    node: str
    """The node."""
    fault: NodeFault
    """The kind of failure."""
    code: str
    """The code of the far side's problem; empty where a rank showed it."""
    cause: AnyText
    """The cause in words, without anything that a program has written."""
    time: float
    """When the job ended, in seconds since the epoch."""
    job_id: str
    """The job."""
    project: AnyText
    """The job's name, which is the project's."""
    cluster: AnyText = ""
    """The node's cluster; empty where that is unknown, or it is not Slurm's."""


@dataclass(frozen=True, kw_only=True)
class EndedJob:
    """A job that is over, as far as it tells something about nodes."""

    job_id: str
    """Slurm's number."""
    project: str
    """Its name."""
    ended: float
    """When it ended, in seconds since the epoch."""
    nodes: tuple[str, ...]
    """All its nodes, with those that were left out."""
    result: JobEnds
    """The driver's last event."""
    left_out: Mapping[str, Sequence[Problem]]
    """The problems of nodes that it went on without."""
    first: FirstFailure | None = None
    """What failed first; None where nothing did."""
    cluster: str = ""
    """The name of its cluster; empty where that is unknown, or it is not Slurm's."""


def incidents_of(job: EndedJob) -> tuple[Incident, ...]:
    """Return what the nodes of a job are to blame for, each kind of failure once for each node.

    A failure that more than half of the nodes share is the job's, and so is one that tells nothing
    about a node in a job of so few.
    """
    found: dict[tuple[str, NodeFault], tuple[str, str]] = {}
    for node, fault, code, cause in _suspicions(job):
        if node in job.nodes:
            found.setdefault((node, fault), (code, cause))
    faults = [fault for _, fault in found]
    most = max(len(job.nodes) / 2, 1)
    return tuple(
        Incident(
            node=node,
            fault=fault,
            code=code,
            cause=cause[:MAX_CAUSE],
            time=job.ended,
            job_id=job.job_id,
            project=job.project,
            cluster=job.cluster,
        )
        for (node, fault), (code, cause) in found.items()
        if faults.count(fault) <= most
    )


def _suspicions(job: EndedJob) -> Iterator[tuple[str, NodeFault, str, str]]:
    """Yield the faults of nodes, which may be the job's after all: node, fault, code, cause."""
    yield from _problems_of_nodes(job, job.left_out)
    result = job.result
    if result.interrupted or result.ended_by not in ("", Ending.NODE_FAILURE):
        return  # what went wrong at last may follow from that
    if not result.of_driver:
        yield from _problems_of_nodes(job, result.problems)
    first = job.first
    # Of the failures of ranks only this one is a node's (a faulty GPU or memory): no program can
    # cause it. A full disk may be a file system that all nodes share.
    if first is not None and first.problem is None and first.kind is FailureClass.NODE_FAILURE:
        yield first.node, NodeFault.NODE_FAILURE, "", first.meaning or "node failure"


def _problems_of_nodes(
    job: EndedJob, problems: Mapping[str, Sequence[Problem]]
) -> Iterator[tuple[str, NodeFault, str, str]]:
    for node, listed in problems.items():
        for problem in listed:
            row = problem.code.row
            if row.node_fault is not None and row.least_nodes <= len(job.nodes):
                cause = "; ".join(filter(None, (problem.what, problem.why)))
                yield node, row.node_fault, str(problem.code), cause


# --- The incidents of each node, counted and in words --------------------------------------------

DAYS = 7
"""Days that count where nothing else is asked for."""
MAX_NAMED = 5
"""Nodes that a command names before it refers to ``stager nodes``."""


@dataclass(frozen=True, kw_only=True)
class FaultHistory:
    """One kind of failure of one node."""

    fault: NodeFault
    """The kind."""
    times: int
    """The number of jobs that it hit."""
    last: float
    """When the last of them ended, in seconds since the epoch."""
    job_id: str
    """That job."""
    project: AnyText
    """Its name."""
    code: str
    """The code of the problem in it; empty where a rank showed the failure."""
    cause: AnyText
    """Its cause, in words."""

    def __str__(self) -> str:
        """Return it with its number: ``disk full 3 times``."""
        return f"{self.fault.words} {'once' if self.times == 1 else f'{self.times} times'}"


@dataclass(frozen=True, kw_only=True)
class NodeHistory:
    """A node that failed."""

    node: str
    """The node."""
    cluster: AnyText
    """Its cluster; empty where that is unknown, or it is not Slurm's."""
    times: int
    """The number of its failures."""
    last: float
    """When the job of the last one ended, in seconds since the epoch."""
    faults: tuple[FaultHistory, ...]
    """Its failures by their kind, the most frequent first."""

    def summary(self, days: int) -> str:
        """Return the node and its failures in a line: ``node07: disk full 3 times in 7 days``."""
        return f"{self.node}: {', '.join(map(str, self.faults))} in {counted(days, 'day')}"


@dataclass(frozen=True, kw_only=True)
class NodesResult:
    """The result of ``stager nodes``."""

    days: int
    """Days that count."""
    nodes: tuple[NodeHistory, ...]
    """The nodes that failed in that time, the one with the most failures first."""
    forgotten: int | None
    """The number of incidents that were removed; None where none were to be."""


def histories(incidents: Iterable[Incident]) -> tuple[NodeHistory, ...]:
    """Return the history of each node, the worst first.

    A job that Slurm has put back into the queue counts once, however often it began.
    """
    of_jobs: dict[tuple[str, str, NodeFault, str], Incident] = {}
    for incident in sorted(incidents, key=lambda incident: incident.time):
        of_jobs[incident.cluster, incident.node, incident.fault, incident.job_id] = incident
    by_node: dict[tuple[str, str], list[Incident]] = {}
    for incident in of_jobs.values():
        by_node.setdefault((incident.cluster, incident.node), []).append(incident)
    nodes = map(_history, by_node.values())
    return tuple(sorted(nodes, key=lambda node: (-node.times, -node.last, node.node)))


def of_cluster(nodes: Iterable[NodeHistory], cluster: str) -> tuple[NodeHistory, ...]:
    """Return the nodes that may be of a cluster; all where its name is unknown."""
    return tuple(node for node in nodes if not cluster or node.cluster in ("", cluster))


def _history(incidents: Sequence[Incident]) -> NodeHistory:
    by_fault: dict[NodeFault, list[Incident]] = {}
    for incident in incidents:
        by_fault.setdefault(incident.fault, []).append(incident)
    faults = [_fault_history(listed) for listed in by_fault.values()]
    return NodeHistory(
        node=incidents[0].node,
        cluster=incidents[0].cluster,
        times=len(incidents),
        last=max(incident.time for incident in incidents),
        faults=tuple(sorted(faults, key=lambda fault: (-fault.times, -fault.last, fault.fault))),
    )


def _fault_history(incidents: Sequence[Incident]) -> FaultHistory:
    last = max(incidents, key=lambda incident: incident.time)
    return FaultHistory(
        fault=last.fault,
        times=len(incidents),
        last=last.time,
        job_id=last.job_id,
        project=last.project,
        code=last.code,
        cause=last.cause,
    )


def named(lines: Collection[str]) -> list[str]:
    """Return the first of some lines that each name a node, and how many more there are."""
    first = list(lines)[:MAX_NAMED]
    more = len(lines) - len(first)
    return [*first, f"and {counted(more, 'more node')}: stager nodes"] if more else first
