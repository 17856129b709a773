"""The first failure as the driver's result tells it: from ranks' records, problems and statuses.

The candidates are made here; :mod:`.verdict` has their order, and the reasons for it.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from bundle.launch.rank_results import CAUSE, ENDED, LOST_PEER
from bundle.protocol.enumerations import Ending, FailureClass
from bundle.protocol.problem import Problem
from bundle.protocol.problem_table import TABLE
from bundle.protocol.reports import FailureRecord

from ..catalogue.catalogue import CatalogueEntry, LineRole, LineTells, match
from ..logs.job_record import JobResult, RankProcess
from . import problem_verdict
from .failure import FirstFailure
from .phrases import lingering_in_words
from .rank_verdict import LINES, of_rank, own_words, weigh
from .verdict import Candidate, Role, blamed

_ROLES = {CAUSE: Role.CAUSE, LOST_PEER: Role.LOST_PEER, ENDED: Role.ENDED_BY_OTHERS}
"""The role of a rank, by the weight of its failure."""
_ENDED_BY_SIGTERM = 128 + signal.SIGTERM
_NOTICE_SECONDS = 1.0
"""Seconds by which a busy node may be late to notice that a rank has ended."""


def verdict(result: JobResult, job_id: str) -> FirstFailure | None:
    """Return the first failure; Slurm's end of the job comes before what followed from it."""
    if result.ok:
        return None
    if not result.ended_by:
        return first_failure(result)
    node = ""
    if result.ended_by == Ending.NODE_FAILURE:
        node = next(iter(result.problems), "")
    return problem_verdict.of_ending(result.ended_by, job_id, node)


def before_the_interrupt(result: JobResult) -> JobResult:
    """Return a result without what only followed from its user's interrupt, if that ended it."""
    if not result.interrupted or result.ended_by:
        return result
    failures = tuple(record for record in result.failures if not record.told_to_end)
    codes = dict(result.exit_codes)
    for node in result.stopped:
        codes.pop(node, None)
    return replace(result, failures=failures, exit_codes=codes)


def first_failure(result: JobResult) -> FirstFailure | None:
    """Return the earliest failure that is a cause and not a consequence; None for no failure."""
    first = blamed(_candidates(result))
    return None if first is None else first.failure()


def _candidates(result: JobResult) -> Iterator[Candidate]:
    # Of two ranks that failed at the same time, torchrun's root cause comes first.
    records = sorted(result.failures, key=lambda record: not record.root_cause)
    ranks = [_rank(record) for record in records]
    yield from ranks
    yield from _nodes(result, ranks)
    yield from map(_vanished, result.vanished)
    yield from _left_early(result)
    yield from _launchers(result)
    lingering = _lingering(result)
    if lingering is not None:
        yield Candidate(role=Role.LINGERING, failure=partial(_of_lingering, lingering))


def _rank(record: FailureRecord) -> Candidate:
    """Return a failed rank; of ranks that exit together without an exception, one is enough."""
    role = _ROLES[weigh(record)]
    wordless = role is Role.CAUSE and not record.exception
    return Candidate(
        role=role,
        failure=partial(of_rank, record),
        node=record.node,
        time=record.time,
        silent=wordless and not own_words(record)[0],
        same=record.exit_code if wordless else None,
    )


def _nodes(result: JobResult, ranks: Sequence[Candidate]) -> Iterator[Candidate]:
    for node, problems in result.problems.items():
        for problem in problems:
            yield Candidate(
                role=Role.FOLLOWING_NODE if TABLE[problem.code].follows else Role.NODE,
                failure=partial(_of_node, node, problem, result, ranks),
            )


def _of_node(
    node: str, problem: Problem, result: JobResult, ranks: Sequence[Candidate]
) -> FirstFailure:
    failure = problem_verdict.of_problem(problem, node)
    first = blamed(rank for rank in ranks if rank.node == node)
    if first is not None:
        rank = first.failure()
        return replace(failure, rank=rank.rank, exit_code=rank.exit_code, lines=rank.lines)
    if failure.kind != FailureClass.HANG:
        return failure
    lingering = _lingering(result, node)
    return failure if lingering is None else _of_lingering(lingering)


def _vanished(gone: RankProcess) -> Candidate:
    failure = FirstFailure(
        node=gone.node,
        rank=gone.rank,
        kind=FailureClass.UNKNOWN,
        cause="its process ended, and its launcher began to end the others because of it",
        hint="its log holds all it wrote; its exit status is known only once all ranks have ended",
        time=gone.time,
    )
    return Candidate(role=Role.VANISHED, failure=lambda: failure, time=gone.time)


def _left_early(result: JobResult) -> Iterator[Candidate]:
    """Yield the ranks that exited, or left the group, before others lost their peer."""
    # Their processes' ends count: an exception is often noted before the kernel tells of the end
    # that it follows from.
    lost = [record for record in result.failures if weigh(record) == LOST_PEER]
    if not lost:
        return
    missed = min(record.ended or record.time for record in lost)
    for gone in result.left:
        if (gone.time or 0.0) <= missed + _NOTICE_SECONDS:
            yield Candidate(
                role=Role.LEFT_EARLY, failure=partial(_of_departed, gone), time=gone.time
            )


def _of_departed(gone: RankProcess) -> FirstFailure:
    if gone.goes_on:
        return _of_lingering(replace(gone, finished=None, left=gone.time))
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


def _launchers(result: JobResult) -> Iterator[Candidate]:
    with_ranks = {record.node for record in result.failures}
    for node, code in result.exit_codes.items():
        if code == 0 or node in with_ranks:
            continue
        yield Candidate(
            role=Role.ENDED_LAUNCHER if code == _ENDED_BY_SIGTERM else Role.BARE_STATUS,
            failure=partial(_of_launcher, node, code, result.tails.get(node, ())),
        )


def _of_launcher(node: str, code: int, tail: Sequence[str]) -> FirstFailure:
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
    for line in tail:
        known = match(line)
        if known is not None and _names_cause(known.entry):
            return replace(failure, cause=line.strip()).explained_by(known)
    return failure


def _names_cause(entry: CatalogueEntry) -> bool:
    return entry.role == LineRole.PRIMARY and entry.tells != LineTells.EXIT


def _lingering(result: JobResult, node: str = "") -> RankProcess | None:
    """Return the rank whose process does not end; an empty node stands for all nodes."""
    processes = [process for process in result.lingering if node in ("", process.node)]
    out_of_group = [process for process in processes if process.left is not None]
    if len(out_of_group) == result.world_size:
        return None  # nobody is in the group any more, so nobody waits there for anybody
    return min(processes, key=_since, default=None)


def _since(process: RankProcess) -> tuple[bool, bool, float, int]:
    """Order lingering ranks: first finished ones, then those that have left their group."""
    finished, left = process.finished, process.left
    return finished is None, left is None, finished or left or 0.0, process.rank


def _of_lingering(process: RankProcess) -> FirstFailure:
    cause, hint = lingering_in_words(process.finished, process.left, process.waits_for)
    return FirstFailure(
        node=process.node,
        rank=process.rank,
        kind=FailureClass.HANG,
        cause=cause,
        hint=hint,
        time=process.finished or process.left,
    )
