"""Logs that are of whole torchruns, though their names have Slurm's tasks: their ranks.

Where ``srun`` starts one torchrun a node, ``%t`` counts nodes. The table that each torchrun closes
with names its ranks.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..logs.job_files import LogFile
from .exit_reports import ENDED_BY_OTHERS
from .scan import LAUNCHER_FRAME, Hit, Scanned

_TAIL_BYTES = 1 << 18
"""Bytes at the end of a log in which the table is looked for."""
_TORCHRUN = re.compile(rb"torch[/.]distributed[/.](?:elastic|launcher|run)\b")
_PROCESS = re.compile(
    rb"rank\s*: (?P<rank>\d+) \(local_rank: (?P<local>\d+)\)\s*\n"
    rb"(?:.*?)exitcode\s*: (?P<code>-?\d+)"
)


@dataclass(frozen=True, kw_only=True)
class Torchruns:
    """The ranks of logs that are of whole torchruns; without effect on any other logs."""

    each: int = 1
    """Ranks of a torchrun."""
    first: Mapping[Path, int]
    """The lowest rank of each log's torchrun."""
    blamed: Mapping[Path, int]
    """The rank that ended with an exception, by its log; of several the one that was first."""

    def without_task(self, log: LogFile) -> LogFile:
        """Return the log, without a task's number that is no rank's."""
        return replace(log, rank=None) if log.path in self.first else log

    def nodes(self, logs: Iterable[LogFile]) -> dict[int, str]:
        """Return the node of each rank."""
        nodes: dict[int, str] = {}
        for log in logs:
            first = self.first.get(log.path)
            if first is not None:
                nodes.update(dict.fromkeys(range(first, first + self.each), log.node))
        return nodes

    def with_ranks(self, seen: Scanned) -> Scanned:
        """Return the hits, with the ranks of tracebacks that no mark says the rank of."""
        return replace(seen, hits=tuple(self._with_rank(hit) for hit in seen.hits))

    def _with_rank(self, hit: Hit) -> Hit:
        if hit.rank is not None or not hit.trace or hit.log.path not in self.blamed:
            return hit
        if any(LAUNCHER_FRAME.search(line) for line in hit.trace):
            return hit
        return replace(hit, rank=self.blamed[hit.log.path])


_NONE = Torchruns(first={}, blamed={})


@dataclass(frozen=True, kw_only=True)
class _Process:
    rank: int
    local_rank: int
    exit_code: int

    @property
    def first_rank(self) -> int:
        """The lowest rank of its torchrun."""
        return self.rank - self.local_rank

    @property
    def raised(self) -> bool:
        """True if it ended by itself, with an exception."""
        return self.exit_code > 0 and self.exit_code not in ENDED_BY_OTHERS


def torchruns(logs: Sequence[LogFile]) -> Torchruns:
    """Return which logs are of whole torchruns with several ranks each, and the ranks."""
    others = [log for log in logs if not log.own]
    tasks = {log.path: log.rank for log in others if log.rank is not None}
    tables = _tables(tasks)
    first = {path: table[0].first_rank for path, table in tables.items() if table}
    each = _ranks_each(tables, first, tasks)
    if each == 1:
        return _NONE
    by_task = {path: task * each for path, task in tasks.items()}
    return Torchruns(each=each, first=by_task | first, blamed=_blamed(tables))


def _tables(paths: Iterable[Path]) -> dict[Path, list[_Process]]:
    """Return the processes in each log's table; empty if no log is a torchrun's."""
    tails = {path: _tail(path) for path in paths}
    if not any(map(_TORCHRUN.search, tails.values())):
        return {}
    return {path: _table(tail) for path, tail in tails.items()}


def _ranks_each(
    tables: Mapping[Path, Sequence[_Process]],
    first: Mapping[Path, int],
    tasks: Mapping[Path, int],
) -> int:
    # The ranks of task t begin at t times as many, unless the nodes have met in another order.
    steps = [rank // tasks[path] for path, rank in first.items() if tasks[path]]
    each = min(steps, default=1)
    for table in tables.values():
        for process in table:
            each = max(each, process.local_rank + 1)
    return each


def _blamed(tables: Mapping[Path, Sequence[_Process]]) -> dict[Path, int]:
    blamed = {}
    for path, table in tables.items():
        for process in table:
            if process.raised:
                blamed[path] = process.rank  # the last one counts: a table ends with its root cause
    return blamed


def _table(tail: bytes) -> list[_Process]:
    return [
        _Process(rank=int(row["rank"]), local_rank=int(row["local"]), exit_code=int(row["code"]))
        for row in _PROCESS.finditer(tail)
    ]


def _tail(path: Path) -> bytes:
    try:
        with path.open("rb") as handle:
            handle.seek(max(0, os.fstat(handle.fileno()).st_size - _TAIL_BYTES))
            return handle.read()
    except OSError:
        return b""
