"""The events that a job's driver has kept, read back."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..core.regular_files import opened


@dataclass(frozen=True, kw_only=True)
class Told:
    """What a job's events tell."""

    nodes: tuple[str, ...] = ()
    """The nodes of its last attempt, in order."""
    result: Mapping[str, Any] = field(default_factory=dict)
    """Its last event; empty for a job that runs, or whose driver was killed."""
    launched: bool = False
    """Whether ranks were started."""
    begun: float | None = None
    """When it began, in seconds since the epoch."""


def events(path: Path) -> Iterator[dict[str, Any]]:
    """Every event of a file; a line that is none, the last of a driver that was killed, is skipped.

    A file that is not there has none.
    """
    try:
        handle = opened(path)
    except OSError:
        return
    with handle:
        for line in handle:
            try:
                event = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(event, dict) and isinstance(event.get("event"), str):
                yield event


def told(path: Path) -> Told:
    """What the events of a file tell of the job's last attempt."""
    nodes: tuple[str, ...] = ()
    result: Mapping[str, Any] = {}
    launched, begun = False, None
    for event in events(path):
        kind = event["event"]
        if kind == "job":  # also of a job that was put into the queue again
            named, begun = event.get("nodes"), event.get("time")
            nodes = tuple(map(str, named)) if isinstance(named, list) else ()
            result, launched = {}, False
        elif kind == "begin" and event.get("phase") == "launch":
            launched = True
        elif kind == "result":
            result = event
    return Told(nodes=nodes, result=result, launched=launched, begun=begun)
