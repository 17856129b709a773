"""The events that a job's driver has kept, read back."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..core.regular_files import opened


@dataclass(frozen=True, kw_only=True)
class EventSummary:
    """The last attempt of a job, by its events."""

    nodes: tuple[str, ...] = ()
    """The nodes, in order."""
    result: Mapping[str, Any] = field(default_factory=dict)
    """The last event; empty for a job that runs, or whose driver was killed."""
    launched: bool = False
    """Whether ranks were started."""
    begun: float | None = None
    """When it began, in seconds since the epoch."""


def events(path: Path) -> Iterator[dict[str, Any]]:
    """Yield every event of a file; none if there is no such file.

    A line that is no event, such as the last of a driver that was killed, is skipped.
    """
    try:
        handle = opened(path)
    except OSError:
        return
    with handle:
        for line in handle:
            event = _event(line)
            if event is not None:
                yield event


def _event(line: bytes) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if isinstance(event, dict) and isinstance(event.get("event"), str):
        return event
    return None


def summarize(path: Path) -> EventSummary:
    """Summarize the events of a job's last attempt."""
    summary = EventSummary()
    for event in events(path):
        kind = event["event"]
        if kind == "job":  # also of a job that was put into the queue again
            summary = EventSummary(nodes=_nodes(event), begun=event.get("time"))
        elif kind == "begin" and event.get("phase") == "launch":
            summary = replace(summary, launched=True)
        elif kind == "result":
            summary = replace(summary, result=event)
    return summary


def _nodes(event: Mapping[str, Any]) -> tuple[str, ...]:
    nodes = event.get("nodes")
    return tuple(map(str, nodes)) if isinstance(nodes, list) else ()
