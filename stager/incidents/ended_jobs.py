"""Jobs that are over, read from the files that they have left in their log directory."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from bundle.protocol import log_names
from bundle.protocol.events import JobEnds

from ..core.errors import StagerError
from ..core.files import opened
from ..logs.job_files import of_job
from ..logs.job_record import parse_event, summarize
from .incident import EndedJob

_LAST_BYTES = 1 << 20
"""An event log is examined from its end: those of jobs that still run are not read as a whole."""


def ended_job(log_dir: Path, job_id: str, project: str, since: float = 0.0) -> EndedJob | None:
    """Return a job that has ended, else None; one begun before ``since`` is another job."""
    events = log_dir / log_names.events(job_id)
    if not _may_have_ended(events):
        return None
    summary = summarize(events)
    if summary.result is None or summary.ended is None or (summary.begun or since) < since:
        return None
    return EndedJob(
        job_id=job_id,
        project=project,
        ended=summary.ended,
        nodes=summary.nodes,
        cluster=summary.cluster,
        result=summary.result,
        left_out=summary.left_out,
    )


def _may_have_ended(events: Path) -> bool:
    """Return whether the last line of an event log is a result, or too long to tell."""
    try:
        with opened(events) as handle:
            size = handle.seek(0, os.SEEK_END)
            handle.seek(max(0, size - _LAST_BYTES))
            end = handle.read(_LAST_BYTES)
    except OSError:
        return False
    _, before, last = end.rstrip(b"\n").rpartition(b"\n")
    if not before and size > _LAST_BYTES:
        return True
    record = parse_event(last)
    return record is not None and isinstance(record.event, JobEnds)


def diagnosed(job: EndedJob, log_dir: Path) -> EndedJob:
    """Return a job with what failed first in it, if its ranks ran and its logs can be read."""
    result = job.result
    if result.ok or result.interrupted or result.ended_by or not result.exit_codes:
        return job
    from ..diagnosis.diagnosis import diagnose  # not before: it takes a while

    with suppress(StagerError, OSError):
        return replace(job, first=diagnose(of_job(log_dir, job.job_id), result).first)
    return job
