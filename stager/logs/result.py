"""The result of a job as its diagnosis uses it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from bundle.protocol.events import JobEnds
from bundle.protocol.problem import Problem
from bundle.protocol.reports import Departure, FailureRecord, Lingering, Vanished

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
