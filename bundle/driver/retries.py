"""Deciding whether the ranks are started again after a failure; nothing here has effects."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from typing import NamedTuple

from ..launch.rank_results import CAUSE, ENDED, weigh_exit
from ..launch.wrapper import is_own_frame
from ..protocol.dataclass import dataclass
from ..protocol.enumerations import FailureClass, Retry
from ..protocol.events import FailedAttempt, Hang, RankOutput
from ..protocol.messages import FailureRecord, LaunchAnswer, Started
from ..protocol.problem import Problem
from ..regex import compile_lazily
from .findings import shorten_names

Answers = Mapping[str, LaunchAnswer]  # by node


class RetryVerdict(NamedTuple):
    """Whether to run again, and the reason."""

    retry: Retry
    reason: str


_TABLE = {
    FailureClass.PYTHON_ERROR: RetryVerdict(Retry.ONCE, "its cause may be outside of the program"),
    FailureClass.OUT_OF_MEMORY: RetryVerdict(Retry.ONCE, "others may have used the memory"),
    FailureClass.KILLED: RetryVerdict(Retry.ONCE, "it is not known who ended the process"),
    FailureClass.PORT: RetryVerdict(Retry.ONCE, "a new start takes another port to meet at"),
    FailureClass.RENDEZVOUS: RetryVerdict(Retry.YES, "the ranks lost each other; none failed"),
    FailureClass.INTERFACE: RetryVerdict(Retry.NO, "the setting of the interface stays the same"),
    FailureClass.NAME_RESOLUTION: RetryVerdict(Retry.ONCE, "the name service may answer later"),
    FailureClass.MISSING_ASSET: RetryVerdict(Retry.NO, "the file or asset is missing again"),
    FailureClass.MISSING_MODULE: RetryVerdict(Retry.NO, "the bundle is the same again"),
    FailureClass.DAMAGED_COPY: RetryVerdict(Retry.YES, "a damaged copy is made anew"),
    FailureClass.DISK_FULL: RetryVerdict(Retry.NO, "the disk is full until something is removed"),
    FailureClass.TIME_LIMIT: RetryVerdict(Retry.ONCE, "it helps with more time or a checkpoint"),
    FailureClass.PREEMPTION: RetryVerdict(Retry.YES, "the program did not cause it"),
    FailureClass.NODE_FAILURE: RetryVerdict(Retry.YES, "a node failed, and not the program"),
    FailureClass.HANG: RetryVerdict(Retry.ONCE, "a hang may depend on timing"),
    FailureClass.ENVIRONMENT: RetryVerdict(Retry.NO, "the settings or the nodes must change first"),
    FailureClass.UNKNOWN: RetryVerdict(Retry.ONCE, "the reason of the failure is not known"),
}

_OF_PROGRAM = RetryVerdict(Retry.NO, "the program does the same again")
_PROGRAM_ERRORS = frozenset((
    *("ArithmeticError", "AssertionError", "AttributeError", "FloatingPointError", "IndexError"),
    *("IndentationError", "KeyError", "LookupError", "NameError", "NotImplementedError"),
    *("OverflowError", "RecursionError", "SyntaxError", "TypeError", "UnboundLocalError"),
    *("UnicodeDecodeError", "UnicodeEncodeError", "ValueError", "ZeroDivisionError"),
))  # fmt: skip
"""Exceptions that only the program itself causes, or what it reads."""
_CLASSES = {
    **dict.fromkeys(("ModuleNotFoundError", "ImportError"), FailureClass.MISSING_MODULE),
    **dict.fromkeys(("FileNotFoundError", "NotADirectoryError"), FailureClass.MISSING_ASSET),
    "gaierror": FailureClass.NAME_RESOLUTION,
}
_OF_GPU = RetryVerdict(Retry.NO, "the same program needs the same memory of the GPU again")
_GPU_MEMORY = compile_lazily(r"CUDA out of memory|HIP out of memory")
_IN_USE = compile_lazily(r"[Aa]ddress already in use|EADDRINUSE")
_DISK_FULL = compile_lazily(r"No space left on device|Disk quota exceeded")
_USAGE = "2"  # the status with which argparse and shells refuse arguments


def classify_exception(exception: str, message: str) -> FailureClass:
    """Return the class of a failure that is an exception."""
    if _GPU_MEMORY.search(message) or exception in ("OutOfMemoryError", "MemoryError"):
        return FailureClass.OUT_OF_MEMORY
    if exception in _PROGRAM_ERRORS:
        return FailureClass.PYTHON_ERROR
    if _IN_USE.search(message):
        return FailureClass.PORT
    if _DISK_FULL.search(message):
        return FailureClass.DISK_FULL
    return _CLASSES.get(exception, FailureClass.PYTHON_ERROR)


def find_retry(kind: FailureClass, exception: str = "", message: str = "") -> RetryVerdict:
    """Return whether to run again after a failure of a class; with its exception, if it is one."""
    if kind is FailureClass.PYTHON_ERROR:
        if exception in _PROGRAM_ERRORS:
            return _OF_PROGRAM
        if exception == "SystemExit":
            if message.strip() == _USAGE:
                return RetryVerdict(Retry.NO, "the arguments are refused again")
            return RetryVerdict(Retry.ONCE, "the program ended itself, for a reason of its own")
    if kind is FailureClass.OUT_OF_MEMORY and (
        exception == "OutOfMemoryError" or _GPU_MEMORY.search(message)
    ):
        return _OF_GPU
    return _TABLE[kind]


_COUNTERS = (
    # trainer, transformers, Lightning, Megatron: "step 12/300", "global_step=12", "Step: 12",
    # "iteration       12/     300"; not "12 steps a second".
    (
        "step",
        compile_lazily(
            rb"\b(?:global[ _])?(?:step|iteration|iter)\b['\"]?[ :=#]{1,12}(\d{1,12})\b"
        ),
    ),
    ("epoch", compile_lazily(rb"\bepoch\b['\"]?[ :=#'\"]{1,6}(\d{1,9}(?:\.\d{1,17})?)\b")),
    ("checkpoint", compile_lazily(rb"\bcheckpoint-(\d{1,12})\b")),
)
_READ_BYTES = 2048  # from the end of each piece of output: the last line counts


class RankProgress:
    """How far the ranks of one attempt have come."""

    def __init__(self) -> None:
        self.seen: dict[str, float] = {}  # the highest ``step``, ``epoch``, ``checkpoint``
        self.first_step_seconds: float | None = None
        self._begun: float | None = None
        self._first_step: float | None = None

    def take(self, event: object) -> None:
        """Learn from what ranks print, of which only the end is read."""
        if isinstance(event, Started) and self._begun is None:
            self._begun = time.monotonic()
        if not isinstance(event, RankOutput) or not event.of_ranks:
            return
        data = event.data[-_READ_BYTES:].lower()
        for name, pattern in _COUNTERS:
            for found in pattern.findall(data)[-1:]:
                self.seen[name] = max(self.seen.get(name, 0.0), float(found))
        if self.first_step_seconds is None and self._begun is not None and "step" in self.seen:
            self._first_step = time.monotonic()
            self.first_step_seconds = round(self._first_step - self._begun, 3)

    def count_seconds_since_first_step(self) -> float:
        """Return the time since the first step that was printed; 0 before it."""
        return 0.0 if self._first_step is None else time.monotonic() - self._first_step

    def is_beyond(self, other: Mapping[str, float]) -> bool:
        """Return whether this is further than an attempt before was, as far as both are known."""
        return any(count > other[name] for name, count in self.seen.items() if name in other)

    def __str__(self) -> str:
        counts = (
            (name, f"{count:.2f}".rstrip("0").rstrip(".")) for name, count in self.seen.items()
        )
        return ", ".join(f"{name} {count}" for name, count in counts)


_OF_NODE = ("stopped", "held")  # the kinds of hangs that may be the node's fault
_NODE_SIGNALS = (-signal.SIGKILL, -signal.SIGBUS, -signal.SIGILL)
"""Signals that a node rather than a program sends: of memory, of /dev/shm, of the processor."""
_OOM_LINE = "killed for want of memory"  # explain_oom_kills of rank_results
_LONGEST = 200  # characters of an exception's message
_FRAME = compile_lazily(r'File "([^"]+)", line (\d+)(?:, in (\S+))?')


@dataclass(frozen=True)
class Failure:
    """The failure that an attempt ended with."""

    kind: FailureClass
    cause: str
    node: str = ""
    rank: int | None = None
    place: tuple[str, ...] = ()
    """With the class the same for the same failure at the same place, on whichever rank."""
    error: tuple[str, str] = ("", "")  # the exception and its message, if it is one
    at_fault: frozenset[str] = frozenset()  # nodes that are not to be used again
    suspects: frozenset[str] = frozenset()  # others are better

    @property
    def verdict(self) -> RetryVerdict:
        """Whether to start the ranks again."""
        kind = FailureClass.NODE_FAILURE if self.at_fault else self.kind
        return find_retry(kind, *self.error)


def find_failure(answers: Answers, hang: Hang | None = None) -> Failure:
    """Return the failure that ended an attempt: the first one that is no consequence."""
    records = _sort_records(answers)
    of_nodes = dict(_list_node_problems(answers))
    of_rank = next((_describe_record(one) for one in records if _weigh(one) == CAUSE), None)
    if of_rank is not None and (of_rank.verdict.retry is Retry.NO or not of_nodes):
        return of_rank
    if of_nodes:
        return _describe_nodes(of_nodes)
    if hang is not None and (hang.ended or hang.certain):
        return _describe_hang(hang)
    return _describe_consequence(answers, records)


def _sort_records(answers: Answers) -> list[FailureRecord]:
    records = (record for answer in answers.values() for record in answer.failures)
    return sorted(records, key=lambda record: (record.time, not record.root_cause))


def _weigh(record: FailureRecord) -> int:
    return weigh_exit(record.exit_code, record.exception, record.message, record.told_to_end)


def _describe_hang(hang: Hang) -> Failure:
    suspects = frozenset((hang.node,) if hang.kind in _OF_NODE and hang.node else ())
    place = (hang.kind, hang.place, hang.operation)
    return Failure(FailureClass.HANG, hang.text, hang.node, hang.rank, place, suspects=suspects)


def _list_node_problems(answers: Answers) -> Iterator[tuple[str, Problem]]:
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
    nodes = frozenset(problems)
    return Failure(kind, str(problem), node, place=tuple(sorted(nodes)), at_fault=nodes)


def _describe_record(record: FailureRecord) -> Failure:
    who, words = f"rank {record.rank} on {record.node}", _join_words(record)
    where = record.node, record.rank
    if record.exception:
        kind, place = classify_exception(record.exception, record.message), find_place(record.lines)
        cause = f"{who}: {words}{f' at {place}' if place else ''}"
        error = record.exception, record.message
        return Failure(kind, cause, *where, (record.exception, place), error)
    if record.exit_code >= 0:
        cause = f"{who} ended with exit status {record.exit_code}"
        return Failure(FailureClass.UNKNOWN, cause, *where, ("exit", str(record.exit_code)))
    kind, why = FailureClass.KILLED, ""
    if record.exit_code == -signal.SIGKILL and any(_OOM_LINE in line for line in record.lines):
        kind, why = FailureClass.OUT_OF_MEMORY, ", as the node's memory ran out"
    cause = f"{who} was killed (signal {-record.exit_code}){why}"
    suspects = frozenset((record.node,) if record.exit_code in _NODE_SIGNALS else ())
    return Failure(kind, cause, *where, (str(record.exit_code),), suspects=suspects)


def _describe_consequence(answers: Answers, records: Sequence[FailureRecord]) -> Failure:
    lost = next((record for record in records if _weigh(record) != ENDED), None)
    if lost is not None:
        cause = f"rank {lost.rank} on {lost.node} lost its peers: {_join_words(lost)}"
        return Failure(FailureClass.RENDEZVOUS, cause, lost.node, lost.rank)
    gone = next((gone for answer in answers.values() for gone in answer.vanished), None)
    if gone is not None:
        cause = f"the process of rank {gone.rank} on {gone.node} ended, with an unknown status"
        suspects = frozenset((gone.node,))
        place = (gone.node,)
        return Failure(FailureClass.UNKNOWN, cause, gone.node, gone.rank, place, suspects=suspects)
    return _describe_nodes_that_failed(answers)


def _describe_nodes_that_failed(answers: Answers) -> Failure:
    failed = [node for node, answer in answers.items() if not answer.ok]
    # Where a launcher was killed, the others were told to end.
    failed = [node for node in failed if not answers[node].stopped] or failed
    cause = f"the ranks failed on {shorten_names(failed)}" if failed else "the ranks failed"
    suspects = frozenset(failed if len(failed) < len(answers) else ())
    node = next(iter(failed), "")
    return Failure(FailureClass.UNKNOWN, cause, node, place=tuple(failed), suspects=suspects)


def _join_words(record: FailureRecord) -> str:
    message = next(iter(record.message.strip().splitlines()), "")[:_LONGEST]
    return ": ".join(filter(None, (record.exception, message)))


def find_place(lines: Sequence[str]) -> str:
    """Return the last line of the user's own code in a traceback: ``train.py:12``; else empty."""
    own = [line for line in lines if is_own_frame(line)]
    found = _FRAME.search(own[-1]) if own else None
    return f"{found[1].rpartition('/')[2]}:{found[2]}" if found else ""


@dataclass
class History:
    """The attempts of a job so far."""

    limit: int  # how often the ranks may be started again
    failed: list[FailedAttempt] = field(default_factory=list)
    _last: tuple[tuple[str, ...], Mapping[str, float]] = (), {}
    """The class and the place of the last one, and how far it had come."""

    @property
    def number(self) -> int:
        """The number of the attempt that runs, from 0."""
        return len(self.failed)

    def judge(self, failure: Failure, progress: RankProgress, seconds: float) -> FailedAttempt:
        """Add the failure of the attempt that ran; return it with the decision.

        What comes again at the same place is the last, unless the ranks had come further.
        """
        retry, reason = failure.verdict
        same, before = (str(failure.kind), *failure.place), self._last[1]
        is_same = same == self._last[0] and not progress.is_beyond(before)
        if is_same and retry is Retry.ONCE:
            retry, reason = Retry.NO, "the same failure came again at the same place"
        self._last = same, progress.seen
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
