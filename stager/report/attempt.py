"""The last attempt of a job by its events, each with a moment even where it has no time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..core.regular_files import bytes_of
from ..logs import events
from ..logs.files import JobFiles
from ..logs.json_fields import number, text

Event = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """The events from the last beginning of the job on."""

    events: tuple[Event, ...] = ()
    """The events, in their order."""
    count: int = 0
    """The number of attempts: more than one where Slurm put the job into the queue again."""
    job: Mapping[str, Any] = field(default_factory=dict)
    """The job as the driver got it; empty where that is not known."""

    @property
    def result(self) -> Event:
        """The last event; empty for a job that runs, or whose driver was killed."""
        return next((event for event in reversed(self.events) if event["event"] == "result"), {})

    @property
    def first(self) -> float | None:
        """The first time of an event; None where no event has one."""
        times = (number(event, "time") for event in self.events)
        return next((time for time in times if time is not None), None)

    @property
    def ended(self) -> float | None:
        """The time of the result; None where there is none, or it has no time."""
        return number(self.result, "time")

    def moments(self) -> Iterator[tuple[float, Event]]:
        """Return each event with its moment in seconds: since the epoch, or since the beginning.

        Events of older drivers have no time. A phase's length is told at its end, though, and a
        node's with its answer, so one phase is put after the other. A clock that was set back
        while the job ran makes no phase end before it has begun.
        """
        begun = now = self.first or 0.0
        for event in self.events:
            at, length = number(event, "time"), number(event, "seconds")
            if at is None:
                at = now if length is None else begun + length
            at = max(at, begun)
            now = max(now, at)
            if event["event"] == "begin":
                begun = at
            yield at, event


def last_attempt(files: JobFiles) -> Attempt:
    """Return the last attempt of a job; empty where its events were not kept."""
    if not files.job_id:
        return Attempt()
    kept: list[Event] = []
    count = 0
    with suppress(RecursionError):
        for event in events.events(files.events):
            if event["event"] == "job":
                kept, count = [], count + 1
            kept.append(event)
    return Attempt(events=tuple(kept), count=count, job=_job(files.job))


def _job(path: Path) -> Mapping[str, Any]:
    """Return ``job.json``, of whatever version."""
    try:
        raw = json.loads(bytes_of(path).decode("utf-8", "replace"))
    except (OSError, ValueError, RecursionError):
        return {}
    return raw if isinstance(raw, dict) else {}


def answered(event: Event) -> str:
    """Return the node whose answer to a phase an event is; empty where it is none."""
    return text(event, "node") if event["event"] in ANSWERS else ""


ANSWERS = ("preflight", "unpack", "probe", "deep", "launch", "clean")
"""Events that end a node's part in a phase."""
