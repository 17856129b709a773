"""The last attempt of a job by its events, each with a moment even where it has no time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from bundle.protocol.events import (
    Event,
    FileSent,
    JobBegins,
    JobEnds,
    PhaseBegins,
    PhaseEnds,
    Record,
)
from bundle.protocol.messages import Answer

from ..core.files import bytes_of
from ..logs.job_files import JobFiles
from ..logs.job_record import KeptJob, kept_job, records

TIMED = (Answer, PhaseEnds, FileSent)
"""Events that tell how long something took."""


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """The events from the last beginning of the job on."""

    records: tuple[Record, ...] = ()
    """The events, in their order."""
    count: int = 0
    """The number of attempts: more than one where Slurm put the job into the queue again."""
    job: KeptJob = field(default_factory=KeptJob)
    """The job as the driver got it."""

    @property
    def result(self) -> JobEnds | None:
        """The last event; None for a job that runs, or whose driver was killed."""
        results = (event for event in reversed(self.events) if isinstance(event, JobEnds))
        return next(results, None)

    @property
    def events(self) -> tuple[Event, ...]:
        """The events alone."""
        return tuple(record.event for record in self.records)

    @property
    def first(self) -> float | None:
        """The first time of an event; None where no event has one."""
        times = (record.time for record in self.records)
        return next((time for time in times if time is not None), None)

    @property
    def ended(self) -> float | None:
        """The time of the result; None where there is none, or it has no time."""
        results = (record for record in reversed(self.records) if isinstance(record.event, JobEnds))
        return next((record.time for record in results), None)

    def moments(self) -> Iterator[tuple[float, Event]]:
        """Return each event with its moment in seconds: since the epoch, or since the beginning.

        Events of older drivers have no time. A phase's length is told at its end, though, and a
        node's with its answer, so one phase is put after the other. A clock that was set back
        while the job ran makes no phase end before it has begun.
        """
        begun = now = self.first or 0.0
        for record in self.records:
            at = record.time
            if at is None:
                at = now if not isinstance(record.event, TIMED) else begun + record.event.seconds
            at = max(at, begun)
            now = max(now, at)
            if isinstance(record.event, PhaseBegins):
                begun = at
            yield at, record.event


def last_attempt(files: JobFiles) -> Attempt:
    """Return the last attempt of a job; empty where its events were not kept."""
    if not files.job_id:
        return Attempt()
    kept: list[Record] = []
    count = 0
    for record in records(files.events):
        if isinstance(record.event, JobBegins):
            kept, count = [], count + 1
        kept.append(record)
    return Attempt(records=tuple(kept), count=count, job=_job(files.job))


def _job(path: Path) -> KeptJob:
    try:
        return kept_job(bytes_of(path))
    except OSError:
        return KeptJob()
