"""An incident: what failed on one node in one job, taken from the end of that job."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from bundle.protocol.codec import AnyText
from bundle.protocol.enumerations import Ending
from bundle.protocol.events import JobEnds
from bundle.protocol.problem import Problem

from ..diagnosis.failure import FirstFailure
from .faults import PROBLEMS, RANKS, NodeFault, Rule

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


@dataclass(frozen=True, kw_only=True)
class _Suspicion:
    """A failure of a node that may be the job's after all."""

    node: str
    rule: Rule
    code: str
    cause: str


def incidents_of(job: EndedJob) -> tuple[Incident, ...]:
    """Return what the nodes of a job are to blame for, each kind of failure once for each node.

    A failure that more than half of the nodes share is the job's, and so is one that tells nothing
    about a node in a job of so few.
    """
    suspicions: dict[tuple[str, NodeFault], _Suspicion] = {}
    for suspicion in _suspicions(job):
        if suspicion.node in job.nodes and suspicion.rule.least_nodes <= len(job.nodes):
            suspicions.setdefault((suspicion.node, suspicion.rule.fault), suspicion)
    faults = [fault for _, fault in suspicions]
    most = max(len(job.nodes) / 2, 1)
    return tuple(
        Incident(
            node=node,
            fault=fault,
            code=suspicion.code,
            cause=suspicion.cause[:MAX_CAUSE],
            time=job.ended,
            job_id=job.job_id,
            project=job.project,
            cluster=job.cluster,
        )
        for (node, fault), suspicion in suspicions.items()
        if faults.count(fault) <= most
    )


def _suspicions(job: EndedJob) -> Iterator[_Suspicion]:
    yield from _of_problems(job.left_out)
    result = job.result
    if result.interrupted or result.ended_by not in ("", Ending.NODE_FAILURE):
        return  # what went wrong at last may follow from that
    if not result.of_driver:
        yield from _of_problems(result.problems)
    first = job.first
    if first is not None and first.problem is None and first.kind in RANKS:
        cause = first.meaning or first.kind.value.replace("-", " ")
        yield _Suspicion(node=first.node, rule=RANKS[first.kind], code="", cause=cause)


def _of_problems(problems: Mapping[str, Sequence[Problem]]) -> Iterator[_Suspicion]:
    for node, listed in problems.items():
        for problem in listed:
            rule = PROBLEMS.get(problem.code)
            if rule is not None:
                cause = f"{problem.what}; {problem.why}" if problem.why else problem.what
                yield _Suspicion(node=node, rule=rule, code=problem.code.value, cause=cause)
