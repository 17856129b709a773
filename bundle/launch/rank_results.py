"""What became of the ranks of one node: their own records, and torchrun's closing report."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .rank_monitor import Rank, RankMonitor

RECORD_KEYS = ("node", "rank", "local_rank", "exit_code", "exception", "message", "lines", "time")

_RANK = re.compile(r"^\s+rank\s+: (\d+) \(local_rank: (\d+)\)")
_EXIT = re.compile(r"^\s+exitcode\s+: (-?\d+) \(pid: ")
_SENT = re.compile(r"^W\d{4} .*Sending process \d+ closing signal")
_SENT_TO = re.compile(r"\bSending process (\d+) closing signal")
_MARKED = re.compile(r"\[rank(\d+)\]:")
_CLOSING = re.compile(r"failed \(exitcode: -?\d+\) local_rank: \d+ \(pid: \d+\) of binary: ")
"""The line that begins torchrun's own report: its traceback and its table follow."""
_SIGTERM, _SIGKILL = -15, -9
_SHOWN = 20

CAUSE, LOST_PEER, ENDED = range(3)
"""What a failure is to the others: see :func:`weight`."""

_LOST_PEER = re.compile(
    r"Connection (closed|reset|refused)|Broken pipe|BrokenPipeError|EOFError"
    r"|[Rr]emote process exited|DistNetworkError"
)
"""How Gloo, NCCL, the store and Python's sockets word that the other side has gone."""


def failures(
    job_dir: str,
    node: str,
    tail: Iterable[str],
    ended: float,
    own: Mapping[int, Sequence[str]] | None = None,
) -> list[dict[str, Any]]:
    """Every rank of this node that failed, as JSON objects with ``RECORD_KEYS``.

    A rank that raised has left a record with its traceback, for which its last lines stand if it
    ended itself (``sys.exit``). One that was killed could not; torchrun
    names it and its exit status in its report, and the last lines of the log stand for it.

    Args:
        job_dir: the job's directory, where the wrapper puts records.
        node: this node's name.
        tail: the last lines of the node's output.
        ended: when the launcher ended, in seconds since the epoch.
        own: the last lines of each rank whose output is known apart from the others'.
    """
    own = own or {}
    found = {record["rank"]: record for record in _records(os.path.join(job_dir, "failures"))}
    lines = list(tail)
    for rank, record in found.items():
        if record["exception"] == "SystemExit" and own.get(rank):
            # It says why before it ends; where in the program that was, tells less.
            record["lines"] = list(own[rank])[-_SHOWN:]
    for rank, local_rank, code in reported(lines):
        if rank not in found:
            found[rank] = {
                "node": node,
                "rank": rank,
                "local_rank": local_rank,
                "exit_code": code,
                "exception": "",
                "message": "",
                "lines": list(own.get(rank) or program_lines(lines, rank))[-_SHOWN:],
                "time": ended,
            }
    return sorted(found.values(), key=lambda record: (weight(record), record["time"]))


def settled(
    records: Iterable[Mapping[str, Any]], monitor: RankMonitor, launcher: Sequence[str]
) -> list[dict[str, Any]]:
    """The failures of a node with what the monitor knows of them: when, and at whose wish.

    Each gets ``told_to_end``, whether its launcher or its agent had told it to by then;
    ``root_cause``, whether torchrun calls it the first that it saw failing; and ``ended``, when
    its process did, which after an exception takes PyTorch a while.

    Args:
        records: from :func:`failures`.
        monitor: what is known of the ranks.
        launcher: the last lines of the launcher.
    """
    listed = reported(launcher)
    root = listed[-1][0] if listed else None  # torchrun's report closes with it
    told = told_by(launcher)
    found = []
    for record in records:
        known = monitor.ranks.get(record["rank"])
        killed = int(record["exit_code"]) in (_SIGTERM, 128 - _SIGTERM)
        still_there = monitor.until or record["time"]
        ended = record["time"] if known is None else known.ended or still_there
        time = record["time"] if record["exception"] else ended
        late = monitor.stopped and monitor.until is not None and time > monitor.until
        first = record["rank"] == root
        by_launcher = known.pid in told if known is not None and told else not first
        found.append(
            {
                **record,
                "time": time,
                "ended": ended,
                "told_to_end": late or (killed and by_launcher),
                "root_cause": first,
            }
        )
    return found


def told_by(launcher: Iterable[str]) -> set[int]:
    """The processes that torchrun says it has told to end."""
    return {int(sent[1]) for line in launcher if (sent := _SENT_TO.search(line))}


def unreported(rank: Rank, node: str, own: Mapping[int, Sequence[str]]) -> dict[str, Any]:
    """The record of a rank that failed before its launcher, which was ended then, could say so."""
    return {
        "node": node,
        "rank": rank.rank,
        "local_rank": rank.local_rank,
        "exit_code": rank.code,
        "exception": "",
        "message": "",
        "lines": list(own.get(rank.rank, ()))[-_SHOWN:],
        "time": rank.ended,
    }


def single(job_dir: str, rank: Mapping[str, Any], lines: Sequence[str]) -> dict[str, Any]:
    """The failure of a rank that no launcher stands between: its record, or its exit status.

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
    """Rank, local rank and exit status of each failure that torchrun's report lists.

    The form is that of ``torch.distributed.elastic.multiprocessing.errors.ChildFailedError``.
    """
    found, current = [], None
    for line in lines:
        rank = _RANK.match(line)
        if rank:
            current = (int(rank.group(1)), int(rank.group(2)))
            continue
        code = _EXIT.match(line)
        if code and current is not None:
            found.append((*current, int(code.group(1))))
            current = None
    return found


def program_lines(lines: Iterable[str], rank: int) -> list[str]:
    """What a rank may have written.

    What torchrun adds when one of them has failed is left out, and what PyTorch has marked as
    another rank's (``[rank2]: Traceback ...``, from torch 2.2 on).
    """
    kept: list[str] = []
    found = list(lines)
    # An earlier one closes an attempt after which ranks were started again.
    closing = max((at for at, line in enumerate(found) if _CLOSING.search(line)), default=None)
    for line in found[:closing]:
        marked = _MARKED.match(line)
        if not _SENT.match(line) and (marked is None or int(marked.group(1)) == rank):
            kept.append(line)
    return kept


def weight(record: Mapping[str, Any]) -> int:
    """Whether a rank failed by itself (``CAUSE``) or only because another one had.

    A rank that loses the connection to one that failed raises, too (``LOST_PEER``), often before
    anybody has noticed the first one; and torchrun ends with SIGTERM what still runs (``ENDED``).
    A rank that a signal from elsewhere has ended failed by itself, see :func:`settled`.
    """
    told = record.get("told_to_end")
    if told or (told is None and int(record["exit_code"]) in (_SIGTERM, 128 - _SIGTERM)):
        return ENDED
    said = f"{record['exception']}: {record['message']}"
    return LOST_PEER if record["exception"] and _LOST_PEER.search(said) else CAUSE


def out_of_memory(
    records: Iterable[dict[str, Any]], before: int | None, after: int | None
) -> list[tuple[dict[str, Any], str]]:
    """The ranks that were killed while the kernel killed for want of memory, and a line on that.

    A process that is killed cannot say so itself, and Slurm only does where it limits memory.

    Args:
        records: the failures of this node.
        before: the kernel's count when the ranks were started; None where there is none.
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
        # What is no record (the program may write there too) is left out: torchrun's report of the
        # same rank then stands for it.
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            with open(os.path.join(folder, name), encoding="utf-8") as handle:
                raw = json.load(handle)
            record = {key: raw[key] for key in RECORD_KEYS}
            record |= {key: int(raw[key]) for key in ("rank", "local_rank", "exit_code")}
            records.append({**record, "time": float(raw["time"]), "lines": list(raw["lines"])})
    return records
