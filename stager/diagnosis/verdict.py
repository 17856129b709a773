"""The verdict: which of many candidates failed first, and what the driver's result says."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from enum import IntEnum, auto
from functools import partial
from typing import TypeVar

from bundle.launch.rank_results import CAUSE, ENDED, LOST_PEER
from bundle.protocol.dataclass import dataclass
from bundle.protocol.enumerations import Ending, FailureClass
from bundle.protocol.events import Hang, JobEnds
from bundle.protocol.messages import Departure, FailureRecord, Lingering, Vanished
from bundle.protocol.problem import Problem, ProblemCode, make_ending_problem

from ..catalogue.catalogue import LineRole, LineTells, match_line
from .failure import FirstFailure, describe_lingering, is_certain_hang
from .hits import Hit
from .process_exits import (
    LINES,
    Exit,
    describe_exit_code,
    describe_rank_failure,
    find_own_words,
    find_signal,
    weigh_failure,
)

# :func:`judge_result` makes candidates from the driver's result, :mod:`.log_verdict` from logs. The
# driver knows who sent a signal, so a rank that was killed, or ended without a word, is a ``CAUSE``
# for it; logs cannot tell, so there it is ``KILLED`` or a ``BARE_STATUS``. The driver asks Slurm
# whether it ended the job: then there is nothing to rank but a hang that lasted until then. Logs
# are compared with the line of the end, by place and by time. Candidates of both are never mixed.


class Role(IntEnum):
    """The part of a candidate; the lowest counts, which needs no other to explain it."""

    CAUSE = auto()
    """A rank or a line that failed by itself. It explains the others, however late it came: a rank
    that loses its peers often raises before the one that left has been noticed."""
    KILLED = auto()  # by a signal, as logs report it: launchers kill those that wait
    SYMPTOM = auto()  # a line that names no culprit (ranks cannot meet), but does say what is wrong
    NODE = auto()  # a node that could not do its part, which explains the ranks that missed it
    FOLLOWING_NODE = auto()
    """A node whose problem follows from that of another one, where that one is not known."""
    HANG = auto()  # one that the driver named while it lasted; what follows, it may leave
    VANISHED = auto()  # a rank that made its launcher end the others, with unknown status
    LEFT_EARLY = auto()
    """A rank that ended well, or left its process group, and that others missed then."""
    ABSENT = auto()  # ranks that did not come to where others waited
    SLURM_END = auto()
    """Slurm's end of the job: what came before may have made the job hang until its limit."""
    POSSIBLE_HANG = auto()  # a hang of ranks that may have been at work
    SURVIVED = auto()  # a line that tells a cause, though its writer went on after it
    BARE_STATUS = auto()
    """A process of which nothing but a bad exit status is known; Slurm's end leaves such, too."""
    LOST_PEER = auto()
    """A rank or a line that tells of the failure of another one: better than none."""
    ENDED_BY_OTHERS = auto()
    ENDED_LAUNCHER = auto()
    LINGERING = auto()
    """A process that goes on for too long: no failure unless nothing else ended the job."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One thing that may have failed first."""

    role: Role
    failure: Callable[[], FirstFailure]
    node: str = ""  # the node of a rank; empty for any other candidate
    time: float | None = None
    """The time, in seconds since the epoch; one without a time comes after those that have one."""
    survived: bool = False
    passed_over: bool = False
    silent: bool = False  # whether another candidate of the same failure may speak for it
    same: object = None
    """Equal for candidates of the same failure; only looked at if one of them is silent."""
    shown: tuple[Hit | Exit, ...] = ()
    missing: tuple[int, ...] = ()


def pick_first_failure(candidates: Iterable[Candidate]) -> Candidate | None:
    """Return the candidate that failed first, or the one that speaks for it; None for none."""
    ranked = sorted(
        candidates,
        key=lambda one: (
            *(one.role, one.survived, one.passed_over),
            float("inf") if one.time is None else one.time,
        ),
    )
    if not ranked:
        return None
    first = ranked[0]
    if not first.silent:
        return first
    same = (other for other in ranked if (other.role, other.same) == (first.role, first.same))
    return next((other for other in same if not other.silent), first)


# --- The failure that a problem of the far side is: its words, its class and its remedy ----------


def convert_problem(problem: Problem, node: str) -> FirstFailure:
    """Return the failure that is a problem."""
    # The end of a job is said of that job alone: its number needs no mention.
    where = "" if problem.is_end_of_job else problem.where
    return FirstFailure(
        node=node,
        kind=problem.code.row.failure_class,
        cause=": ".join(filter(None, (where, problem.what, problem.why))),
        hint=problem.fix,
        problem=problem,
    )


def convert_ending(ending: str, job_id: str, node: str) -> FirstFailure:
    """Return the failure for Slurm's end of a job: an ``Ending``, or another version's word."""
    return convert_problem(make_ending_problem(ending, job_id), node)


# --- The first failure as the driver's result tells it: from ranks' records, problems and statuses

# Their order, and the reasons for it, are above.

_ROLES = {CAUSE: Role.CAUSE, LOST_PEER: Role.LOST_PEER, ENDED: Role.ENDED_BY_OTHERS}
_ENDED_BY_SIGTERM = 128 + signal.SIGTERM
_AFTER_A_HANG = (Ending.TIME_LIMIT, Ending.CANCELLED)
"""The ends by Slurm that a job comes to because it hangs; others come to any job."""
_NOTICE_SECONDS = 1.0  # seconds by which a busy node may be late to notice that a rank has ended


def judge_result(result: JobEnds, job_id: str) -> FirstFailure | None:
    """Return the first failure; Slurm's end of the job comes before what followed from it."""
    if result.ok:
        return None
    if not result.ended_by:
        return find_first_failure_of_result(result)
    node = ""
    if result.ended_by == Ending.NODE_FAILURE:
        node = next(iter(result.problems), "")
    ending = convert_ending(result.ended_by, job_id, node)
    hang = result.hang if result.ended_by in _AFTER_A_HANG else None
    if hang is None or not is_certain_hang(hang):
        return ending
    return replace(_convert_hang(hang), cause=f"{hang.text}; {ending.cause}")


def select_usable_result(result: JobEnds) -> JobEnds:
    """Return a result without ranks that cannot be, or what followed from a user's interrupt."""
    # Without the time of its end it is unknown which ranks a rank delayed.
    vanished = [rank for rank in _drop_unknown_ranks(result.vanished) if rank.time is not None]
    result = replace(
        result,
        failures=_drop_unknown_ranks(result.failures),
        left=_drop_unknown_ranks(result.left),
        vanished=tuple(vanished),
        lingering=_drop_unknown_ranks(result.lingering),
    )
    is_the_users = result.interrupted and not result.ended_by
    return _drop_stopped(result) if is_the_users else result


def _drop_stopped(result: JobEnds) -> JobEnds:
    stopped = set(result.stopped or ())
    codes = (result.exit_codes or {}).items()
    return replace(
        result,
        failures=tuple(record for record in result.failures or () if not record.told_to_end),
        exit_codes={node: code for node, code in codes if node not in stopped},
    )


_OfRank = TypeVar("_OfRank", FailureRecord, Departure, Vanished, Lingering)


def _drop_unknown_ranks(records: Iterable[_OfRank] | None) -> tuple[_OfRank, ...]:
    return tuple(record for record in records or () if record.rank >= 0)


def find_first_failure_of_result(result: JobEnds) -> FirstFailure | None:
    """Return the earliest failure that is a cause and not a consequence; None for no failure."""
    first = pick_first_failure(_candidates(result))
    return None if first is None else first.failure()


def _candidates(result: JobEnds) -> Iterator[Candidate]:
    # Of two ranks that failed at the same time, torchrun's root cause comes first.
    records = sorted(result.failures or (), key=lambda record: not record.root_cause)
    ranks = [_rank(record) for record in records]
    yield from ranks
    yield from _nodes(result, ranks)
    if result.hang is not None:
        is_certain = is_certain_hang(result.hang) or result.hang.ended
        role = Role.HANG if is_certain else Role.POSSIBLE_HANG
        if is_certain or not result.interrupted:  # a user may end a job for any reason
            yield Candidate(role=role, failure=partial(_convert_hang, result.hang))
    yield from map(_convert_vanished, result.vanished or ())
    yield from _list_left_early(result)
    yield from _launchers(result)
    lingering = _find_lingering(result)
    if lingering is not None:
        yield Candidate(role=Role.LINGERING, failure=partial(_convert_lingering, lingering))


def _rank(record: FailureRecord) -> Candidate:
    """Return a failed rank; of ranks that exit together without an exception, one is enough."""
    role = _ROLES[weigh_failure(record)]
    wordless = role is Role.CAUSE and not record.exception
    return Candidate(
        role=role,
        failure=partial(describe_rank_failure, record),
        node=record.node,
        time=record.time,
        silent=wordless and not find_own_words(record)[0],
        same=record.exit_code if wordless else None,
    )


def _nodes(result: JobEnds, ranks: Sequence[Candidate]) -> Iterator[Candidate]:
    for node, problems in result.problems.items():
        for problem in problems:
            if problem.code is ProblemCode.RANKS_HANG and result.hang is not None:
                continue  # the verdict says more
            yield Candidate(
                role=Role.FOLLOWING_NODE if problem.code.row.follows else Role.NODE,
                failure=partial(_describe_node_failure, node, problem, result, ranks),
            )


def _describe_node_failure(
    node: str, problem: Problem, result: JobEnds, ranks: Sequence[Candidate]
) -> FirstFailure:
    failure = convert_problem(problem, node)
    first = pick_first_failure(rank for rank in ranks if rank.node == node)
    if first is not None:
        rank = first.failure()
        return replace(failure, rank=rank.rank, exit_code=rank.exit_code, lines=rank.lines)
    if failure.kind != FailureClass.HANG:
        return failure
    lingering = _find_lingering(result, node)
    return failure if lingering is None else _convert_lingering(lingering)


_HANG_HINTS = {
    "stopped": "find out on that node what stopped or ended the process (`dmesg` for memory), or "
    "leave the node out with --exclude",
    "held": "see whether the disk or file server that it uses still answers (`dmesg`), or leave "
    "the node out with --exclude",
    "behind": "see what that rank does at this line that the others do not: code that only some "
    "ranks run, more or fewer batches, or data that comes slowly",
    "mismatch": "let all ranks call the same operations, in the same order and with the same "
    "shapes: look for branches on the rank or the data before this line",
    "elsewhere": "see why that rank is at this line and the others are not",
    "network": "check the network between the nodes: `stager verify --deep` measures each pair; "
    "name the interface with [launch] interface",
}


def _convert_hang(hang: Hang) -> FirstFailure:
    hint = _HANG_HINTS.get(hang.kind, "see what all ranks do at this line, and what they wait for")
    return FirstFailure(
        node=hang.node,
        rank=hang.rank,
        kind=FailureClass.HANG,
        cause=hang.text,
        hint=f"{hint}; `stager stacks` shows the stacks of all ranks",
        hang=hang,
    )


def _convert_vanished(gone: Vanished) -> Candidate:
    failure = FirstFailure(
        node=gone.node,
        rank=gone.rank,
        kind=FailureClass.UNKNOWN,
        cause="its process ended, and its launcher began to end the others because of it",
        hint="its log holds all it wrote; its exit status is known only once all ranks have ended",
        time=gone.time,
    )
    return Candidate(role=Role.VANISHED, failure=lambda: failure, time=gone.time)


def _list_left_early(result: JobEnds) -> Iterator[Candidate]:
    # Their processes' ends count: an exception is often noted before the kernel tells of the end
    # that it follows from.
    lost = [record for record in result.failures or () if weigh_failure(record) == LOST_PEER]
    if not lost:
        return
    missed = min(record.ended or record.time for record in lost)
    for gone in result.left or ():
        if gone.time <= missed + _NOTICE_SECONDS:
            yield Candidate(
                role=Role.LEFT_EARLY, failure=partial(_describe_departed, gone), time=gone.time
            )


def _describe_departed(gone: Departure) -> FirstFailure:
    if gone.goes_on:
        return _convert_lingering(Lingering(gone.node, gone.rank, left=gone.time))
    return FirstFailure(
        node=gone.node,
        rank=gone.rank,
        exit_code=0,
        kind=FailureClass.HANG,
        cause="it ended, with exit status 0, while other ranks went on and waited for it",
        hint="see why it ended before the others: sys.exit or os._exit on one rank only, fewer "
        "batches than the others have, or a loop that it leaves earlier",
        time=gone.time,
    )


def _launchers(result: JobEnds) -> Iterator[Candidate]:
    with_ranks = {record.node for record in result.failures or ()}
    for node, code in (result.exit_codes or {}).items():
        if code == 0 or node in with_ranks:
            continue
        yield Candidate(
            role=Role.ENDED_LAUNCHER if code == _ENDED_BY_SIGTERM else Role.BARE_STATUS,
            failure=partial(_describe_launcher, node, code, (result.tails or {}).get(node, ())),
        )


def _describe_launcher(node: str, code: int, tail: Sequence[str]) -> FirstFailure:
    written = [line.strip() for line in tail if line.strip()]
    last = written[-1] if written else ""
    failure = FirstFailure(
        node=node,
        exit_code=code,
        kind=FailureClass.UNKNOWN,
        cause=last or f"the launcher ended with exit status {code}",
        hint="the node's log holds all that was written",
        lines=tuple(tail[-LINES:]),
    )
    for line, known in zip(tail, map(match_line, tail), strict=True):
        if known and known.entry.role == LineRole.PRIMARY and known.entry.tells != LineTells.EXIT:
            return replace(failure, cause=line.strip()).explain(known)
    if find_signal(code):
        text, kind, hint = describe_exit_code(code)
        return replace(failure, kind=kind, cause=f"the launcher: {text}", hint=hint)
    return failure


def _find_lingering(result: JobEnds, node: str = "") -> Lingering | None:
    """Return the rank whose process does not end; an empty node stands for all nodes."""
    processes = [process for process in result.lingering or () if node in ("", process.node)]
    out_of_group = [process for process in processes if process.left is not None]
    if len(out_of_group) == result.world_size:
        return None  # nobody is in the group any more, so nobody waits there for anybody
    # First finished ones, then those that have left their group.
    return min(
        processes,
        key=lambda one: (
            *(one.finished is None, one.left is None),
            *(one.finished or one.left or 0.0, one.rank),
        ),
        default=None,
    )


def _convert_lingering(process: Lingering) -> FirstFailure:
    cause, hint = describe_lingering(process.finished, process.left, process.waits_for)
    return FirstFailure(
        node=process.node,
        rank=process.rank,
        kind=FailureClass.HANG,
        cause=cause,
        hint=hint,
        time=process.finished or process.left,
    )
