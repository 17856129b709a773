"""How processes ended: the records of ranks, torchrun's tables, srun's lines."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from bundle.launch.rank_results import CAUSE, LOST_PEER, weigh_exit
from bundle.launch.wrapper import is_own_frame, keep_own_frame
from bundle.protocol.enumerations import FailureClass
from bundle.protocol.messages import FailureRecord
from bundle.regex import compile_lazily

from ..catalogue.catalogue import CatalogueEntry, CatalogueMatch, LineRole, LineTells, match_line
from ..logs.job_files import LogFile
from ..logs.lines import number_lines, read_stamp, read_tail, read_year
from ..logs.prefixes import parse_line
from .failure import FirstFailure
from .hits import LAUNCHER_FRAME, Hit

_HIGHEST_SIGNAL = 64
SIGNAL_NAMES = {int(known): known.name for known in signal.Signals}
LINES = 20  # lines that are kept of a failure

_ERROR = compile_lazily(  # ``error: ...``, ``train.py: error: ...``
    r"(?:\[RANK \d+\] )?(?!srun|slurm|sbatch)(?:[\w./][\w./ -]*: )?error: \S.*", re.IGNORECASE
)
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

Cause = tuple[str, FailureClass, str]  # in one line, its class, and what to do about it


def describe_rank_failure(record: FailureRecord) -> FirstFailure:
    """Return the failure of a rank; what the catalogue knows of it comes before its own words."""
    cause, kind, hint = _find_cause(record)
    words, own_hint = find_own_words(record)
    failure = FirstFailure(
        node=record.node,
        rank=record.rank,
        exit_code=record.exit_code,
        kind=FailureClass.PYTHON_ERROR if words else kind,
        cause=words or cause,
        hint=hint,
        lines=tuple(keep_own_frame(record.lines, LINES)),
        time=record.time,
        variables=record.variables,
        step=record.step,
        seeds=record.seeds,
    )
    known = look_up_failure(record) or (match_line(words) if words else None)
    if known is not None:
        failure = failure.explain(known)
    return replace(failure, hint=own_hint or failure.hint)


def _find_cause(record: FailureRecord) -> Cause:
    exception, summary = record.exception, _summarize(record)
    if not exception:
        return describe_exit_code(record.exit_code)
    if exception != "SystemExit":
        text = f"{exception}: {summary}" if summary else exception
        has_line = any("Traceback" in line or is_own_frame(line) for line in record.lines)
        hint = "the traceback names the line in your program" if has_line else _LOG_TELLS
    elif not summary or summary.lstrip("-").isdigit():
        text, hint = f"the program ended itself: sys.exit({summary})", _LOG_TELLS
    else:
        text, hint = f"the program ended itself: {summary}", "these are the program's own words"
    return text, FailureClass.PYTHON_ERROR, hint


def _summarize(record: FailureRecord) -> str:
    return next(iter(record.message.strip().splitlines()), "")


def describe_exit_code(code: int) -> Cause:
    """Return the cause that the exit status of a silent process tells."""
    number = find_signal(code)
    if number == 0:
        text = f"it ended with exit status {code}"
        return text, FailureClass.UNKNOWN, "its log holds all it wrote"
    name = SIGNAL_NAMES.get(number, f"signal {number}")
    hint = _SIGNAL_HINTS.get(name, "see who sent the signal")
    return f"it was killed by {name}", FailureClass.KILLED, hint


def find_signal(code: int) -> int:
    """Return the number of the signal that an exit status stands for; 0 for none."""
    # A shell adds 128 to a signal's number; ssh, Apptainer and ``sys.exit(-1)`` end with 255.
    number = -code if code < 0 else code - 128
    return number if 0 < number <= _HIGHEST_SIGNAL else 0


def find_own_words(record: FailureRecord) -> tuple[str, str]:
    """Return the words with which a rank ended itself, and its hint; empty if it did not."""
    # An exception with a line in the user's own code tells more, and so does one that they lack.
    if not 0 < record.exit_code < 128 or any(map(is_own_frame, record.lines)):
        return "", ""
    said = "" if record.exception == "SystemExit" else _summarize(record)
    hint = ""
    for line, below in zip(reversed(record.lines), ("", *reversed(record.lines)), strict=False):
        if _ERROR.match(line) and said in line:
            return f"{line.strip()} {below.strip() if line.endswith(':') else ''}".strip(), hint
        if line.startswith(_HINT):
            hint = line.removeprefix(_HINT).strip()
    return "", ""


def weigh_failure(record: FailureRecord) -> int:
    """Return the weight of a failure; a rank that waited in vain has lost its peers, too."""
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
    """Return what the catalogue knows of a rank's exception, else of those that led to it."""
    if not record.exception:
        return None
    closing = match_line(f"{record.exception}: {_summarize(record)}")
    if closing is not None and _explains(closing.entry):
        return closing
    # Of a ``sys.exit`` the errors logged before it, else lines that may be exceptions.
    is_exit = record.exception == "SystemExit"
    may_tell = re.compile("rror" if is_exit else r"^\S").search
    lines = filter(may_tell, reversed(record.lines))
    telling = [known for known in filter(None, map(match_line, lines)) if _explains(known.entry)]
    return min(telling, key=lambda known: known.entry.role != LineRole.PRIMARY, default=None)


def _explains(entry: CatalogueEntry) -> bool:
    return entry.role != LineRole.NOISE and entry.tells != LineTells.EXIT


# --- The ends of processes, as launchers report them: torchrun's closing table, and srun's lines

_ROOT = compile_lazily(r"^\W*Root Cause\b")
"""The line after which torchrun names the rank that it saw failing first."""
_MAY_BE_ROW = compile_lazily(r"Root Cause| : ")
_FIELD = compile_lazily(r"^\s*(?:\[\d+\]:\s*)?(?P<name>time|host|rank|exitcode)\s*: (?P<value>.*)$")
_RANK = compile_lazily(r"(\d+) \(local_rank: (\d+)\)")
_CODE = compile_lazily(r"(-?\d+)")
_TABLE_ENTRIES = ("torchrun-report", "child-failed")
_STEP_ENDS = ("cancelled", "task-failure", "step-ended")
"""Entries by which Slurm says that it ends the tasks that are left."""
_SIGNALS = {str(signal.strsignal(number)).lower(): -number for number in signal.Signals}
ENDED_BY_OTHERS = (-15, 143, -2, 130, -6, 134)
"""Statuses that another rank's failure leaves: SIGTERM, SIGINT, or a watchdog's abort."""


class Exit(NamedTuple):
    """The report of one process that ended badly."""

    log: LogFile
    number: int
    text: str
    node: str
    rank: int | None  # the rank; None where only a local one, or none, is reported
    code: int
    time: float | None  # the time, in seconds since the epoch; a table has whole seconds
    followed: bool = False
    """Whether its launcher saw another one fail first, and may have killed it."""

    @property
    def has_raised(self) -> bool:
        """True if it is a rank that ended by itself, with an exception."""
        return self.rank is not None and self.code > 0 and find_signal(self.code) == 0


def list_exits(hits: Sequence[Hit]) -> list[Exit]:
    """Return every process whose end the hits report, in order of time where that is known."""
    tables = _read_tables(hits)
    with_table = {process.log.path for process in tables}
    ends = _find_first_lines(filter(_ends_step, hits))
    of_torchrun, tasks, others = list(tables), [], []
    for hit in _join_openmpi_lines(hit for hit in hits if hit.entry.tells == LineTells.EXIT):
        if "local" in hit.groups:
            if hit.log.path not in with_table:  # it ends before its table
                of_torchrun.append(_make_exit(hit, hit.log.node, ""))
        elif "tasks" in hit.groups:
            # A task is a rank only without torchrun.
            task = "" if tables else hit.groups["tasks"]
            report = _make_exit(hit, hit.groups.get("node", ""), task)
            is_later = hit.number > ends.get(hit.log, hit.number)
            tasks.append(report._replace(followed=is_later))
        else:
            ranks = filter(str.isdigit, (hit.groups.get("rank", ""), str(hit.rank)))
            others.append(_make_exit(hit, hit.node, next(ranks, "")))
    every = [*of_torchrun, *_drop_covered(tasks, of_torchrun), *others]
    return sorted(every, key=lambda report: (report.time is None, report.time or 0.0))


def _drop_covered(tasks: Iterable[Exit], of_torchrun: Iterable[Exit]) -> list[Exit]:
    """Drop srun's line about a torchrun on its node, or on an unnamed one: its table says more."""
    nodes = {process.node.partition(".")[0] for process in of_torchrun}
    return [task for task in tasks if nodes.isdisjoint(("", task.node.partition(".")[0]))]


def _make_exit(hit: Hit, node: str, named: str) -> Exit:
    rank = re.match(r"\d+", named)
    return Exit(
        log=hit.log,
        number=hit.number,
        text=hit.text,
        node=node,
        rank=int(rank[0]) if rank else None,
        code=_read_exit_code(hit),
        time=hit.time,
    )


def _ends_step(hit: Hit) -> bool:
    return hit.entry.tells == LineTells.END or hit.entry.name in _STEP_ENDS


def _find_first_lines(hits: Iterable[Hit]) -> dict[LogFile, int]:
    first: dict[LogFile, int] = {}
    for hit in hits:
        first[hit.log] = min(hit.number, first.get(hit.log, hit.number))
    return first


def _read_tables(hits: Iterable[Hit]) -> list[Exit]:
    # Those of an earlier attempt are no longer among the hits.
    tables = _find_first_lines(hit for hit in hits if hit.entry.name in _TABLE_ENTRIES)
    return [
        process
        for log, start in tables.items()
        for process, _ in _read_rows(log, number_lines(log.path))
        if process.number > start
    ]


def _read_rows(log: LogFile, lines: Iterable[tuple[int, str]]) -> Iterator[tuple[Exit, int]]:
    """Yield the processes in torchrun's tables with their local ranks, the root cause last."""
    fields: dict[str, str] = {}
    is_root, year = False, read_year(log.path)
    for number, line in lines:
        if not _MAY_BE_ROW.search(line):
            continue
        text = parse_line(line).text
        is_root = is_root or _ROOT.match(text) is not None
        field = _FIELD.match(text)
        if field is None:
            continue
        name, value = field.groups()
        fields[name] = value.strip()
        if name != "exitcode":
            continue
        if code := _CODE.match(fields[name]):
            rank = _RANK.match(fields.get("rank", ""))
            process = Exit(
                log=log,
                number=number,
                text=text.strip(),
                node=log.node or fields.get("host", ""),
                rank=int(rank[1]) if rank else None,
                code=int(code[1]),
                time=read_stamp(fields.get("time", "").encode(), year),
                followed=not is_root,
            )
            yield process, int(rank[2]) if rank else 0
        fields, is_root = {}, False


def _join_openmpi_lines(reports: Iterable[Hit]) -> list[Hit]:
    joined: list[Hit] = []
    for hit in reports:
        above = joined[-1] if joined else hit
        is_below = (hit.log, hit.number) == (above.log, above.number + 1)
        if is_below and above.entry.name == "openmpi-process":
            joined[-1] = replace(hit, groups={**above.groups, **hit.groups})
        else:
            joined.append(hit)
    return joined


def _read_exit_code(hit: Hit) -> int:
    """Return the exit status in a line, negative for a signal; 1 if it is unknown."""
    code, name = hit.groups.get("code", ""), hit.groups.get("signal", "")
    if code.lstrip("-").isdigit():
        return int(code)
    if name.isdigit():
        return -int(name)
    for known, number in _SIGNALS.items():
        if name.lower().startswith(known):
            return number
    killed = signal.SIGKILL if hit.entry.kind == FailureClass.KILLED else -1
    return -signal.Signals.__members__.get(name, killed)


# --- Logs that are of whole torchruns, though their names have Slurm's tasks: their ranks --------

# Where ``srun`` starts one torchrun a node, ``%t`` counts nodes; torchrun's table names the ranks.

_TAIL_BYTES = 1 << 18  # bytes at the end of a log in which the table is looked for
_TORCHRUN = compile_lazily(rb"torch[/.]distributed[/.](?:elastic|launcher|run)\b")


class Torchruns(NamedTuple):
    """The ranks of logs that are of whole torchruns; without effect on any other logs."""

    first: Mapping[Path, int]
    blamed: Mapping[Path, int]
    """The rank that ended with an exception, by its log; of several the one that was first."""
    each: int = 1

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

    def add_ranks(self, hits: Iterable[Hit]) -> list[Hit]:
        """Return the hits, with the ranks of tracebacks that no mark says the rank of."""
        return [
            replace(hit, rank=self.blamed.get(hit.log.path))
            if hit.rank is None and hit.trace and not any(map(LAUNCHER_FRAME.search, hit.trace))
            else hit
            for hit in hits
        ]


def find_torchruns(logs: Sequence[LogFile]) -> Torchruns:
    """Return which logs are of whole torchruns with several ranks each, and the ranks."""
    tasks = {log.path: log.rank for log in logs if not log.own and log.rank is not None}
    found = _read_first_ranks([log for log in logs if log.path in tasks])
    # The ranks of task t begin at t times as many, unless the nodes have met in another order.
    steps = [rank // tasks[path] for path, rank in found.first.items() if tasks[path]]
    each = max(found.each, min(steps, default=1))
    if each == 1:
        return Torchruns(first={}, blamed={})
    by_task = {path: task * each for path, task in tasks.items()}
    return Torchruns(each=each, first={**by_task, **found.first}, blamed=found.blamed)


def _read_first_ranks(logs: Sequence[LogFile]) -> Torchruns:
    first: dict[Path, int] = {}
    blamed: dict[Path, int] = {}
    each = 1
    tails = [read_tail(log.path, _TAIL_BYTES) for log in logs]
    if not any(map(_TORCHRUN.search, tails)):
        return Torchruns(first={}, blamed={})
    for log, tail in zip(logs, tails, strict=True):
        rows = _read_rows(log, enumerate(tail.decode(errors="replace").splitlines()))
        for process, local_rank in rows:
            if process.rank is None:
                continue
            first.setdefault(log.path, process.rank - local_rank)
            each = max(each, local_rank + 1)
            if process.code > 0 and process.code not in ENDED_BY_OTHERS:  # it raised
                blamed[log.path] = process.rank  # the last one: a table ends with its root cause
    return Torchruns(each=each, first=first, blamed=blamed)
