"""Failures of nodes: which count, kept in one file of the offline root, counted for each node."""

from __future__ import annotations

import collections
import fcntl
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from operator import attrgetter

from bundle.protocol.codec import AnyText, decode, encode
from bundle.protocol.counts import format_count
from bundle.protocol.dataclass import dataclass
from bundle.protocol.enumerations import Ending, FailureClass, NodeFault
from bundle.protocol.events import JobEnds
from bundle.protocol.problem import Problem

from ..core.errors import StagerError
from ..core.files import open_regular
from ..core.store import INCIDENTS, Store, write_error
from ..diagnosis.failure import FirstFailure
from ..logs.job_record import JobRecord

MAX_CAUSE = 300


@dataclass(frozen=True, kw_only=True)
class Incident:
    """A failure that is a node's."""

    node: str
    fault: NodeFault
    code: str  # the code of the far side's problem; empty where a rank showed it
    cause: AnyText  # the cause in words, without anything that a program has written
    time: float  # when the job ended, in seconds since the epoch
    job_id: str
    project: AnyText
    cluster: AnyText = ""  # the node's cluster; empty where that is unknown, or it is not Slurm's


def find_incidents(
    record: JobRecord, job_id: str, project: str, first: FirstFailure | None = None
) -> list[Incident]:
    """Return what nodes are to blame for, once each; what more than half of them share is not."""
    nodes, ended = record.nodes, record.end_time
    if ended is None:
        return []
    found: dict[tuple[str, NodeFault], Incident] = {}
    for node, fault, code, cause in _list_suspicions(record, first):
        if node in nodes and (node, fault) not in found:
            found[node, fault] = Incident(
                node=node,
                fault=fault,
                code=code,
                cause=cause[:MAX_CAUSE],
                time=ended,
                job_id=job_id,
                project=project,
                cluster=record.cluster,
            )
    counts = collections.Counter(fault for _, fault in found)
    return [one for one in found.values() if counts[one.fault] <= max(len(nodes) / 2, 1)]


def _list_suspicions(
    record: JobRecord, first: FirstFailure | None
) -> Iterator[tuple[str, NodeFault, str, str]]:
    result = record.result or JobEnds(ok=False, interrupted=True)
    # What went wrong at last may follow from the end of the job.
    is_over = not result.interrupted and result.ended_by in ("", Ending.NODE_FAILURE)
    yield from _list_node_problems(record, record.left_out)
    if is_over and not result.of_driver:
        yield from _list_node_problems(record, result.problems)
    # Of the failures of ranks only this one is a node's (a faulty GPU or memory): no program can
    # cause it. A full disk may be a file system that all nodes share.
    if first and is_over and first.kind is FailureClass.NODE_FAILURE and first.problem is None:
        yield first.node, NodeFault.NODE_FAILURE, "", first.meaning or "node failure"


def _list_node_problems(
    record: JobRecord, problems: Mapping[str, Sequence[Problem]]
) -> Iterator[tuple[str, NodeFault, str, str]]:
    for node, listed in problems.items():
        for problem in listed:
            row = problem.code.row
            if row.fault is not None and row.least_nodes <= len(record.nodes):
                cause = "; ".join(filter(None, (problem.what, problem.why)))
                yield node, row.fault, str(problem.code), cause


# --- The incidents in the offline root: one file of JSON lines -----------------------------------

# All who share the root may write there, so what the file holds is hostile until checked: a line
# that cannot be true is skipped. It is renewed by one rename, under a lock of its own.

DAY = 24 * 3600.0
KEPT_DAYS = 90
MAX_INCIDENTS = 5_000  # incidents that are kept, the newest of all
MAX_OF_JOB = 500
MAX_BYTES = 1 << 24  # a larger file is none of ours, and is not read
_FILE = "history.jsonl"
_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")
"""The name of a node: one that goes into Slurm's ``--exclude`` stands for no others."""
_JOB = re.compile(r"\d{1,20}")


def keep_incidents(store: Store, incidents: Sequence[Incident], now: float) -> bool:
    """Keep what the nodes of a job are to blame for, once; False where that is impossible."""
    if not incidents:
        return True
    try:
        with _lock_history(store):
            kept = read_incidents(store, KEPT_DAYS, now)
            known = {(one.job_id, one.time) for one in kept}
            new = [one for one in incidents if (one.job_id, one.time) not in known]
            _write(store, [*kept, *new[:MAX_OF_JOB]])
    except (StagerError, OSError):
        return False
    return True


def read_incidents(store: Store, days: int, now: float) -> list[Incident]:
    """Return the incidents of the last days, the oldest first; what is damaged is skipped."""
    since = now - days * DAY
    # A clock may be wrong, but not by more than a day.
    possible = [one for one in _read_all(store) if since <= one.time <= now + DAY]
    return sorted(possible, key=attrgetter("time"))[-MAX_INCIDENTS:]


def forget_nodes(store: Store, nodes: Collection[str], now: float) -> int:
    """Remove all incidents of some nodes, and return how many there were."""
    if not read_incidents(store, KEPT_DAYS, now):
        return 0
    with _lock_history(store):
        kept = read_incidents(store, KEPT_DAYS, now)
        others = [one for one in kept if one.node not in nodes]
        if len(others) < len(kept):
            _write(store, others)
    return len(kept) - len(others)


@contextmanager
def _lock_history(store: Store) -> Iterator[None]:
    path = store.incidents / ".lock"
    try:
        handle = path.open("a")
        store.open_up(path)
        fcntl.flock(handle, fcntl.LOCK_EX)
    except OSError as exc:
        raise write_error(path, exc) from exc
    with handle:
        yield


def _write(store: Store, incidents: Sequence[Incident]) -> None:
    lines = [json.dumps(encode(incident)) + "\n" for incident in incidents[-MAX_INCIDENTS:]]
    with store.publish(store.incidents / _FILE) as partial:
        partial.write_text("".join(lines), encoding="utf-8")


def _read_all(store: Store) -> Iterator[Incident]:
    try:
        with open_regular(store.root / INCIDENTS / _FILE) as handle:
            content = handle.read(MAX_BYTES + 1)
    except OSError:
        return
    for line in content.splitlines() if len(content) <= MAX_BYTES else ():
        with suppress(ValueError, RecursionError):
            incident = decode(Incident, json.loads(line), strict=False)
            if _NODE.fullmatch(incident.node) and _JOB.fullmatch(incident.job_id):
                yield incident


# --- The incidents of each node, counted and in words --------------------------------------------

DAYS = 7
MAX_NAMED = 5  # nodes that a command names before it refers to ``stager nodes``


@dataclass(frozen=True, kw_only=True)
class FaultHistory:
    """One kind of failure of one node."""

    fault: NodeFault
    times: int
    last: float
    job_id: str
    project: AnyText
    code: str
    cause: AnyText


@dataclass(frozen=True, kw_only=True)
class NodeHistory:
    """A node that failed."""

    node: str
    cluster: AnyText
    times: int
    last: float
    faults: tuple[FaultHistory, ...]

    def summary(self, days: int) -> str:
        """Return the node and its failures in a line: ``node07: disk full 3 times in 7 days``."""
        faults = [
            f"{one.fault.words} {'once' if one.times == 1 else f'{one.times} times'}"
            for one in self.faults
        ]
        return f"{self.node}: {', '.join(faults)} in {format_count(days, 'day')}"


@dataclass(frozen=True, kw_only=True)
class NodesResult:
    """The result of ``stager nodes``."""

    days: int
    nodes: tuple[NodeHistory, ...]
    """The nodes that failed in that time, the one with the most failures first."""
    forgotten: int | None  # the number of incidents that were removed; None where none were to be


def list_histories(incidents: Iterable[Incident]) -> tuple[NodeHistory, ...]:
    """Return the history of each node, the worst first; a job that was requeued counts once."""
    of_jobs: dict[tuple[str, str, NodeFault, str], Incident] = {}
    for incident in sorted(incidents, key=attrgetter("time")):
        of_jobs[incident.cluster, incident.node, incident.fault, incident.job_id] = incident
    by_node: dict[tuple[str, str], list[Incident]] = collections.defaultdict(list)
    for incident in sorted(of_jobs.values(), key=attrgetter("time")):
        by_node[incident.cluster, incident.node].append(incident)
    nodes = map(_make_history, by_node.values())
    return tuple(sorted(nodes, key=lambda node: (-node.times, -node.last, node.node)))


def select_cluster(nodes: Iterable[NodeHistory], cluster: str) -> tuple[NodeHistory, ...]:
    """Return the nodes that may be of a cluster; all where its name is unknown."""
    return tuple(node for node in nodes if not cluster or node.cluster in ("", cluster))


def _make_history(incidents: Sequence[Incident]) -> NodeHistory:  # the newest is the last
    by_fault: dict[NodeFault, list[Incident]] = collections.defaultdict(list)
    for incident in incidents:
        by_fault[incident.fault].append(incident)
    faults = [
        FaultHistory(
            fault=fault,
            times=len(listed),
            last=listed[-1].time,
            job_id=listed[-1].job_id,
            project=listed[-1].project,
            code=listed[-1].code,
            cause=listed[-1].cause,
        )
        for fault, listed in by_fault.items()
    ]
    return NodeHistory(
        node=incidents[0].node,
        cluster=incidents[0].cluster,
        times=len(incidents),
        last=incidents[-1].time,
        faults=tuple(sorted(faults, key=lambda fault: (-fault.times, -fault.last, fault.fault))),
    )


def name_first(lines: Collection[str]) -> list[str]:
    """Return the first of some lines that each name a node, and how many more there are."""
    first = list(lines)[:MAX_NAMED]
    more = len(lines) - len(first)
    return [*first, f"and {format_count(more, 'more node')}: stager nodes"] if more else first
