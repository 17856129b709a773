"""The answers of a node's tasks as one, where Slurm starts several on a node."""

from __future__ import annotations

from dataclasses import replace

from ..protocol.messages import Answer
from ..protocol.reports import LaunchAnswer


def joined(first: Answer | None, second: Answer) -> Answer:
    """Return the answers of two tasks of one node as one; the first failure gives the status."""
    if first is None:
        return second
    if isinstance(first, LaunchAnswer) and isinstance(second, LaunchAnswer):
        first = _with_ranks(first, second)
    return replace(
        first,
        ok=first.ok and second.ok,
        lost=first.lost or second.lost,
        unreachable=first.unreachable or second.unreachable,
        tasks=first.tasks + second.tasks,
        exit_code=first.exit_code or second.exit_code or 0,
        problems=(*first.problems, *second.problems),
    )


def _with_ranks(first: LaunchAnswer, second: LaunchAnswer) -> LaunchAnswer:
    return replace(
        first,
        failures=(*first.failures, *second.failures),
        tail=(*first.tail, *second.tail),
        stopped=second.stopped if first.lost else first.stopped,
        first_rank=first.first_rank if second.first_rank is None else second.first_rank,
        left=(*first.left, *second.left),
        vanished=(*first.vanished, *second.vanished),
        lingering=(*first.lingering, *second.lingering),
        joined=(*first.joined, *second.joined),
        alone=(*first.alone, *second.alone),
    )
