"""Failures of nodes: which count, in which job, how often on each node."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from bundle.protocol.codec import AnyText
from bundle.protocol.counts import counted
from bundle.protocol.enumerations import Ending, FailureClass, TextEnum
from bundle.protocol.events import JobEnds
from bundle.protocol.problem import Problem, ProblemCode

from ..diagnosis.failure import FirstFailure

# --- The one table of failures that are a node's, and not the job's or the program's -------------

# Whatever is not in it never counts on a node: an error of the program, its memory, a time limit, a
# preemption, an interrupt, a hang, a missing module, a bundle that is damaged itself or is built
# for other machines, and everything that happens on the login side.


class NodeFault(TextEnum):
    """A kind of failure that is a node's."""

    DISK_FULL = "disk-full"
    DISK_FAULT = "disk-fault"
    NO_DIRECTORY = "no-directory"
    NO_INTERPRETER = "no-interpreter"
    INTERFACE = "interface"
    NAME_RESOLUTION = "name-resolution"
    NETWORK = "network"
    PORT = "port"
    CLOCK = "clock"
    DAMAGED_COPY = "damaged-copy"
    NODE_FAILURE = "node-failure"

    @property
    def words(self) -> str:
        """The fault for a person: ``disk full``."""
        return _WORDS.get(self, self.value.replace("-", " "))


_WORDS = {
    NodeFault.NO_DIRECTORY: "no usable directory",
    NodeFault.NO_INTERPRETER: "no suitable Python",
    NodeFault.INTERFACE: "no such network interface",
    NodeFault.NETWORK: "not reachable by network",
    NodeFault.PORT: "no free port",
    NodeFault.CLOCK: "wrong clock",
}


@dataclass(frozen=True, kw_only=True)
class Rule:
    """The condition on which a problem counts on the node that has it."""

    fault: NodeFault
    """The kind of failure that it is."""
    least_nodes: int
    """The fewest nodes of a job in which it tells something about the node; see below."""


def _alone(fault: NodeFault) -> Rule:
    """Return the rule for what is wrong with a node whatever the job asks of it."""
    return Rule(fault=fault, least_nodes=1)


def _compared(fault: NodeFault) -> Rule:
    """Return the rule for what also depends on what the job asks for.

    An environment may be too large for every node, and a setting wrong for all of them: only
    another node of the same job, which can do it, shows that this one is at fault.
    """
    return Rule(fault=fault, least_nodes=2)


def _between(fault: NodeFault) -> Rule:
    """Return the rule for what goes wrong between two nodes: a third shows whose fault it is."""
    return Rule(fault=fault, least_nodes=3)


PROBLEMS: Mapping[ProblemCode, Rule] = {
    ProblemCode.NO_PLACE_WITH_ROOM: _compared(NodeFault.DISK_FULL),
    ProblemCode.NO_ROOM: _compared(NodeFault.DISK_FULL),
    ProblemCode.ENVIRONMENT_DISK_FULL: _compared(NodeFault.DISK_FULL),
    ProblemCode.INCOMING_DISK_FULL: _compared(NodeFault.DISK_FULL),
    ProblemCode.BUNDLE_NOT_ARRIVED_NO_ROOM: _compared(NodeFault.DISK_FULL),
    ProblemCode.BUNDLE_NOT_SENT_NO_ROOM: _compared(NodeFault.DISK_FULL),
    ProblemCode.PIPES_DISK_FULL: _compared(NodeFault.DISK_FULL),
    ProblemCode.BUNDLE_DISK_FAULT: _compared(NodeFault.DISK_FAULT),
    ProblemCode.NO_PLACE: _compared(NodeFault.NO_DIRECTORY),
    ProblemCode.PATH_NOT_EXAMINED: _compared(NodeFault.NO_DIRECTORY),
    ProblemCode.NODE_ROOT_REFUSED: _compared(NodeFault.NO_DIRECTORY),
    ProblemCode.NODE_ROOT_BASE_REFUSED: _compared(NodeFault.NO_DIRECTORY),
    ProblemCode.INCOMING_UNWRITABLE: _compared(NodeFault.NO_DIRECTORY),
    ProblemCode.ENVIRONMENT_UNWRITABLE: _compared(NodeFault.NO_DIRECTORY),
    ProblemCode.DECOMPRESSOR_UNUSABLE: _compared(NodeFault.NO_DIRECTORY),  # usually noexec
    ProblemCode.NO_PYTHON: _compared(NodeFault.NO_INTERPRETER),
    ProblemCode.NO_CPYTHON: _compared(NodeFault.NO_INTERPRETER),
    ProblemCode.NO_CONTAINER_PROGRAM: _compared(NodeFault.NO_INTERPRETER),
    ProblemCode.IMAGE_UNREADABLE: _compared(NodeFault.NO_DIRECTORY),
    ProblemCode.NO_INTERFACE: _compared(NodeFault.INTERFACE),
    ProblemCode.NO_INTERFACE_WITH_ADDRESS: _compared(NodeFault.INTERFACE),
    ProblemCode.NO_ADDRESS_FOR_OTHERS: _compared(NodeFault.INTERFACE),
    ProblemCode.NAME_UNRESOLVED: _compared(NodeFault.NAME_RESOLUTION),
    ProblemCode.NAMES_UNRESOLVED: _compared(NodeFault.NAME_RESOLUTION),
    ProblemCode.NAMES_LEAD_BACK: _compared(NodeFault.NAME_RESOLUTION),
    ProblemCode.NAMES_DIFFER: _between(NodeFault.NAME_RESOLUTION),
    ProblemCode.NO_ROUTE: _between(NodeFault.NETWORK),
    ProblemCode.HEAD_MUTE: _between(NodeFault.NETWORK),
    ProblemCode.HEAD_REFUSES: _between(NodeFault.NETWORK),
    ProblemCode.HEAD_SILENT: _between(NodeFault.NETWORK),
    ProblemCode.HEAD_UNREACHED: _between(NodeFault.NETWORK),
    ProblemCode.HEAD_REACHED_BY_NONE: _between(NodeFault.NETWORK),
    ProblemCode.BUNDLE_NOT_SENT_NETWORK: _compared(NodeFault.NETWORK),
    ProblemCode.NO_FREE_PORT: _compared(NodeFault.PORT),
    ProblemCode.CLOCK_WRONG: _between(NodeFault.CLOCK),
    ProblemCode.COPY_DAMAGED_TWICE: _compared(NodeFault.DAMAGED_COPY),
    ProblemCode.ENVIRONMENT_DAMAGED: _compared(NodeFault.DAMAGED_COPY),
    ProblemCode.ENVIRONMENT_TAKEN_AWAY: _compared(NodeFault.DAMAGED_COPY),
    ProblemCode.DAMAGE_NOT_REMOVED: _compared(NodeFault.DAMAGED_COPY),
    ProblemCode.NO_ANSWER_NODE_FAILURE: _alone(NodeFault.NODE_FAILURE),
    # Slurm says this also where it cannot lay out the tasks that the job asks for.
    ProblemCode.NO_ANSWER_NO_START: _compared(NodeFault.NODE_FAILURE),
    ProblemCode.NO_ANSWER_UNREACHABLE: _compared(NodeFault.NODE_FAILURE),
    # While the bundle travels: no program of the user has begun by then.
    ProblemCode.NO_ANSWER_SILENT: _compared(NodeFault.NODE_FAILURE),
    ProblemCode.NO_ANSWER_HANGS: _compared(NodeFault.NODE_FAILURE),
    # Where no host can be reached, it is this machine's network, or the user's key.
    ProblemCode.SSH_UNREACHED: _compared(NodeFault.NODE_FAILURE),
    ProblemCode.SSH_TURNED_AWAY: _compared(NodeFault.NODE_FAILURE),
    ProblemCode.SSH_LOGIN_FAILED: _compared(NodeFault.NODE_FAILURE),
    ProblemCode.SSH_CONNECTION_LOST: _compared(NodeFault.NODE_FAILURE),
}
"""By the code of a problem; one that is not here is not the node's."""

RANKS: Mapping[FailureClass, Rule] = {FailureClass.NODE_FAILURE: _alone(NodeFault.NODE_FAILURE)}
"""By the class of a rank's failure: a faulty GPU or memory, but nothing that a program can cause.

A rank's full disk is not here: the file may be on a file system that all nodes share.
"""


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
