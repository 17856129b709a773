"""Deciding whether the ranks are started again after a failure. Nothing here has effects."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ..launch.rank_results import CAUSE, ENDED, weigh_exit
from ..launch.wrapper import is_own_frame
from ..protocol.enumerations import FailureClass, Retry
from ..protocol.events import FailedAttempt, Hang, RankOutput
from ..protocol.messages import FailureRecord, LaunchAnswer
from ..protocol.problem import Problem
from ..protocol.retry import RetryVerdict, classify_exception, find_retry

# --- The progress of ranks, as what they print shows it ------------------------------------------

_COUNTERS = (
    # trainer, transformers, Lightning, Megatron: "step 12/300", "global_step=12", "Step: 12",
    # "iteration       12/     300"; not "12 steps a second".
    (
        "step",
        re.compile(rb"\b(?:global[ _])?(?:step|iteration|iter)\b['\"]?[ :=#]{1,12}(\d{1,12})\b"),
    ),
    ("epoch", re.compile(rb"\bepoch\b['\"]?[ :=#'\"]{1,6}(\d{1,9}(?:\.\d{1,17})?)\b")),
    ("checkpoint", re.compile(rb"\bcheckpoint-(\d{1,12})\b")),
)
_READ_BYTES = 2048
"""The end of each piece of output that is read: the last line counts, and output may be much."""


class RankProgress:
    """How far the ranks of one attempt have come."""

    def __init__(self) -> None:
        self.seen: dict[str, float] = {}
        """The highest number of each kind: ``step``, ``epoch``, ``checkpoint``."""

    def take(self, event: RankOutput) -> None:
        """Learn from output, of which only the end is read."""
        data = event.data[-_READ_BYTES:].lower()
        for name, pattern in _COUNTERS:
            for found in pattern.findall(data)[-1:]:
                self.seen[name] = max(self.seen.get(name, 0.0), float(found))

    def is_beyond(self, other: Mapping[str, float]) -> bool:
        """Return whether this is further than an attempt before was, as far as both are known."""
        return any(count > other[name] for name, count in self.seen.items() if name in other)

    def __str__(self) -> str:
        counts = (
            (name, f"{count:.2f}".rstrip("0").rstrip(".")) for name, count in self.seen.items()
        )
        return ", ".join(f"{name} {count}" for name, count in counts)


# --- The failure of an attempt -------------------------------------------------------------------

_STOPPED = "stopped"  # the kind of a hang whose process the node has stopped, or holds
_NODES_OWN = tuple(-int(number) for number in (signal.SIGKILL, signal.SIGBUS, signal.SIGILL))
"""Signals that a node rather than a program sends: of memory, of /dev/shm, of the processor."""
_OOM_LINE = "killed for want of memory"  # explain_oom_kills of rank_results
_LONGEST = 200  # characters of an exception's message
_FRAME = re.compile(r'File "([^"]+)", line (\d+)(?:, in (\S+))?')


@dataclass(frozen=True)
class EndedLaunch:
    """All that is known of an attempt that failed."""

    answers: Mapping[str, LaunchAnswer]
    hang: Hang | None = None
    has_ended_hang: bool = False
    """True if the driver ended the ranks for it."""


class Failure(NamedTuple):
    """The failure that an attempt ended with."""

    kind: FailureClass
    cause: str
    verdict: RetryVerdict
    signature: tuple[str, ...]
    """The same for the same failure at the same place; on whichever rank."""
    node: str = ""
    rank: int | None = None
    at_fault: frozenset[str] = frozenset()
    """Nodes that are not to be used again."""
    suspects: frozenset[str] = frozenset()
    """Nodes that may be at fault: others are better where there are some."""


def find_failure(outcome: EndedLaunch) -> Failure:
    """Return the failure that ended an attempt: the first one that is no consequence."""
    records = sorted(
        (record for answer in outcome.answers.values() for record in answer.failures),
        key=lambda record: (record.time, not record.root_cause),
    )
    causes = [record for record in records if _weigh(record) == CAUSE]
    of_nodes = dict(_list_node_problems(outcome.answers))
    of_rank = _describe_record(causes[0]) if causes else None
    if of_rank is not None and (of_rank.verdict.retry is Retry.NO or not of_nodes):
        return of_rank
    if of_nodes:
        return _describe_nodes(of_nodes)
    if outcome.hang is not None and (outcome.has_ended_hang or outcome.hang.certain):
        return _describe_hang(outcome.hang)
    lost = [record for record in records if _weigh(record) != ENDED]
    kind = FailureClass.RENDEZVOUS if lost else FailureClass.UNKNOWN
    if lost:
        cause = f"rank {lost[0].rank} on {lost[0].node} lost its peers: {_join_words(lost[0])}"
        return Failure(kind, cause, find_retry(kind), (str(kind),), lost[0].node, lost[0].rank)
    gone = next((gone for answer in outcome.answers.values() for gone in answer.vanished), None)
    if gone is not None:
        cause = f"the process of rank {gone.rank} on {gone.node} ended, with an unknown status"
        suspects = frozenset((gone.node,))
        return Failure(
            kind, cause, find_retry(kind), (str(kind),), gone.node, gone.rank, suspects=suspects
        )
    failed = [node for node, answer in outcome.answers.items() if not answer.ok]
    named = f"the ranks failed on {', '.join(failed[:3])}" if failed else "the ranks failed"
    return Failure(kind, named, find_retry(kind), (str(kind),), failed[0] if failed else "")


def _weigh(record: FailureRecord) -> int:
    return weigh_exit(record.exit_code, record.exception, record.message, record.told_to_end)


def _list_node_problems(answers: Mapping[str, LaunchAnswer]) -> Iterator[tuple[str, Problem]]:
    """Yield the nodes that a problem of their own kept from their part, with the first of each."""
    for node, answer in answers.items():
        for problem in answer.problems:
            row = problem.code.row
            if not row.follows and (answer.lost or row.fault is not None):
                yield node, problem
                break


def _describe_nodes(problems: Mapping[str, Problem]) -> Failure:
    node, problem = next(iter(problems.items()))
    kind = problem.code.row.failure_class
    if kind is FailureClass.ENVIRONMENT:  # an agent that ended, of which nothing else is known
        kind = FailureClass.NODE_FAILURE
    verdict = find_retry(FailureClass.NODE_FAILURE)
    nodes = frozenset(problems)
    return Failure(kind, str(problem), verdict, (str(kind), *sorted(nodes)), node, at_fault=nodes)


def _describe_hang(hang: Hang) -> Failure:
    kind = FailureClass.HANG
    suspects = frozenset((hang.node,) if hang.kind == _STOPPED and hang.node else ())
    signature = (str(kind), hang.kind, hang.place, hang.operation)
    return Failure(
        kind, hang.text, find_retry(kind), signature, hang.node, hang.rank, suspects=suspects
    )


def _describe_record(record: FailureRecord) -> Failure:
    who = f"rank {record.rank} on {record.node}"
    signature: tuple[str, ...]
    suspects: frozenset[str] = frozenset()
    if record.exception:
        kind = classify_exception(record.exception, record.message)
        place = find_place(record.lines)
        signature = (record.exception, place)
        cause = f"{who}: {_join_words(record)}{f' at {place}' if place else ''}"
    elif record.exit_code < 0:
        is_memory = record.exit_code == -signal.SIGKILL and any(
            _OOM_LINE in line for line in record.lines
        )
        kind = FailureClass.OUT_OF_MEMORY if is_memory else FailureClass.KILLED
        signature = (str(kind), str(record.exit_code))
        why = ", as the node's memory ran out" if is_memory else ""
        cause = f"{who} was killed (signal {-record.exit_code}){why}"
        if record.exit_code in _NODES_OWN:
            suspects = frozenset((record.node,))
    else:
        kind, signature = FailureClass.UNKNOWN, ("exit", str(record.exit_code))
        cause = f"{who} ended with exit status {record.exit_code}"
    verdict = find_retry(kind, record.exception, record.message)
    return Failure(kind, cause, verdict, signature, record.node, record.rank, suspects=suspects)


def _join_words(record: FailureRecord) -> str:
    message = next(iter(record.message.strip().splitlines()), "")[:_LONGEST]
    return ": ".join(filter(None, (record.exception, message)))


def find_place(lines: tuple[str, ...]) -> str:
    """Return the last line of the user's own code in a traceback: ``train.py:12``; else empty."""
    own = [line for line in lines if is_own_frame(line)]
    found = _FRAME.search(own[-1]) if own else None
    return f"{found[1].rpartition('/')[2]}:{found[2]}" if found else ""


# --- The decision --------------------------------------------------------------------------------


@dataclass
class History:
    """The attempts of a job so far."""

    limit: int
    """How often the ranks may be started again."""
    failed: list[FailedAttempt] = field(default_factory=list)
    _last: tuple[tuple[str, ...], Mapping[str, float]] = (), {}
    """The signature and the progress of the last one."""

    @property
    def number(self) -> int:
        """The number of the attempt that runs, from 0."""
        return len(self.failed)

    def judge(self, failure: Failure, progress: RankProgress, seconds: float) -> FailedAttempt:
        """Add the failure of the attempt that ran; return it with the decision.

        A failure that is not known to be a node's ends it when it comes again at the same place,
        unless the ranks had come further than before.
        """
        retry, reason = failure.verdict
        signature, before = self._last
        is_same = failure.signature == signature and not progress.is_beyond(before)
        if is_same and retry is Retry.ONCE:
            retry, reason = Retry.NO, "the same failure came again at the same place"
        self._last = failure.signature, progress.seen
        attempt = FailedAttempt(
            number=self.number,
            kind=failure.kind,
            cause=failure.cause,
            retry=retry,
            reason=reason,
            node=failure.node,
            rank=failure.rank,
            progress=str(progress),
            seconds=round(seconds, 3),
        )
        self.failed.append(attempt)
        return attempt

    def may_go_on(self) -> bool:
        """Return whether the ranks are to be started once more."""
        last = self.failed[-1]
        return last.retry is not Retry.NO and len(self.failed) <= self.limit
