"""The first failure as the driver's result tells it: from ranks' records, problems and statuses."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import replace

from bundle.launch.rank_results import CAUSE, LOST_PEER
from bundle.protocol.problem import Problem
from bundle.protocol.problem_table import TABLE
from bundle.protocol.words import FailureClass

from ..catalogue.catalogue import EXIT, PRIMARY, Match, match
from ..logs.result import JobResult, RankFailure, RankProcess
from . import problem_verdict
from .failure import FirstFailure
from .rank_verdict import LINES, of_rank, own_words, weigh
from .wording import lingering_in_words

_ENDED_BY_SIGTERM = 128 + signal.SIGTERM
_NOTICE_SECONDS = 1.0
"""Seconds by which a busy node may be late to notice that a rank has ended."""


def verdict(result: JobResult, job_id: str) -> FirstFailure | None:
    """Return the first failure; Slurm's end of the job comes before what followed from it.

    Args:
        result: the driver's result, see :func:`before_the_interrupt`.
        job_id: the allocation.
    """
    if result.ok:
        return None
    if not result.ended_by:
        return first_failure(result)
    node = next(iter(result.problems), "") if result.ended_by == "node-failure" else ""
    return problem_verdict.of_ending(result.ended_by, job_id, node)


def before_the_interrupt(result: JobResult) -> JobResult:
    """Return a result without what only followed from its user's interrupt, if that ended it."""
    if not result.interrupted or result.ended_by:
        return result
    failures = tuple(record for record in result.failures if not record.told_to_end)
    codes = result.exit_codes.items()
    others = {node: code for node, code in codes if node not in result.stopped}
    return replace(result, failures=failures, exit_codes=others)


def first_failure(result: JobResult) -> FirstFailure | None:
    """Return the earliest failure that is a cause and not a consequence.

    A rank that failed by itself comes first; then a node that could not do its part; then a rank
    that ended well, or left its process group, while others went on and missed it; then a launcher
    that failed before it had ranks. Only where there is none of these is a rank blamed that lost
    its connection to the others, or that somebody ended; or one that goes on for too long.
    """
    ranked = sorted(result.failures, key=_order)
    if ranked and weigh(ranked[0]) == CAUSE:
        return of_rank(_speaker(ranked))
    failure = (
        _node_problem(result, ranked)
        or _vanished(result)
        or _first_to_leave(result, ranked)
        or _failed_launcher(result, ranked)
    )
    if failure is not None:
        return failure
    return of_rank(ranked[0]) if ranked else _lingering(result)


def _order(record: RankFailure) -> tuple[int, float, bool]:
    """Order by weight, then by time; of two at the same time, torchrun's root cause comes first."""
    return weigh(record), record.time, not record.root_cause


def _speaker(ranked: Sequence[RankFailure]) -> RankFailure:
    """Return the first record; of several silent ranks that ended the same way, one with words.

    Ranks that agree to give up end together, and one of them speaks for all.
    """
    first = ranked[0]
    if first.exception or own_words(first)[0]:
        return first
    for record in ranked:
        same_end = not record.exception and record.exit_code == first.exit_code
        if same_end and weigh(record) == CAUSE and own_words(record)[0]:
            return record
    return first


def _node_problem(result: JobResult, ranked: Sequence[RankFailure]) -> FirstFailure | None:
    """Return the failure of the first node with a problem; those that only followed come last."""
    blamed: tuple[str, Problem] | None = None
    for node, problems in result.problems.items():
        for problem in problems:
            if not TABLE[problem.code].follows:
                return _of_node(node, problem, result, ranked)
            blamed = blamed or (node, problem)
    return None if blamed is None else _of_node(*blamed, result, ranked)


def _of_node(
    node: str, problem: Problem, result: JobResult, ranked: Sequence[RankFailure]
) -> FirstFailure:
    """Return the failure of a node that could not do its part, with its rank if one failed."""
    failure = problem_verdict.of_problem(problem, node)
    record = next((record for record in ranked if record.node == node), None)
    if record is not None:
        lines = record.lines[-LINES:]
        return replace(failure, rank=record.rank, exit_code=record.exit_code, lines=lines)
    lingering = _lingering(result, node) if failure.kind == FailureClass.HANG else None
    return lingering or failure


def _vanished(result: JobResult) -> FirstFailure | None:
    """Return the failure of a rank that made its launcher end the others, with unknown status."""
    gone = min(result.vanished, key=_time, default=None)
    if gone is None:
        return None
    return FirstFailure(
        node=gone.node,
        rank=gone.rank,
        exit_code=None,
        kind="unknown",
        cause="its process ended, and its launcher began to end the others because of it",
        hint="its log holds all it wrote; its exit status is told when all of them have ended",
        lines=(),
        time=gone.time,
    )


def _first_to_leave(result: JobResult, ranked: Sequence[RankFailure]) -> FirstFailure | None:
    """Return the failure of a rank that others missed: it had ended well, or left the group."""
    # Their processes' ends count: an exception is often noted before the kernel tells of the end
    # that it follows from.
    missed = [record.ended or record.time for record in ranked if weigh(record) == LOST_PEER]
    gone = min(result.left, key=_time, default=None)
    if not missed or gone is None or _time(gone) > min(missed) + _NOTICE_SECONDS:
        return None
    if gone.goes_on:
        return _of_lingering(replace(gone, finished=None, left=gone.time))
    return FirstFailure(
        node=gone.node,
        rank=gone.rank,
        exit_code=0,
        kind="hang",
        cause="it ended, with exit status 0, while other ranks went on and waited for it",
        hint="see why it ended before the others: sys.exit or os._exit on one rank only, fewer "
        "batches than the others have, or a loop that it leaves earlier",
        lines=(),
        time=gone.time,
    )


def _time(process: RankProcess) -> float:
    return process.time or 0.0


def _failed_launcher(result: JobResult, ranked: Sequence[RankFailure]) -> FirstFailure | None:
    """Return the failure of a launcher without failed ranks; being told to end is a consequence."""
    with_ranks = {record.node for record in ranked}
    told_to_end = []
    for node, code in result.exit_codes.items():
        if code == 0 or node in with_ranks:
            continue
        if code != _ENDED_BY_SIGTERM:
            return _of_launcher(node, code, result.tails.get(node, ()))
        told_to_end.append(node)
    if ranked or not told_to_end:
        return None
    node = told_to_end[0]
    return _of_launcher(node, _ENDED_BY_SIGTERM, result.tails.get(node, ()))


def _of_launcher(node: str, code: int, tail: Sequence[str]) -> FirstFailure:
    """Return the failure of a launcher itself, before or beside its ranks."""
    failure = FirstFailure(
        node=node,
        rank=None,
        exit_code=code,
        kind="unknown",
        cause=f"the launcher ended with exit status {code}",
        hint="the node's log holds all that was written",
        lines=tuple(tail[-LINES:]),
    )
    for line in tail:
        known = match(line)
        if known is not None and _is_cause(known):
            entry, groups = known
            meaning, hint = entry.explain(groups)
            return replace(
                failure,
                kind=entry.kind,
                cause=line.strip() or failure.cause,
                hint=hint or failure.hint,
                meaning=meaning,
                entry=entry.name,
            )
    last = next((line.strip() for line in reversed(tail) if line.strip()), "")
    return replace(failure, cause=last or failure.cause)


def _is_cause(known: Match) -> bool:
    entry, _ = known
    return entry.role == PRIMARY and entry.tells != EXIT


def _lingering(result: JobResult, node: str = "") -> FirstFailure | None:
    """Return the failure of the rank, of that node if one is given, that goes on for too long."""
    processes = [process for process in result.lingering if node in ("", process.node)]
    out_of_group = [process for process in processes if process.left is not None]
    if not processes or len(out_of_group) == result.world_size:
        return None  # nobody is in the group any more, so nobody waits there for anybody
    return _of_lingering(min(processes, key=_since))


def _since(process: RankProcess) -> tuple[bool, bool, float, int]:
    """Order ranks that go on: those that have finished, that have left their group, all others."""
    finished, left = process.finished, process.left
    return finished is None, left is None, finished or left or 0.0, process.rank


def _of_lingering(process: RankProcess) -> FirstFailure:
    cause, hint = lingering_in_words(process.finished, process.left, process.waits_for)
    return FirstFailure(
        node=process.node,
        rank=process.rank,
        exit_code=None,
        kind="hang",
        cause=cause,
        hint=hint,
        lines=(),
        time=process.finished or process.left,
    )
