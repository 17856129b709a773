"""Several attempts in one log: a job that was requeued, ranks that were started again.

Only the last attempt is judged. It begins below the last line that tells the end of an earlier one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path

from ..catalogue.catalogue import LineTells
from .aftermath import aftermath
from .scan import Hit

_ENDS = ("child-failed", "cancelled", "requeued", "task-failure", "step-ended", "task-terminated")
"""Entries that tell the end of an attempt, besides exit statuses and Slurm's end of a job."""
_REQUEUED = ("requeued", "preempted", "node-failure", "node-lost")
"""Entries that tell an end after which Slurm may start the job again."""
_ORDINARY = 20
"""Ordinary lines below such an end that only another attempt can have written; ranks that are told
to end may go on for half a minute."""
_AFTER_REPORT = 5
"""Ordinary lines below torchrun's report of a failed rank that a restarted one has written."""


def of_last_attempts(
    hits: Sequence[Hit], heads: Mapping[Path, Sequence[int]], restarts: int
) -> list[Hit]:
    """Return the hits of each log's last attempt."""
    kept: list[Hit] = []
    for path, group in groupby(hits, key=lambda hit: hit.log.path):
        of_log = sorted(group, key=lambda hit: hit.number)
        start = _start_of_last(of_log, heads.get(path, ()), restarts)
        kept += [hit for hit in of_log if hit.number > start]
    return kept


def _start_of_last(hits: Sequence[Hit], heads: Sequence[int], restarts: int) -> int:
    """Return the line after which the last attempt begins; 0 for a single attempt."""
    ends = [hit for hit in hits if _is_end(hit)]
    start = _last_restart_of_torchrun(hits, restarts)
    untils = [*(hit.number for hit in ends[1:]), None]
    for end, until in zip(ends, untils, strict=False):
        if until is not None and until - end.last <= 1:
            continue
        if _is_followed_by_another(end, until, heads):
            start = max(start, end.last)
    return start


def _last_restart_of_torchrun(hits: Sequence[Hit], restarts: int) -> int:
    """Return the last restart's line: one report for each attempt, a table only after the last."""
    tables = [hit for hit in hits if hit.entry.name == "child-failed" and hit.trace]
    reports = [hit for hit in hits if hit.entry.name == "torchrun-report"]
    if reports and not tables and len(reports) <= restarts:
        return reports[-1].number
    return reports[-2].number if len(tables) == 1 and len(reports) > 1 else 0


def _is_end(hit: Hit) -> bool:
    if hit.entry.tells in (LineTells.EXIT, LineTells.END):
        return True
    return hit.entry.name in _ENDS


def _is_followed_by_another(end: Hit, until: int | None, heads: Sequence[int]) -> bool:
    if any(end.last < head and (until is None or head < until) for head in heads):
        return True
    after = aftermath(end, until)
    if after.restarted:
        return True
    if end.entry.name in _REQUEUED:
        return after.ordinary >= _ORDINARY
    return end.entry.name == "torchrun-report" and after.ordinary >= _AFTER_REPORT
