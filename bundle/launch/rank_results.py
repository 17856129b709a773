"""Failures of the ranks of one node: from their own records, and from torchrun's closing report."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from .rank_monitor import Rank, RankMonitor

RECORD_KEYS = ("node", "rank", "local_rank", "exit_code", "exception", "message", "lines", "time")

_RANK = re.compile(r"^\s+rank\s+: (\d+) \(local_rank: (\d+)\)")
_EXIT = re.compile(r"^\s+exitcode\s+: (-?\d+) \(pid: ")
_CLOSING_SIGNAL = re.compile(r"^W\d{4} .*Sending process \d+ closing signal")
_SIGNALLED = re.compile(r"\bSending process (\d+) closing signal")
_RANK_PREFIX = re.compile(r"\[rank(\d+)\]:")
_REPORT_START = re.compile(r"failed \(exitcode: -?\d+\) local_rank: \d+ \(pid: \d+\) of binary: ")
"""The first line of torchrun's own report: its traceback and its table follow."""
_SIGTERM, _SIGKILL = -15, -9
_SHOWN = 20

CAUSE, LOST_PEER, ENDED = range(3)
"""The weight of a failure among the others, see :func:`weight`."""

_LOST_PEER = re.compile(
    r"Connection (closed|reset|refused)|Broken pipe|BrokenPipeError|EOFError"
    r"|[Rr]emote process exited|DistNetworkError"
)
"""Messages of Gloo, NCCL, the store and Python's sockets when the other side has gone."""


def failures(
    job_dir: str,
    node: str,
    tail: Iterable[str],
    ended: float,
    by_rank: Mapping[int, Sequence[str]] | None = None,
) -> list[dict[str, Any]]:
    """Return every rank of this node that failed, as JSON objects with ``RECORD_KEYS``.

    A rank that raised has left a record with its traceback; if it ended itself (``sys.exit``), its
    last lines replace the traceback. A rank that was killed left none; torchrun's report has its
    exit status, and the last lines of the log replace the traceback.

    Args:
        job_dir: the job's directory, where the wrapper puts records.
        node: this node's name.
        tail: the last lines of the node's output.
        ended: the time when the launcher ended, in seconds since the epoch.
        by_rank: the last lines of each rank whose output is separate from the others'.
    """
    by_rank = by_rank or {}
    records = {record["rank"]: record for record in _records(os.path.join(job_dir, "failures"))}
    for rank, record in records.items():
        if record["exception"] == "SystemExit" and by_rank.get(rank):
            # Its last lines give the reason; the traceback only gives the place.
            record["lines"] = list(by_rank[rank])[-_SHOWN:]
    lines = list(tail)
    for rank, local_rank, code in reported(lines):
        if rank in records:
            continue
        own_lines = list(by_rank.get(rank) or program_lines(lines, rank))
        records[rank] = {
            "node": node,
            "rank": rank,
            "local_rank": local_rank,
            "exit_code": code,
            "exception": "",
            "message": "",
            "lines": own_lines[-_SHOWN:],
            "time": ended,
        }
    return sorted(records.values(), key=lambda record: (weight(record), record["time"]))


def settled(
    records: Iterable[Mapping[str, Any]], monitor: RankMonitor, launcher: Sequence[str]
) -> list[dict[str, Any]]:
    """Complete the failures of a node with the monitor's times, and with who ended the ranks.

    Each gets ``told_to_end``, true if its launcher or its agent had told it to by then;
    ``root_cause``, true if torchrun calls it the first failure that it saw; and ``ended``, the time
    when its process ended, which after an exception takes PyTorch a while.

    Args:
        records: from :func:`failures`.
        monitor: the known state of the ranks.
        launcher: the last lines of the launcher.
    """
    listed = reported(launcher)
    root_cause = listed[-1][0] if listed else None  # the last entry of torchrun's report
    pids = signalled(launcher)
    return [
        _settled(record, monitor, pids, is_root_cause=record["rank"] == root_cause)
        for record in records
    ]


def _settled(
    record: Mapping[str, Any], monitor: RankMonitor, pids: Collection[int], *, is_root_cause: bool
) -> dict[str, Any]:
    rank = monitor.ranks.get(record["rank"])
    ended = record["time"]
    if rank is not None:
        ended = rank.ended or monitor.launcher_end or ended
    time = record["time"] if record["exception"] else ended
    told_to_end = monitor.has_stopped_before(time)
    if not told_to_end and _is_sigterm(record):
        told_to_end = rank.pid in pids if rank is not None and pids else not is_root_cause
    return {
        **record,
        "time": time,
        "ended": ended,
        "told_to_end": told_to_end,
        "root_cause": is_root_cause,
    }


def _is_sigterm(record: Mapping[str, Any]) -> bool:
    return int(record["exit_code"]) in (_SIGTERM, 128 - _SIGTERM)


def signalled(launcher: Iterable[str]) -> set[int]:
    """Return the ids of the processes that torchrun reports to have told to end."""
    matches = (_SIGNALLED.search(line) for line in launcher)
    return {int(match[1]) for match in matches if match}


def unreported(rank: Rank, node: str, by_rank: Mapping[int, Sequence[str]]) -> dict[str, Any]:
    """Return the record of a rank that failed before its stopped launcher could report it."""
    return {
        "node": node,
        "rank": rank.rank,
        "local_rank": rank.local_rank,
        "exit_code": rank.code,
        "exception": "",
        "message": "",
        "lines": list(by_rank.get(rank.rank, ()))[-_SHOWN:],
        "time": rank.ended,
    }


def single(job_dir: str, rank: Mapping[str, Any], lines: Sequence[str]) -> dict[str, Any]:
    """Return the failure of a rank without a launcher: its record, or its exit status.

    Args:
        job_dir: the job's directory, where the wrapper puts records.
        rank: ``node``, ``rank``, ``local_rank``, ``exit_code`` and ``time``.
        lines: its last lines.
    """
    for record in _records(os.path.join(job_dir, "failures")):
        if record["rank"] == rank["rank"]:
            return record
    return {**rank, "exception": "", "message": "", "lines": list(lines)[-_SHOWN:]}


def reported(lines: Iterable[str]) -> list[tuple[int, int, int]]:
    """Return rank, local rank and exit status of each failure in torchrun's report.

    The format is that of ``torch.distributed.elastic.multiprocessing.errors.ChildFailedError``.
    """
    failed = []
    current: tuple[int, int] | None = None
    for line in lines:
        rank = _RANK.match(line)
        if rank:
            current = (int(rank[1]), int(rank[2]))
            continue
        code = _EXIT.match(line)
        if code and current is not None:
            failed.append((*current, int(code[1])))
            current = None
    return failed


def program_lines(lines: Iterable[str], rank: int) -> list[str]:
    """Return the lines that a rank may have written.

    Lines that torchrun adds when a rank has failed are left out, and lines that PyTorch has marked
    as another rank's (``[rank2]: Traceback ...``, from torch 2.2 on).
    """
    all_lines = list(lines)
    # The last report counts: an earlier one closes an attempt that was followed by a restart.
    reports = [number for number, line in enumerate(all_lines) if _REPORT_START.search(line)]
    end = reports[-1] if reports else None
    return [line for line in all_lines[:end] if _may_be_of_rank(line, rank)]


def _may_be_of_rank(line: str, rank: int) -> bool:
    if _CLOSING_SIGNAL.match(line):
        return False
    prefix = _RANK_PREFIX.match(line)
    return prefix is None or int(prefix[1]) == rank


def weight(record: Mapping[str, Any]) -> int:
    """Classify a failure: by itself (``CAUSE``), or only because another rank failed.

    A rank that loses the connection to a failed one raises, too (``LOST_PEER``), often before the
    first failure has been noticed; and torchrun ends with SIGTERM the ranks that still run
    (``ENDED``). A rank that a signal from elsewhere has ended failed by itself, see
    :func:`settled`.
    """
    told_to_end = record.get("told_to_end")
    if told_to_end or (told_to_end is None and _is_sigterm(record)):
        return ENDED
    if not record["exception"]:
        return CAUSE
    error = f"{record['exception']}: {record['message']}"
    return LOST_PEER if _LOST_PEER.search(error) else CAUSE


def out_of_memory(
    records: Iterable[dict[str, Any]], before: int | None, after: int | None
) -> list[tuple[dict[str, Any], str]]:
    """Return the ranks that were killed while the kernel was out of memory, with a line for each.

    A process that is killed cannot report it, and Slurm does only where it limits memory.

    Args:
        records: the failures of this node.
        before: the kernel's count when the ranks were started; None if there is none.
        after: its count now.
    """
    if before is None or after is None or after <= before:
        return []
    many = after - before
    line = (
        f"stager: {many} oom-kill event{'s' if many > 1 else ''} on this node while the ranks ran: "
        "the kernel killed for want of memory"
    )
    return [(record, line) for record in records if record["exit_code"] == _SIGKILL]


def _records(folder: str) -> list[dict[str, Any]]:
    records = []
    try:
        names = sorted(os.listdir(folder))
    except FileNotFoundError:
        return []
    for name in names:
        if not name.endswith(".json"):
            continue
        # Any other file (the program may write there too) is left out: torchrun's report of the
        # same rank is used then.
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            records.append(_record(os.path.join(folder, name)))
    return records


def _record(path: str) -> dict[str, Any]:
    with open(path, encoding="utf-8") as handle:
        raw = json.load(handle)
    record = {key: raw[key] for key in RECORD_KEYS}
    for key in ("rank", "local_rank", "exit_code"):
        record[key] = int(raw[key])
    record["time"] = float(raw["time"])
    record["lines"] = list(raw["lines"])
    return record
