"""How processes ended, as launchers report it: torchrun's closing table, and srun's lines."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..catalogue.catalogue import END, EXIT
from ..logs.clock import stamp, year_of
from ..logs.files import LogFile
from .scan import Hit
from .traceback import marked

_ROOT = re.compile(r"^\W*Root Cause\b")
"""After it, torchrun names the one of its ranks that it saw failing first."""
_FIELD = re.compile(r"^\s*(?:\[\d+\]:\s*)?(?P<name>time|host|rank|exitcode)\s*: (?P<value>.*)$")
_RANK = re.compile(r"(\d+) \(local_rank: (\d+)\)")
_CODE = re.compile(r"(-?\d+)")
_TORCHRUN = ("torchrun-report", "child-failed")
"""Entries that stand above a table of torchrun's."""
_STEP_ENDS = ("cancelled", "task-failure", "step-ended")
"""Entries by which Slurm says that it ends the tasks that are left."""
_SIGNALS = {
    "Killed": -9,
    "Segmentation fault": -11,
    "Aborted": -6,
    "Illegal instruction": -4,
    "Bus error": -7,
}
ENDED_BY_OTHERS = (-15, 143, -2, 130, -6, 134)
"""Statuses that somebody else's failure leaves: told to end, or a watchdog that gave up."""


@dataclass(frozen=True, kw_only=True)
class Exit:
    """One process that ended badly."""

    log: LogFile
    """The file that tells so."""
    number: int
    """The line's number there."""
    text: str
    """The line."""
    node: str
    """Its node; empty where that is not told."""
    rank: int | None
    """Its rank; None where only a local one, or none, is told."""
    code: int
    """Its exit status, negative for a signal."""
    time: float | None
    """When, in seconds since the epoch; a table has whole seconds."""
    followed: bool = False
    """Whether its launcher saw another one fail first, and may have killed it."""

    @property
    def by_itself(self) -> bool:
        """Whether nobody else can have ended it."""
        if self.followed or self.code in ENDED_BY_OTHERS:
            return False
        return self.code < 0 or self.code > 128


def exits(hits: Sequence[Hit]) -> list[Exit]:
    """Every process of which the finds tell how it ended, the earliest first where that is told."""
    reports = [hit for hit in hits if hit.entry is not None and hit.entry.tells == EXIT]
    tables = [one for log in _logs_with_tables(hits) for one in _table(log)]
    told = {one.log.path for one in tables}
    ends = _step_ends(hits)
    lines = [one for hit in reports if (one := _of_srun(hit, bool(tables), ends)) is not None]
    single = [one for hit in reports if hit.log.path not in told for one in _of_torchrun(hit)]
    # srun's line tells of a whole torchrun, whose own table says more.
    more = [*tables, *single]
    found = [*more, *(one for one in lines if not more or not _told(one, more))]
    return sorted(found, key=lambda one: (one.time is None, one.time or 0.0))


def _step_ends(hits: Iterable[Hit]) -> dict[Path, int]:
    """The line of each log from which on Slurm ends what is left of a step."""
    found: dict[Path, int] = {}
    for hit in hits:
        if hit.entry is not None and (hit.entry.tells == END or hit.entry.name in _STEP_ENDS):
            found[hit.log.path] = min(hit.number, found.get(hit.log.path, hit.number))
    return found


def _logs_with_tables(hits: Iterable[Hit]) -> list[LogFile]:
    told = (hit for hit in hits if hit.entry is not None and hit.entry.name in _TORCHRUN)
    return list({hit.log.path: hit.log for hit in told}.values())


def _table(log: LogFile) -> list[Exit]:
    """The processes of torchrun's ``ChildFailedError`` tables in a log."""
    found: list[Exit] = []
    fields: dict[str, str] = {}
    year, root = year_of(log.path), False
    try:
        with log.path.open(encoding="utf-8", errors="replace") as handle:
            for number, line in enumerate(handle, start=1):
                text = marked(line.rstrip("\n")).text
                if _ROOT.match(text):
                    root = True
                field = _FIELD.match(text)
                if field is None:
                    continue
                fields[field["name"]] = field["value"].strip()
                if field["name"] == "exitcode":
                    one = _of_table(log, number, text, fields, year)
                    found += [] if one is None else [replace(one, followed=not root)]
                    fields, root = {}, False
    except OSError:
        pass
    return found


def _of_table(
    log: LogFile, number: int, text: str, fields: Mapping[str, str], year: int
) -> Exit | None:
    rank, code = _RANK.match(fields.get("rank", "")), _CODE.match(fields["exitcode"])
    if code is None:
        return None
    return Exit(
        log=log,
        number=number,
        text=text.strip(),
        node=log.node or fields.get("host", ""),
        rank=int(rank[1]) if rank else None,
        code=int(code[1]),
        time=stamp(fields.get("time", "").encode(), year),
    )


def _of_torchrun(hit: Hit) -> list[Exit]:
    """What torchrun says before its table, of a log that breaks off there."""
    if "local" not in hit.groups:
        return []
    code = int(hit.groups["code"])
    text, node = hit.text, hit.log.node
    log, number, time = hit.log, hit.number, hit.time
    return [Exit(log=log, number=number, text=text, node=node, rank=None, code=code, time=time)]


def _of_srun(hit: Hit, tables: bool, ends: Mapping[Path, int]) -> Exit | None:
    """What srun says of a task; it is a rank only where no torchrun stands between."""
    if "tasks" not in hit.groups:
        return None
    task = re.match(r"\d+", hit.groups["tasks"])
    code = hit.groups.get("code")
    return Exit(
        log=hit.log,
        number=hit.number,
        text=hit.text,
        node=hit.groups.get("node", ""),
        rank=None if tables or task is None else int(task[0]),
        code=int(code) if code else _SIGNALS[hit.groups["signal"]],
        time=hit.time,
        followed=hit.number > ends.get(hit.log.path, hit.number),
    )


def _told(one: Exit, tables: Sequence[Exit]) -> bool:
    """Whether a torchrun on that node, or on one that is not named, tells more."""
    node = one.node.partition(".")[0]
    return any(table.node.partition(".")[0] in ("", node) for table in tables)
