"""Batch jobs that nobody follows: what became of them, read by a later command."""

from __future__ import annotations

import json
import os
import re
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from bundle.driver.logs import CLOCK_SECONDS
from bundle.protocol import log_names
from bundle.protocol.codec import AnyText, decode, encode
from bundle.protocol.dataclass import dataclass
from bundle.protocol.enumerations import Ending
from bundle.protocol.events import JobEnds

from ..core.errors import StagerError
from ..core.files import open_regular
from ..core.store import PENDING_JOBS, Store
from ..diagnosis.failure import FirstFailure
from ..logs.job_files import list_job_files
from ..logs.job_record import JobRecord, parse_event, read_events
from ..logs.lines import read_tail
from ..pack.bundle_file import mark, unmark
from .node_history import DAY, find_incidents, keep_incidents

_LAST_BYTES = (
    1 << 20
)  # at the end of an event log, so that those of running jobs are not read whole


def read_ended_job(log_dir: Path, job_id: str, since: float = 0.0) -> JobRecord | None:
    """Return a job that has ended, else None; one begun before ``since`` is another job."""
    events = log_dir / log_names.make_events_name(job_id)
    if not _may_have_ended(events):
        return None
    record = read_events(events)
    if record.end_time is None or (record.begun or since) < since:
        return None
    return record


def _may_have_ended(events: Path) -> bool:
    """Return whether the last line of an event log is a result, or too long to tell."""
    end = read_tail(events, _LAST_BYTES)
    _, before, last = end.rstrip(b"\n").rpartition(b"\n")
    if not before and len(end) == _LAST_BYTES:
        return True
    record = parse_event(last)
    return record is not None and isinstance(record.event, JobEnds)


def find_first_failure(record: JobRecord, log_dir: Path, job_id: str) -> FirstFailure | None:
    """Return what failed first in a job, if its ranks ran and its logs can be read."""
    result = record.result
    if result is None or result.ok or result.interrupted or result.ended_by:
        return None
    if not result.exit_codes:
        return None
    from ..diagnosis.diagnosis import diagnose  # not before: it takes a while

    with suppress(StagerError, OSError):
        return diagnose(list_job_files(log_dir, job_id), record).first
    return None


# --- Notes of batch jobs, which are read when their jobs are over --------------------------------

# Each note is a small file in the offline root. Only the user who wrote it reads it, as nobody else
# may read the job's files. What a job's nodes are to blame for is kept before its note is removed.

NOTE_DAYS = 30  # days after which a job that never began, or never ended, is given up
MAX_NOTES = 1000  # notes of one user that are kept, the newest of all
MAX_BYTES = 1 << 20  # a larger file is none of ours, and is not read
SETTLE_SECONDS = 2.0  # time after which a command reads no more notes: the next one goes on
_NOTE_NAME = re.compile(r"\d{13}-\d{1,20}\.json")


@dataclass(frozen=True, kw_only=True)
class PendingJob:
    """A batch job that Slurm has accepted."""

    job_id: str
    log_dir: AnyText
    project: AnyText
    submitted: float
    bundle: AnyText = ""  # its bundle, which has a mark until the job is over


def note_job(store: Store, job: PendingJob) -> bool:
    """Leave a note of a job, and return whether that was possible."""
    name = f"{int(job.submitted * 1000):013d}-{job.job_id}.json"
    try:
        with store.publish(store.pending_jobs / name) as partial:
            partial.write_text(json.dumps(encode(job)) + "\n", encoding="utf-8")
    except (StagerError, OSError):
        return False
    return True


def drop_note(store: Store, job_id: str) -> None:
    """Remove this user's note of a job whose end has been seen."""
    for path in _own_notes(store):
        if path.name.endswith(f"-{job_id}.json"):
            _remove(path, _read(path))


def settle_notes(store: Store, now: float, seconds: float = SETTLE_SECONDS) -> None:
    """Keep what jobs that are over show of their nodes; remove their notes, and useless ones."""
    until = time.monotonic() + seconds
    for number, path in enumerate(_own_notes(store)):
        if number and time.monotonic() > until:
            return
        job = _read(path)
        if job is None or number >= MAX_NOTES or _is_settled(store, job, now):
            _remove(path, job)


def _remove(path: Path, job: PendingJob | None) -> None:
    if job is not None and job.bundle:
        unmark(Path(job.bundle), job.job_id)
    with suppress(OSError):
        path.unlink()


def _is_settled(store: Store, job: PendingJob, now: float) -> bool:
    log_dir = Path(job.log_dir)
    record = read_ended_job(log_dir, job.job_id, job.submitted - CLOCK_SECONDS)
    if record is not None and record.result is not None:
        first = find_first_failure(record, log_dir, job.job_id)
        if record.result.failures and job.bundle:
            mark(store, Path(job.bundle))  # for a replay, when the project has changed
        incidents = find_incidents(record, job.job_id, job.project, first)
        is_kept = keep_incidents(store, incidents, now)
        # One that Slurm has put back into the queue begins again.
        return is_kept and record.result.ended_by != Ending.REQUEUED
    changed = 0.0
    with suppress(OSError):
        changed = (log_dir / log_names.make_events_name(job.job_id)).stat().st_mtime
    return max(job.submitted, changed) < now - NOTE_DAYS * DAY


def _own_notes(store: Store) -> Iterator[Path]:
    try:
        paths = sorted((store.root / PENDING_JOBS).iterdir(), reverse=True)
    except OSError:
        return
    for path in paths:
        with suppress(OSError):
            status = path.lstat()
            ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
            if ours and _NOTE_NAME.fullmatch(path.name):
                yield path


def _read(path: Path) -> PendingJob | None:
    try:
        with open_regular(path) as handle:
            content = handle.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            return None
        job = decode(PendingJob, json.loads(content), strict=False)
    except (OSError, ValueError, RecursionError):
        return None
    is_ours = path.name.endswith(f"-{job.job_id}.json") and "\0" not in job.log_dir + job.bundle
    return job if is_ours else None
