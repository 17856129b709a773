"""The events that a job's driver has kept, read back."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from bundle.protocol.enumerations import PhaseName
from bundle.protocol.events import (
    JobBegins,
    JobEnds,
    NodesLeftOut,
    PhaseBegins,
    Record,
    read_record,
)
from bundle.protocol.problem import Problem

from ..core.files import opened


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
