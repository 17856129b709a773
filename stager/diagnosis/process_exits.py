"""How processes ended: the records of ranks, torchrun's tables, srun's lines."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bundle.launch.rank_results import CAUSE, LOST_PEER, weigh_exit
from bundle.launch.wrapper import is_own_frame, keep_own_frame
from bundle.protocol.enumerations import FailureClass
from bundle.protocol.messages import FailureRecord

from ..catalogue.catalogue import CatalogueEntry, CatalogueMatch, LineRole, LineTells, match_line
from ..logs.job_files import LogFile
from ..logs.lines import number_lines, read_stamp, read_year
from ..logs.prefixes import parse_line
from .failure import FirstFailure
from .hits import LAUNCHER_FRAME, Hit, Scanned

# --- The failure of one rank, as its record tells it: its exception, its words, its exit status

_HIGHEST_SIGNAL = 64
LINES = 20
"""Lines that are kept of a failure."""

_ERROR = re.compile(
    r"(?:\[RANK \d+\] )?(?!srun|slurm|sbatch)(?:[\w./][\w./ -]*: )?error: \S.*", re.IGNORECASE
)
"""The form in which programs say why they end: ``error: ...``, ``train.py: error: ...``."""
_HINT = "hint: "
_LOG_TELLS = "the lines before that in its log say why"
_SIGNAL_HINTS = {
    "SIGTERM": "not its launcher: see whether the program signals itself, or who else sent it",
    "SIGKILL": "usually the machine ran out of memory: use a smaller batch or fewer ranks",
    "SIGBUS": "usually /dev/shm is full, or a file was cut off: check the free space there",
    "SIGABRT": "a library gave up: the last lines of its log say why",
    "SIGSEGV": "a crash in compiled code: set PYTHONFAULTHANDLER=1 and run again to see where",
    "SIGILL": "a wheel uses instructions that this processor lacks: exclude the node",
}


@dataclass(frozen=True, kw_only=True)
class Cause:
    """The cause of a failure, in words."""

    text: str
    """The cause, in one line."""
    kind: FailureClass
    """Its class."""
    hint: str
    """What to do about it."""


def describe_rank_failure(record: FailureRecord) -> FirstFailure:
    """Return the failure of a rank; what the catalogue knows of it comes before its own words."""
    cause = _cause(record)
    words, own_hint = find_own_words(record)
    if words:
        cause = Cause(text=words, kind=FailureClass.PYTHON_ERROR, hint=cause.hint)
    failure = FirstFailure(
        node=record.node,
        rank=record.rank,
        exit_code=record.exit_code,
        kind=cause.kind,
        cause=cause.text,
        hint=cause.hint,
        lines=tuple(keep_own_frame(record.lines, LINES)),
        time=record.time,
    )
    known = look_up_failure(record) or (match_line(words) if words else None)
    if known is not None:
        failure = failure.explain(known)
    return replace(failure, hint=own_hint or failure.hint)


def _cause(record: FailureRecord) -> Cause:
    exception, summary = record.exception, _summary(record)
    if not exception:
        return describe_exit_code(record.exit_code)
    if exception == "SystemExit":
        text, hint = _exit_of_its_own(summary)
    else:
        text = f"{exception}: {summary}" if summary else exception
        has_line = any("Traceback" in line or is_own_frame(line) for line in record.lines)
        hint = "the traceback names the line in your program" if has_line else _LOG_TELLS
    return Cause(text=text, kind=FailureClass.PYTHON_ERROR, hint=hint)


def _exit_of_its_own(value: str) -> tuple[str, str]:
    """Return words and hint for a ``sys.exit``, whose value is a status or a message."""
    if not value or value.lstrip("-").isdigit():
        return f"the program ended itself: sys.exit({value})", _LOG_TELLS
    return f"the program ended itself: {value}", "these are the program's own words"


def _summary(record: FailureRecord) -> str:
    return next(iter(record.message.strip().splitlines()), "")


def describe_exit_code(code: int) -> Cause:
    """Return the cause that the exit status of a silent process tells."""
    number = find_signal(code)
    if number == 0:
        text, hint = f"it ended with exit status {code}", "its log holds all it wrote"
        return Cause(text=text, kind=FailureClass.UNKNOWN, hint=hint)
    name = _signal_name(number)
    hint = _SIGNAL_HINTS.get(name, "see who sent the signal")
    return Cause(text=f"it was killed by {name}", kind=FailureClass.KILLED, hint=hint)


def find_signal(code: int) -> int:
    """Return the number of the signal that an exit status stands for; 0 for none.

    A shell adds 128 to a signal's number; ssh, Apptainer and ``sys.exit(-1)`` end with 255.
    """
    number = -code if code < 0 else code - 128
    return number if 0 < number <= _HIGHEST_SIGNAL else 0


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def find_own_words(record: FailureRecord) -> tuple[str, str]:
    """Return the words with which a rank ended itself, and its hint; empty if it did not.

    An exception with a line in the user's own code tells more, and so does one that they lack.
    """
    if not 0 < record.exit_code < 128 or any(map(is_own_frame, record.lines)):
        return "", ""
    said = "" if record.exception == "SystemExit" else _summary(record)
    hint = ""
    for line, below in zip(reversed(record.lines), ("", *reversed(record.lines)), strict=False):
        if _ERROR.match(line) and said in line:
            return f"{line.strip()} {below.strip() if line.endswith(':') else ''}".strip(), hint
        if line.startswith(_HINT):
            hint = line.removeprefix(_HINT).strip()
    return "", ""


def weigh_failure(record: FailureRecord) -> int:
    """Return the relation of a failure to those of others: cause, lost peer, or ended by others.

    The far side weighs it; but a rank whose collective did not end in time has lost its peers, too.
    """
    seen = weigh_exit(record.exit_code, record.exception, record.message, record.told_to_end)
    if seen != CAUSE:
        return seen
    known = look_up_failure(record)
    follows = known is not None and known.entry.role == LineRole.CASCADE
    return LOST_PEER if follows else CAUSE


def has_waited_in_vain(record: FailureRecord) -> bool:
    """Return whether a rank failed because it had waited too long for another one."""
    known = look_up_failure(record)
    return known is not None and known.entry.tells == LineTells.STUCK


def look_up_failure(record: FailureRecord) -> CatalogueMatch | None:
    """Return what the catalogue knows of a rank's failure.

    Its exception counts, then those that it followed from. Of a rank that left none, the lines may
    be anybody's.
    """
    if not record.exception:
        return None
    closing = match_line(f"{record.exception}: {_summary(record)}")
    if closing is not None and _explains(closing.entry):
        return closing
    last: CatalogueMatch | None = None
    for line in reversed(_exception_lines(record)):
        known = match_line(line)
        if known is None or not _explains(known.entry):
            continue
        if known.entry.role == LineRole.PRIMARY:
            return known
        last = last or known
    return last


def _exception_lines(record: FailureRecord) -> list[str]:
    """Return the lines that may be exceptions; of a ``sys.exit``, the errors logged before it."""
    if record.exception == "SystemExit":
        return [line for line in record.lines if "rror" in line]
    return [line for line in record.lines if line[:1].strip()]


def _explains(entry: CatalogueEntry) -> bool:
    return entry.role != LineRole.NOISE and entry.tells != LineTells.EXIT


# --- The ends of processes, as launchers report them: torchrun's closing table, and srun's lines

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
    def is_own_end(self) -> bool:
        """True if a signal ended it that no other process can have sent."""
        if self.followed or self.code in ENDED_BY_OTHERS:
            return False
        return find_signal(self.code) > 0

    @property
    def has_raised(self) -> bool:
        """True if it is a rank that ended by itself, with an exception."""
        return self.rank is not None and self.code > 0 and find_signal(self.code) == 0


def list_exits(hits: Sequence[Hit]) -> list[Exit]:
    """Return every process whose end the hits report, in order of time where that is known."""
    tables = _read_tables(hits)
    with_table = {process.log.path for process in tables}
    step_ends = _step_ends(hits)
    of_torchrun, tasks, others = list(tables), [], []
    for hit in _join_openmpi_lines(hit for hit in hits if hit.entry.tells == LineTells.EXIT):
        if "local" in hit.groups:
            if hit.log.path not in with_table:  # it ends before its table
                of_torchrun.append(_exit(hit, node=hit.log.node, rank=None))
        elif "tasks" in hit.groups:
            # A task is a rank only without torchrun.
            task = None if tables else re.match(r"\d+", hit.groups["tasks"])
            report = _exit(hit, node=hit.groups.get("node", ""), rank=task and int(task[0]))
            is_later = hit.number > step_ends.get(hit.log.path, hit.number)
            tasks.append(replace(report, followed=is_later))
        else:
            rank = hit.groups.get("rank", "")
            rank_of_hit = int(rank) if rank.isdigit() else hit.rank
            others.append(_exit(hit, node=hit.node, rank=rank_of_hit))
    # srun's line is about a whole torchrun, whose own table says more.
    tasks = [task for task in tasks if not _has_table(task, of_torchrun)]
    return sorted([*of_torchrun, *tasks, *others], key=_time)


def _exit(hit: Hit, *, node: str, rank: int | None) -> Exit:
    return Exit(
        log=hit.log,
        number=hit.number,
        text=hit.text,
        node=node,
        rank=rank,
        code=_read_exit_code(hit),
        time=hit.time,
    )


def map_ranks_to_nodes(ended: Iterable[Exit]) -> dict[int, str]:
    """Return the node of each rank whose end is reported."""
    return {process.rank: process.node for process in ended if process.rank is not None}


def find_root_cause(ended: Sequence[Exit]) -> Exit | None:
    """Return the first failed rank if it raised, else None; ``ended`` is in order of time."""
    first = next((process for process in ended if not process.followed), None)
    return first if first is not None and first.has_raised else None


def _time(process: Exit) -> tuple[bool, float]:
    return process.time is None, process.time or 0.0


def _step_ends(hits: Iterable[Hit]) -> dict[Path, int]:
    """Return, for each log, the line at which Slurm begins to end the step."""
    ends: dict[Path, int] = {}
    for hit in hits:
        if hit.entry.tells == LineTells.END or hit.entry.name in _STEP_ENDS:
            ends[hit.log.path] = min(hit.number, ends.get(hit.log.path, hit.number))
    return ends


def _read_tables(hits: Iterable[Hit]) -> list[Exit]:
    """Return the processes of torchrun's ``ChildFailedError`` tables."""
    first: dict[LogFile, int] = {}
    for hit in hits:  # those of an earlier attempt are no longer among the hits
        if hit.entry.name in _TABLE_ENTRIES:
            first[hit.log] = min(hit.number, first.get(hit.log, hit.number))
    processes = []
    for log, start in first.items():
        year = read_year(log.path)
        for row in _read_rows(number_lines(log.path)):
            if row.number > start:
                processes.append(
                    Exit(
                        log=log,
                        number=row.number,
                        text=row.text,
                        node=log.node or row.host,
                        rank=row.rank,
                        code=row.code,
                        time=read_stamp(row.time.encode(), year),
                        followed=not row.is_root,
                    )
                )
    return processes


@dataclass(frozen=True, kw_only=True)
class _Row:
    number: int
    """The number of its last line."""
    text: str
    """That line."""
    host: str
    rank: int | None
    local_rank: int
    code: int
    time: str
    is_root: bool
    """Whether it is the process that torchrun saw failing first."""


def _read_rows(lines: Iterable[tuple[int, str]]) -> Iterator[_Row]:
    """Yield the processes in torchrun's tables; the root cause is the last of a table."""
    fields: dict[str, str] = {}
    is_root = False
    for number, line in lines:
        if not _MAY_BE_ROW.search(line):
            continue
        text = parse_line(line).text
        is_root = is_root or _ROOT.match(text) is not None
        field = _FIELD.match(text)
        if field is None:
            continue
        fields[field["name"]] = field["value"].strip()
        if field["name"] != "exitcode":
            continue
        if code := _CODE.match(fields["exitcode"]):
            rank = _RANK.match(fields.get("rank", ""))
            yield _Row(
                number=number,
                text=text.strip(),
                host=fields.get("host", ""),
                rank=int(rank[1]) if rank else None,
                local_rank=int(rank[2]) if rank else 0,
                code=int(code[1]),
                time=fields.get("time", ""),
                is_root=is_root,
            )
        fields, is_root = {}, False


def _join_openmpi_lines(reports: Iterable[Hit]) -> Iterator[Hit]:
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


def _read_exit_code(hit: Hit) -> int:
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


# --- Logs that are of whole torchruns, though their names have Slurm's tasks: their ranks --------

# Where ``srun`` starts one torchrun a node, ``%t`` counts nodes. The table that each torchrun
# closes with names its ranks.

_TAIL_BYTES = 1 << 18
"""Bytes at the end of a log in which the table is looked for."""
_TORCHRUN = re.compile(rb"torch[/.]distributed[/.](?:elastic|launcher|run)\b")


@dataclass(frozen=True, kw_only=True)
class Torchruns:
    """The ranks of logs that are of whole torchruns; without effect on any other logs."""

    each: int = 1
    """Ranks of a torchrun."""
    first: Mapping[Path, int]
    """The lowest rank of each log's torchrun."""
    blamed: Mapping[Path, int]
    """The rank that ended with an exception, by its log; of several the one that was first."""

    def drop_task(self, log: LogFile) -> LogFile:
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

    def add_ranks(self, seen: Scanned) -> Scanned:
        """Return the hits, with the ranks of tracebacks that no mark says the rank of."""
        return replace(seen, hits=tuple(self._add_rank(hit) for hit in seen.hits))

    def _add_rank(self, hit: Hit) -> Hit:
        if hit.rank is not None or not hit.trace or hit.log.path not in self.blamed:
            return hit
        if any(LAUNCHER_FRAME.search(line) for line in hit.trace):
            return hit
        return replace(hit, rank=self.blamed[hit.log.path])


_NONE = Torchruns(first={}, blamed={})


def find_torchruns(logs: Sequence[LogFile]) -> Torchruns:
    """Return which logs are of whole torchruns with several ranks each, and the ranks."""
    tasks = {log.path: log.rank for log in logs if not log.own and log.rank is not None}
    tails = {path: _read_tail(path) for path in tasks}
    if not any(map(_TORCHRUN.search, tails.values())):
        return _NONE
    first: dict[Path, int] = {}
    blamed: dict[Path, int] = {}
    each = 1
    for path, tail in tails.items():
        for row in _read_rows(enumerate(tail.decode(errors="replace").splitlines())):
            if row.rank is None:
                continue
            first.setdefault(path, row.rank - row.local_rank)
            each = max(each, row.local_rank + 1)
            if row.code > 0 and row.code not in ENDED_BY_OTHERS:  # it raised
                blamed[path] = row.rank  # the last one counts: a table ends with its root cause
    # The ranks of task t begin at t times as many, unless the nodes have met in another order.
    steps = [rank // tasks[path] for path, rank in first.items() if tasks[path]]
    each = max(each, min(steps, default=1))
    if each == 1:
        return _NONE
    by_task = {path: task * each for path, task in tasks.items()}
    return Torchruns(each=each, first=by_task | first, blamed=blamed)


def _read_tail(path: Path) -> bytes:
    try:
        with path.open("rb") as handle:
            handle.seek(max(0, os.fstat(handle.fileno()).st_size - _TAIL_BYTES))
            return handle.read()
    except OSError:
        return b""
