"""The result of a job, read from its file of events, without what cannot be true."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bundle.launch.rank_results import weight
from bundle.protocol.problem import Problem

from . import json_fields


@dataclass(frozen=True, kw_only=True)
class RankFailure:
    """The record of a rank that failed, see :data:`bundle.launch.rank_results.RECORD_KEYS`."""

    node: str
    """The node it ran on."""
    rank: int
    """The rank."""
    exit_code: int
    """Its exit status, negative for a signal."""
    exception: str = ""
    """The exception's type; empty for a rank that left no traceback."""
    message: str = ""
    """The exception's message; it may have several lines."""
    lines: tuple[str, ...] = ()
    """The traceback, or the last lines of its output."""
    time: float
    """The time of the failure, in seconds since the epoch."""
    ended: float | None = None
    """The end of its process, which may be a while after an exception; None if unknown."""
    told_to_end: bool | None = None
    """Whether its launcher or its agent had told it to end; None if unknown."""
    root_cause: bool = False
    """Whether torchrun calls it the first that failed."""

    @property
    def summary(self) -> str:
        """The first line of the message."""
        return self.message.split("\n")[0]

    @property
    def weight(self) -> int:
        """The relation to other ranks' failures, see :func:`bundle.launch.rank_results.weight`."""
        return weight(
            {
                "exit_code": self.exit_code,
                "exception": self.exception,
                "message": self.message,
                "told_to_end": self.told_to_end,
            }
        )


@dataclass(frozen=True, kw_only=True)
class RankProcess:
    """The process of a rank that ended well, ended unseen, or runs for too long."""

    node: str
    """The node it ran on."""
    rank: int
    """The rank."""
    time: float | None = None
    """The time of its end, in seconds since the epoch."""
    finished: float | None = None
    """The time at which its program ended; None for one that had not."""
    left: float | None = None
    """The time at which it left its process group; None for one that had not."""
    goes_on: bool = False
    """Whether its process ran on after it had left its process group."""
    waits_for: tuple[str, ...] = ()
    """The threads and processes that keep its process from ending."""


@dataclass(frozen=True, kw_only=True)
class JobResult:
    """The driver's ``result`` event; of a job that has none, all fields have their defaults."""

    ok: bool | None = None
    """Whether the job ended well; None for a job without a result."""
    ended_by: str = ""
    """How Slurm ended the job, in the driver's words; empty if it did not."""
    interrupted: bool = False
    """Whether its user ended it."""
    failures: tuple[RankFailure, ...] = ()
    """The ranks that failed."""
    problems: Mapping[str, tuple[Problem, ...]] = field(default_factory=dict)
    """The problems of each node."""
    left: tuple[RankProcess, ...] = ()
    """Ranks that ended with status 0, or left their process group, while others ran."""
    vanished: tuple[RankProcess, ...] = ()
    """Ranks that made their launcher end the others, with a status that nobody saw."""
    lingering: tuple[RankProcess, ...] = ()
    """Ranks whose process ran for too long after their program, or other ranks, had ended."""
    stopped: tuple[str, ...] = ()
    """Nodes whose launcher was told to end."""
    exit_codes: Mapping[str, int] = field(default_factory=dict)
    """The exit status of each node's launcher."""
    tails: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The last lines of each node's output."""
    world_size: int | None = None
    """The number of ranks."""


def parse_result(raw: Mapping[str, Any]) -> JobResult:
    """Parse a ``result`` event.

    The file may be damaged, or written by somebody hostile: what does not fit is left out. An event
    without a verdict is no result.
    """
    if not isinstance(raw.get("ok"), bool):
        return JobResult()
    left, vanished = _processes(raw, "left"), _processes(raw, "vanished")
    return JobResult(
        ok=raw["ok"],
        ended_by=json_fields.text(raw, "ended_by"),
        interrupted=bool(raw.get("interrupted")),
        failures=_failures(raw),
        problems=_problems(raw),
        left=tuple(process for process in left if process.time is not None),
        vanished=tuple(process for process in vanished if process.time is not None),
        lingering=_processes(raw, "lingering"),
        stopped=json_fields.texts(raw, "stopped"),
        exit_codes=_exit_codes(raw),
        tails=_tails(raw),
        world_size=json_fields.whole(raw, "world_size"),
    )


def _failures(raw: Mapping[str, Any]) -> tuple[RankFailure, ...]:
    records = map(_failure, json_fields.listing(raw, "failures"))
    return tuple(record for record in records if record is not None)


def _failure(raw: object) -> RankFailure | None:
    if not isinstance(raw, dict):
        return None
    rank, code = json_fields.whole(raw, "rank"), json_fields.whole(raw, "exit_code")
    time = json_fields.number(raw, "time")
    if rank is None or rank < 0 or code is None or time is None:
        return None
    return RankFailure(
        node=json_fields.text(raw, "node"),
        rank=rank,
        exit_code=code,
        exception=json_fields.text(raw, "exception"),
        message=json_fields.text(raw, "message"),
        lines=json_fields.texts(raw, "lines"),
        time=time,
        ended=json_fields.number(raw, "ended"),
        told_to_end=bool(raw["told_to_end"]) if "told_to_end" in raw else None,
        root_cause=bool(raw.get("root_cause")),
    )


def _processes(raw: Mapping[str, Any], key: str) -> tuple[RankProcess, ...]:
    processes = map(_process, json_fields.listing(raw, key))
    return tuple(process for process in processes if process is not None)


def _process(raw: object) -> RankProcess | None:
    if not isinstance(raw, dict):
        return None
    rank = json_fields.whole(raw, "rank")
    if rank is None or rank < 0:
        return None
    return RankProcess(
        node=json_fields.text(raw, "node"),
        rank=rank,
        time=json_fields.number(raw, "time"),
        finished=json_fields.number(raw, "finished"),
        left=json_fields.number(raw, "left"),
        goes_on=raw.get("goes_on") is True,
        waits_for=json_fields.texts(raw, "waits_for"),
    )


def _problems(raw: Mapping[str, Any]) -> dict[str, tuple[Problem, ...]]:
    by_node = json_fields.table(raw, "problems")
    known: dict[str, tuple[Problem, ...]] = {}
    for node, listed in by_node.items():
        if isinstance(listed, list):
            problems = map(_problem, listed)
            known[str(node)] = tuple(problem for problem in problems if problem is not None)
    return known


def _problem(raw: object) -> Problem | None:
    if not isinstance(raw, dict):
        return None
    try:
        return Problem.from_json(raw)
    except (KeyError, TypeError):
        return None


def _exit_codes(raw: Mapping[str, Any]) -> dict[str, int]:
    by_node = json_fields.table(raw, "exit_codes")
    codes = {node: json_fields.whole(by_node, node) for node in by_node}
    return {node: code for node, code in codes.items() if code is not None}


def _tails(raw: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    by_node = json_fields.table(raw, "tails")
    return {node: json_fields.texts(by_node, node) for node in by_node}
