"""The ends of processes, as launchers report them: torchrun's closing table, and srun's lines."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bundle.protocol.enumerations import FailureClass

from ..catalogue.catalogue import LineTells
from ..logs.job_files import LogFile
from ..logs.lines import numbered, stamp, year_of
from ..logs.prefixes import parse_line
from .rank_verdict import signal_of
from .scan import Hit

_ROOT = re.compile(r"^\W*Root Cause\b")
"""The line after which torchrun names the rank that it saw failing first."""
_MAY_BE_ROW = re.compile(r"Root Cause| : ")
_FIELD = re.compile(r"^\s*(?:\[\d+\]:\s*)?(?P<name>time|host|rank|exitcode)\s*: (?P<value>.*)$")
_RANK = re.compile(r"(\d+) \(local_rank: (\d+)\)")
_CODE = re.compile(r"(-?\d+)")
_TABLE_ENTRIES = ("torchrun-report", "child-failed")
"""Entries that stand above a table of torchrun's."""
_STEP_ENDS = ("cancelled", "task-failure", "step-ended")
"""Entries by which Slurm says that it ends the tasks that are left."""
_SIGNALS = {
    "Killed": -9,
    "Segmentation fault": -11,
    "Aborted": -6,
    "Illegal instruction": -4,
    "Bus error": -7,
    "Terminated": -15,
    "Hangup": -1,
    "Interrupt": -2,
    "Floating point exception": -8,
}
ENDED_BY_OTHERS = (-15, 143, -2, 130, -6, 134)
"""Statuses that another rank's failure leaves: SIGTERM, SIGINT, or a watchdog's abort."""


@dataclass(frozen=True, kw_only=True)
class Exit:
    """The report of one process that ended badly."""

    log: LogFile
    """The file of the report."""
    number: int
    """The line's number there."""
    text: str
    """The line."""
    node: str
    """The node of the process; empty if unknown."""
    rank: int | None
    """The rank; None where only a local one, or none, is reported."""
    code: int
    """The exit status, negative for a signal."""
    time: float | None
    """The time, in seconds since the epoch; a table has whole seconds."""
    followed: bool = False
    """Whether its launcher saw another one fail first, and may have killed it."""

    @property
    def by_itself(self) -> bool:
        """True if a signal ended it that no other process can have sent."""
        if self.followed or self.code in ENDED_BY_OTHERS:
            return False
        return signal_of(self.code) > 0

    @property
    def raised(self) -> bool:
        """True if it is a rank that ended by itself, with an exception."""
        return self.rank is not None and self.code > 0 and signal_of(self.code) == 0


def exits(hits: Sequence[Hit]) -> list[Exit]:
    """Return every process whose end the hits report, in order of time where that is known."""
    reports = [hit for hit in hits if hit.entry.tells == LineTells.EXIT]
    tables = _in_tables(hits)
    of_torchrun = [*tables, *_without_table(reports, tables)]
    of_srun = _of_srun(reports, bool(tables), _step_ends(hits))
    # srun's line is about a whole torchrun, whose own table says more.
    tasks = [task for task in of_srun if not _has_table(task, of_torchrun)]
    return sorted([*of_torchrun, *tasks, *_of_others(reports)], key=_time)


def nodes_of_ranks(ended: Iterable[Exit]) -> dict[int, str]:
    """Return the node of each rank whose end is reported."""
    return {process.rank: process.node for process in ended if process.rank is not None}


def root_cause(ended: Sequence[Exit]) -> Exit | None:
    """Return the first failed rank if it raised, else None; ``ended`` is in order of time."""
    first = next((process for process in ended if not process.followed), None)
    return first if first is not None and first.raised else None


def _time(process: Exit) -> tuple[bool, float]:
    return process.time is None, process.time or 0.0


def _step_ends(hits: Iterable[Hit]) -> dict[Path, int]:
    """Return, for each log, the line at which Slurm begins to end the step."""
    ends: dict[Path, int] = {}
    for hit in hits:
        if hit.entry.tells == LineTells.END or hit.entry.name in _STEP_ENDS:
            ends[hit.log.path] = min(hit.number, ends.get(hit.log.path, hit.number))
    return ends


def _in_tables(hits: Iterable[Hit]) -> list[Exit]:
    logs = {hit.log.path: hit.log for hit in hits if hit.entry.name in _TABLE_ENTRIES}
    processes: list[Exit] = []
    first: dict[Path, int] = {}
    for hit in hits:  # those of an earlier attempt are no longer among the hits
        if hit.entry.name in _TABLE_ENTRIES:
            first[hit.log.path] = min(hit.number, first.get(hit.log.path, hit.number))
    for log in logs.values():
        processes += (row for row in _table(log) if row.number > first[log.path])
    return processes


def _table(log: LogFile) -> Iterator[Exit]:
    """Yield the processes of torchrun's ``ChildFailedError`` tables in a log."""
    fields: dict[str, str] = {}
    is_root = False
    year = year_of(log.path)
    for number, line in numbered(log.path):
        if not _MAY_BE_ROW.search(line):
            continue
        text = parse_line(line).text
        if _ROOT.match(text):
            is_root = True
        field = _FIELD.match(text)
        if field is None:
            continue
        fields[field["name"]] = field["value"].strip()
        if field["name"] != "exitcode":
            continue
        code = _CODE.match(fields["exitcode"])
        if code is not None:
            rank = _RANK.match(fields.get("rank", ""))
            yield Exit(
                log=log,
                number=number,
                text=text.strip(),
                node=log.node or fields.get("host", ""),
                rank=int(rank[1]) if rank else None,
                code=int(code[1]),
                time=stamp(fields.get("time", "").encode(), year),
                followed=not is_root,
            )
        fields, is_root = {}, False


def _without_table(reports: Iterable[Hit], tables: Iterable[Exit]) -> Iterator[Exit]:
    """Yield the processes that torchrun reports, for logs that end before its table."""
    with_table = {process.log.path for process in tables}
    for hit in reports:
        if hit.log.path in with_table or "local" not in hit.groups:
            continue
        yield Exit(
            log=hit.log,
            number=hit.number,
            text=hit.text,
            node=hit.log.node,
            rank=None,
            code=int(hit.groups["code"]),
            time=hit.time,
        )


def _of_srun(
    reports: Iterable[Hit], has_torchrun: bool, step_ends: Mapping[Path, int]
) -> Iterator[Exit]:
    """Yield the tasks that srun reports; a task is a rank only without torchrun."""
    for hit in reports:
        if "tasks" not in hit.groups:
            continue
        task = re.match(r"\d+", hit.groups["tasks"])
        yield Exit(
            log=hit.log,
            number=hit.number,
            text=hit.text,
            node=hit.groups.get("node", ""),
            rank=None if has_torchrun or task is None else int(task[0]),
            code=_code_of(hit),
            time=hit.time,
            followed=hit.number > step_ends.get(hit.log.path, hit.number),
        )


def _of_others(reports: Iterable[Hit]) -> Iterator[Exit]:
    for hit in _joined(reports):
        if "tasks" in hit.groups or "local" in hit.groups:
            continue
        rank = hit.groups.get("rank", "")
        yield Exit(
            log=hit.log,
            number=hit.number,
            text=hit.text,
            node=hit.node,
            rank=int(rank) if rank.isdigit() else hit.rank,
            code=_code_of(hit),
            time=hit.time,
        )


def _joined(reports: Iterable[Hit]) -> Iterator[Hit]:
    """Join Open MPI's status with the line above it, which names the process."""
    above: Hit | None = None
    for hit in reports:
        if above is not None and (hit.log, hit.number) == (above.log, above.number + 1):
            groups = {**above.groups, **hit.groups}
            yield replace(hit, known=replace(hit.known, groups=groups))
            above = None
            continue
        if above is not None:
            yield above
        above = hit if hit.entry.name == "openmpi-process" else None
        if above is None:
            yield hit
    if above is not None:
        yield above


def _code_of(hit: Hit) -> int:
    """Return the exit status in a line, negative for a signal; 1 if it is unknown."""
    code, name = hit.groups.get("code", ""), hit.groups.get("signal", "")
    if code.lstrip("-").isdigit():
        return int(code)
    if name.isdigit():
        return -int(name)
    for known, number in _SIGNALS.items():
        if name.lower().startswith(known.lower()):
            return number
    try:
        return -signal.Signals[name]
    except KeyError:
        return -signal.SIGKILL if hit.entry.kind == FailureClass.KILLED else 1


def _has_table(task: Exit, processes: Iterable[Exit]) -> bool:
    """Return whether a torchrun on the task's node, or on an unnamed one, reports more."""
    node = task.node.partition(".")[0]
    return any(process.node.partition(".")[0] in ("", node) for process in processes)
