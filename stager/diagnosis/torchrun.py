"""Logs of which each is a whole torchrun's, though their names have Slurm's tasks: whose ranks?

Where ``srun`` starts one torchrun a node, ``%t`` counts nodes. Which ranks a node has is told by
the table that each torchrun closes with.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..logs.files import LogFile
from .exit_reports import ENDED_BY_OTHERS
from .scan import Hit, Scanned

_END = 1 << 18
"""Bytes at the end of a log in which the table is looked for."""
_SHOWN = re.compile(rb"torch[/.]distributed[/.](?:elastic|launcher|run)\b")
_OF_ITSELF = re.compile(r"torch/distributed/(?:run|launcher/api)\.py")
_PROCESS = re.compile(
    rb"rank\s*: (?P<rank>\d+) \(local_rank: (?P<local>\d+)\)\s*\n"
    rb"(?:.*?)exitcode\s*: (?P<code>-?\d+)"
)


@dataclass(frozen=True, kw_only=True)
class Torchruns:
    """What the ends of such logs tell; without effect on any other logs."""

    each: int = 1
    """Ranks of a torchrun."""
    first: Mapping[Path, int]
    """The lowest rank of each log's torchrun."""
    blamed: Mapping[Path, int]
    """The rank that ended with an exception, by its log; of several the one that was first."""

    def unnamed(self, log: LogFile) -> LogFile:
        """The log, without a task's number that is no rank's."""
        return replace(log, rank=None) if log.path in self.first else log

    def nodes(self, logs: Iterable[LogFile]) -> dict[int, str]:
        """The node of each rank."""
        return {
            self.first[log.path] + local: log.node
            for log in logs
            if log.path in self.first
            for local in range(self.each)
        }

    def named(self, seen: Scanned) -> Scanned:
        """What was found, with the ranks of tracebacks that no mark says the rank of."""
        return replace(seen, hits=tuple(self._named(hit) for hit in seen.hits))

    def _named(self, hit: Hit) -> Hit:
        of_rank = hit.trace and not any(_OF_ITSELF.search(line) for line in hit.trace)
        if hit.rank is None and of_rank and hit.log.path in self.blamed:
            return replace(hit, rank=self.blamed[hit.log.path])
        return hit


def torchruns(logs: Sequence[LogFile]) -> Torchruns:
    """See which logs are whole torchruns' with several ranks each, and which ranks those are."""
    tasks = {log.path: log.rank for log in logs if log.rank is not None and not log.own}
    ends = {path: _end(path) for path in tasks}
    if not any(_SHOWN.search(end) for end in ends.values()):
        return Torchruns(first={}, blamed={})
    found = {path: _processes(end) for path, end in ends.items()}
    every = [process for processes in found.values() for process in processes]
    first = {path: one[0][0] - one[0][1] for path, one in found.items() if one}
    # The ranks of task t begin at t times as many, unless the nodes have met in another order.
    steps = [rank // tasks[path] for path, rank in first.items() if tasks[path]]
    each = max([local + 1 for _, local, _ in every] + [min(steps, default=1)])
    if each == 1:
        return Torchruns(first={}, blamed={})
    blamed = {}
    for path, processes in found.items():
        own = [rank for rank, _, code in processes if code > 0 and code not in ENDED_BY_OTHERS]
        if own:
            blamed[path] = own[-1]  # the table ends with its root cause
    counted = {path: first.get(path, task * each) for path, task in tasks.items()}
    return Torchruns(each=each, first=counted, blamed=blamed)


def _processes(end: bytes) -> list[tuple[int, int, int]]:
    """Rank, local rank and exit status of each process in a table."""
    found = _PROCESS.finditer(end)
    return [(int(one["rank"]), int(one["local"]), int(one["code"])) for one in found]


def _end(path: Path) -> bytes:
    try:
        with path.open("rb") as handle:
            handle.seek(max(0, os.fstat(handle.fileno()).st_size - _END))
            return handle.read()
    except OSError:
        return b""
