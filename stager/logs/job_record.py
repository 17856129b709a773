"""The record of a job: its description, events and result, or the command that failed."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import time
from typing import Any, TypeVar

from bundle.protocol.codec import AnyText, decode, encode
from bundle.protocol.enumerations import LogMode, PhaseName
from bundle.protocol.events import (
    JobBegins,
    JobEnds,
    NodesLeftOut,
    PhaseBegins,
    Record,
    read_record,
)
from bundle.protocol.problem import Problem
from bundle.protocol.reports import Departure, FailureRecord, Lingering, Vanished
from bundle.system import permissions

from ..core.errors import StagerError
from ..core.files import opened, replacing
from . import job_files

# --- Values from untrusted JSON, each of the type that was asked for -----------------------------

_LARGEST = 1e15
"""Beyond this a number is an accident, and no axis can show it beside others."""


def read_number(raw: Mapping[str, Any], key: str) -> float | None:
    """Return a finite number of a usual size; None where there is none."""
    value = raw.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        known = float(value)
    except OverflowError:
        return None
    return known if math.isfinite(known) and abs(known) < _LARGEST else None


def read_integer(raw: Mapping[str, Any], key: str) -> int | None:
    """Return a whole number; None where there is none."""
    value = read_number(raw, key)
    if value is None or value != int(value):
        return None
    return int(value)


def read_text(raw: Mapping[str, Any], key: str) -> str:
    """Return a text, or a number as one; empty where there is neither."""
    value = raw.get(key)
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        return ""
    return str(value)


def read_table(raw: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return an object; empty where there is none."""
    value = raw.get(key)
    return value if isinstance(value, dict) else {}


def read_list(raw: Mapping[str, Any], key: str) -> list[Any]:
    """Return a list; empty where there is none."""
    value = raw.get(key)
    return value if isinstance(value, list) else []


def read_texts(raw: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """Return the texts of a list."""
    return tuple(value for value in read_list(raw, key) if isinstance(value, str))


# --- A job's description, ``job.json``: written by a driver of whatever version ------------------


@dataclass(frozen=True, kw_only=True)
class KeptLaunch:
    """The way the ranks were started."""

    command: tuple[str, ...] = ()
    """The command of each rank."""
    launcher: str = ""
    """The program that starts the ranks."""
    backend: str = ""
    """The backend of torch.distributed; ``auto`` where the driver chose it."""
    pass_env: tuple[str, ...] = ()
    """Names of secret variables that the ranks got."""


@dataclass(frozen=True, kw_only=True)
class KeptJob:
    """A job as its driver got it; what is not known is empty."""

    name: str = ""
    """The project's name."""
    bundle: str = ""
    """The bundle's file."""
    bundle_id: str = ""
    """Its id."""
    nodes: tuple[str, ...] = ()
    """The nodes."""
    run_dir: str = ""
    """The directory that the job was started in."""
    outputs: tuple[str, ...] = ()
    """Patterns of its results."""
    log_mode: LogMode = LogMode.PRIVATE
    """The readers of its files."""
    launch: KeptLaunch = field(default_factory=KeptLaunch)
    """The way the ranks were started."""


def kept_job(content: bytes) -> KeptJob:
    """Read ``job.json``; what is damaged says nothing."""
    try:
        return decode(KeptJob, json.loads(content.decode("utf-8", "replace")), strict=False)
    except (ValueError, RecursionError):
        return KeptJob()


# --- The events that a job's driver has kept, read back ------------------------------------------


@dataclass(frozen=True, kw_only=True)
class EventSummary:
    """The last attempt of a job, by its events."""

    nodes: tuple[str, ...] = ()
    """The nodes, in order."""
    cluster: str = ""
    """The name of its cluster; empty where that is unknown, or it is not Slurm's."""
    result: JobEnds | None = None
    """The last event; None for a job that runs, or whose driver was killed."""
    launched: bool = False
    """True if ranks were started."""
    begun: float | None = None
    """When it began, in seconds since the epoch."""
    ended: float | None = None
    """When it ended, by the same clock."""
    left_out: Mapping[str, tuple[Problem, ...]] = field(default_factory=dict)
    """The problems of nodes that it went on without."""


def records(path: Path) -> Iterator[Record]:
    """Yield every event of a file; none if there is no such file.

    A line that is no event, such as the last of a driver that was killed, is skipped.
    """
    try:
        handle = opened(path)
    except OSError:
        return
    with handle:
        for line in handle:
            record = parse_event(line)
            if record is not None:
                yield record


def parse_event(line: str | bytes) -> Record | None:
    """Read a line of a driver; None for one that is no event."""
    try:
        return read_record(json.loads(line))
    except (ValueError, RecursionError):
        return None


def summarize(path: Path) -> EventSummary:
    """Summarize the events of a job's last attempt."""
    summary = EventSummary()
    for record in records(path):
        event = record.event
        if isinstance(event, JobBegins):  # also of a job that was put into the queue again
            summary = EventSummary(nodes=event.nodes, cluster=event.cluster, begun=record.time)
        elif isinstance(event, PhaseBegins) and event.phase is PhaseName.LAUNCH:
            summary = replace(summary, launched=True)
        elif isinstance(event, NodesLeftOut):
            summary = replace(summary, left_out={**summary.left_out, **event.problems})
        elif isinstance(event, JobEnds):
            summary = replace(summary, result=event, ended=record.time)
    return summary


# --- The result of a job as its diagnosis uses it ------------------------------------------------

_OfRank = TypeVar("_OfRank", FailureRecord, Departure, Vanished, Lingering)


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
    """The :class:`~bundle.protocol.enumerations.Ending`, or another version's; empty for none."""
    interrupted: bool = False
    """Whether its user ended it."""
    failures: tuple[FailureRecord, ...] = ()
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


def job_result(event: JobEnds | None) -> JobResult:
    """Return the result of a job as its diagnosis uses it, without what cannot be true."""
    if event is None:
        return JobResult()
    return JobResult(
        ok=event.ok,
        ended_by=event.ended_by,
        interrupted=event.interrupted,
        failures=_with_rank(event.failures),
        problems=event.problems,
        left=_departed(_with_rank(event.left)),
        vanished=_departed(_with_rank(event.vanished)),
        lingering=tuple(map(_lingering, _with_rank(event.lingering))),
        stopped=event.stopped or (),
        exit_codes=event.exit_codes or {},
        tails=event.tails or {},
        world_size=event.world_size,
    )


def _with_rank(records: Iterable[_OfRank] | None) -> tuple[_OfRank, ...]:
    return tuple(record for record in records or () if record.rank >= 0)


def _departed(ranks: Iterable[Departure | Vanished]) -> tuple[RankProcess, ...]:
    """Return ranks whose end has a time: without one it is unknown which ranks they delayed."""
    return tuple(
        RankProcess(
            node=rank.node,
            rank=rank.rank,
            time=rank.time,
            goes_on=isinstance(rank, Departure) and rank.goes_on,
        )
        for rank in ranks
        if rank.time is not None
    )


def _lingering(rank: Lingering) -> RankProcess:
    return RankProcess(
        node=rank.node,
        rank=rank.rank,
        finished=rank.finished,
        left=rank.left,
        waits_for=rank.waits_for,
    )


# --- The last command that failed before its job began: such a job leaves no files of its own ----

# Without a note about it, `stager diagnose` would report an older job.

NAME = ".refused.json"


@dataclass(frozen=True, kw_only=True)
class Refused:
    """A command that failed before its job began."""

    command: str
    """``verify`` or ``run``."""
    time: float
    """When it failed, in seconds since the epoch."""
    message: AnyText
    """The message that was shown then."""
    hint: AnyText
    """The hint; may be empty."""
    context: tuple[AnyText, ...]
    """The supporting lines."""
    project: AnyText = ""
    """The project's settings file, or the folder where there is none; empty if unknown."""


@contextmanager
def remember_refused(log_dir: Path, command: str, project: Path) -> Iterator[None]:
    """Leave a note if the block fails and no job has written anything meanwhile."""
    started = time()
    try:
        yield
    except StagerError as exc:
        if log_dir.is_dir() and job_files.newest_change(log_dir) < started:
            _leave(log_dir / NAME, command, project, exc)
        raise


def _leave(path: Path, command: str, project: Path, error: StagerError) -> None:
    note = Refused(
        command=command,
        time=time(),
        message=error.message,
        hint=error.hint,
        context=tuple(error.context),
        project=str(project),
    )
    text = json.dumps(encode(note)) + "\n"
    opener = permissions.opener(LogMode.PRIVATE)
    with suppress(OSError), replacing(path, opener) as file:  # the failure itself must be shown
        file.write(text.encode())


def find_refused(log_dir: Path, project: Path) -> Refused | None:
    """Return the last such command of a project; None where a job has begun since it."""
    path = log_dir / NAME
    try:
        with opened(path) as handle:
            raw = json.load(handle)
        if path.stat().st_mtime < job_files.newest_change(log_dir):
            return None
        refusal = decode(Refused, raw)
    except (OSError, ValueError, RecursionError):
        return None
    return refusal if refusal.project in ("", str(project)) else None
