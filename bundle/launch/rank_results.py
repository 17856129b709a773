"""Failures of the ranks of one node: from their own records, and from torchrun's closing report."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from ..protocol.codec import decode
from ..protocol.counts import format_count
from ..protocol.messages import FailureRecord
from ..redaction.secrets import mask_value
from ..regex import compile_lazily
from .rank_monitor import RankMonitor
from .wrapper import keep_own_frame

_RANK = compile_lazily(r"^\s+rank\s+: (\d+) \(local_rank: (\d+)\)")
_EXIT = compile_lazily(r"^\s+exitcode\s+: (-?\d+) \(pid: ")
_CLOSING_SIGNAL = r"W\d{4} .*Sending process \d+ closing signal"
_SIGNALLED = compile_lazily(r"\bSending process (\d+) closing signal")
_REPORT_START = compile_lazily(
    r"failed \(exitcode: -?\d+\) local_rank: \d+ \(pid: \d+\) of binary: "
)
"""The first line of torchrun's own report: its traceback and its table follow."""
_SIGTERM, _SIGKILL = (-15, 143), -9
_PRINTED = compile_lazily(
    r"Traceback \(most recent.*(?:\n.*)*?\n .*\n(?:[\w.]+\.)?([A-Za-z_]\w*)(?:: (.*))?$",
    re.MULTILINE,
)
"""A traceback, to the first line that names an exception below an indented one."""
_PRINTED_AFTER = 10  # lines below a printed traceback from which on the program has survived it
_SHOWN = 20

CAUSE, LOST_PEER, ENDED = range(3)  # the weight of a failure, see :func:`weigh_exit`

_LOST_PEER = compile_lazily(
    r"Connection (closed|reset|refused)|Broken pipe|BrokenPipeError|EOFError"
    r"|[Rr]emote process exited|DistNetworkError"
)
"""Messages of Gloo, NCCL, the store and Python's sockets when the other side has gone."""


def find_failures(
    job_dir: str,
    node: str,
    tail: Iterable[str],
    ended: float,
    by_rank: Mapping[int, Sequence[str]] | None = None,
) -> list[FailureRecord]:
    """Return every rank of this node that failed: by its own record, or torchrun's report."""
    by_rank, lines = by_rank or {}, list(tail)
    records = {}
    for record in _read_records(job_dir):
        records[record.rank] = _add_printed(record, by_rank.get(record.rank, ()))
    for rank, local_rank, code in parse_report(lines):
        if rank not in records:
            own_lines = by_rank.get(rank) or select_program_lines(lines, rank)
            records[rank] = make_record(node, rank, local_rank, code, own_lines, ended)
    return sorted(
        records.values(),
        key=lambda one: (weigh_exit(one.exit_code, one.exception, one.message), one.time),
    )


def make_record(
    node: str, rank: int, local_rank: int, code: int, lines: Iterable[str], time: float
) -> FailureRecord:
    """Return the failure of a rank that left no record."""
    record = FailureRecord(
        node=node, rank=rank, local_rank=local_rank, exit_code=code, lines=(), time=time
    )
    return _add_printed(record, tuple(lines))


def _add_printed(record: FailureRecord, lines: Sequence[str]) -> FailureRecord:
    """Complete a record from the output if the rank ended itself or left no traceback."""
    if not lines or (record.lines and record.exception != "SystemExit"):
        return record
    record = replace(record, lines=tuple(lines[-_SHOWN:]))
    printed = _find_printed_exception(lines)
    by_status = not record.exception or record.message.lstrip("-").isdigit()
    if printed is None or not by_status or not 0 < record.exit_code < 128:
        return record
    exception, message, trace = printed
    return replace(record, exception=exception, message=message, lines=trace)


def _find_printed_exception(lines: Sequence[str]) -> tuple[str, str, tuple[str, ...]] | None:
    starts = [at for at, line in enumerate(lines) if line.startswith("Traceback (most recent")]
    printed = _PRINTED.match("\n".join(lines[starts[-1] :])) if starts else None
    if printed is None:
        return None
    trace = printed[0].split("\n")
    below = lines[starts[-1] + len(trace) :]
    if sum(bool(line.strip()) and not line.startswith(" ") for line in below) >= _PRINTED_AFTER:
        return None
    return printed[1], printed[2] or "", tuple(keep_own_frame(trace, _SHOWN))


def complete_records(
    records: Iterable[FailureRecord], monitor: RankMonitor, launcher: Sequence[str]
) -> list[FailureRecord]:
    """Complete the failures of a node with the monitor's times, and with who ended the ranks."""
    pids = find_signalled(launcher)
    root = next((rank for rank, _, _ in reversed(parse_report(launcher))), None)
    return [_settle(record, monitor, pids, is_root=record.rank == root) for record in records]


def _settle(
    record: FailureRecord, monitor: RankMonitor, pids: Collection[int], *, is_root: bool
) -> FailureRecord:
    rank, ended = monitor.ranks.get(record.rank), record.time
    if rank is not None:
        ended = rank.ended or monitor.launcher_end or ended
    time = record.time if record.exception else ended
    told_to_end = monitor.has_stopped_before(time)
    if not told_to_end and record.exit_code in _SIGTERM:
        told_to_end = rank.pid in pids if rank is not None and pids else not is_root
    return replace(record, time=time, ended=ended, told_to_end=told_to_end, root_cause=is_root)


def find_signalled(launcher: Iterable[str]) -> set[int]:
    """Return the ids of the processes that torchrun reports to have told to end."""
    return {int(match[1]) for match in map(_SIGNALLED.search, launcher) if match}


def find_own_record(job_dir: str, failure: FailureRecord) -> FailureRecord:
    """Return the failure of a rank without a launcher: its own record, if it has left one."""
    own = {record.rank: record for record in _read_records(job_dir)}.get(failure.rank)
    return failure if own is None else _add_printed(own, failure.lines)


def parse_report(lines: Iterable[str]) -> list[tuple[int, int, int]]:
    """Return rank, local rank and exit status of each failure in torchrun's ChildFailedError."""
    failed = []
    current: tuple[int, int] | None = None
    for line in lines:
        if rank := _RANK.match(line):
            current = (int(rank[1]), int(rank[2]))
        elif current is not None and (code := _EXIT.match(line)):
            failed.append((*current, int(code[1])))
            current = None
    return failed


def select_program_lines(lines: Iterable[str], rank: int) -> list[str]:
    """Return the lines that a rank may have written: not torchrun's, nor another rank's."""
    all_lines = list(lines)
    # The last report counts: an earlier one closes an attempt that was followed by a restart.
    reports = [number for number, line in enumerate(all_lines) if _REPORT_START.search(line)]
    other = re.compile(rf"\[rank(?!{rank}\])\d+\]:|{_CLOSING_SIGNAL}")
    return [line for line in all_lines[: reports[-1] if reports else None] if not other.match(line)]


def weigh_exit(code: int, exception: str, message: str, told_to_end: bool | None = None) -> int:
    """Classify a failure: by itself (``CAUSE``), or only because another rank failed.

    A rank that loses the connection to a failed one raises, too (``LOST_PEER``); torchrun ends with
    SIGTERM those that still run (``ENDED``). ``told_to_end`` is None where that is unknown.
    """
    if told_to_end or (told_to_end is None and code in _SIGTERM):
        return ENDED
    is_lost = exception and _LOST_PEER.search(f"{exception}: {message}")
    return LOST_PEER if is_lost else CAUSE


def explain_oom_kills(
    records: Iterable[FailureRecord], before: int | None, after: int | None
) -> list[FailureRecord]:
    """Add a line to the record of each rank that was killed while memory ran out."""
    if before is None or after is None or after <= before:
        return list(records)
    line = f"stager: {format_count(after - before, 'oom-kill event')} on this node while the ranks "
    line += "ran: the kernel killed for want of memory"
    return [
        replace(record, lines=(*record.lines, line)) if record.exit_code == _SIGKILL else record
        for record in records
    ]


def _read_records(job_dir: str) -> list[FailureRecord]:
    records = []
    for path in sorted(glob.glob(os.path.join(glob.escape(job_dir), "failures", "*.json"))):
        # The program may write there too: torchrun's report is used where it is no record.
        with contextlib.suppress(OSError, ValueError), open(path, encoding="utf-8") as handle:
            record = decode(FailureRecord, json.load(handle), strict=False)
            records.append(hide_secret_variables(record))
    return records


def hide_secret_variables(record: FailureRecord) -> FailureRecord:
    """Return a record without secrets in its variables."""
    frames = []
    for frame in record.variables:
        values = [replace(one, text=mask_value(one.name, one.text)) for one in frame.values]
        frames.append(replace(frame, values=tuple(values)))
    return replace(record, variables=tuple(frames))
