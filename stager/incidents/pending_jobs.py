"""Notes of batch jobs that are not followed: they are read when they are over, by a later command.

Each note is a small file in the offline root. Only the user who wrote it reads it, as nobody else
may read the job's files. What a job's nodes are to blame for is kept before its note is removed.
"""

from __future__ import annotations

import json
import os
import re
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from bundle.driver.logs import CLOCK_SECONDS
from bundle.protocol import log_names
from bundle.protocol.codec import AnyText, decode, encode
from bundle.protocol.enumerations import Ending

from ..core.errors import StagerError
from ..core.files import opened
from ..core.store import PENDING_JOBS, Store
from ..pack.bundle_file import unmark
from .ended_jobs import diagnosed, ended_job
from .incident_files import DAY, MAX_BYTES, keep

KEPT_DAYS = 30
"""Days after which a job that never began, or never ended, is given up."""
MAX_NOTES = 1000
"""Notes of one user that are kept, the newest of all."""
SETTLE_SECONDS = 2.0
"""Time after which a command reads no more notes: the next one goes on."""
_NAME = re.compile(r"\d{13}-\d{1,20}\.json")


@dataclass(frozen=True, kw_only=True)
class PendingJob:
    """A batch job that Slurm has accepted."""

    job_id: str
    """Its number."""
    log_dir: AnyText
    """The directory of its logs."""
    project: AnyText
    """Its name."""
    submitted: float
    """When it was submitted, in seconds since the epoch."""
    bundle: AnyText = ""
    """Its bundle, which has a mark until the job is over."""

    @property
    def events(self) -> Path:
        """Its event log."""
        return Path(self.log_dir) / log_names.events(self.job_id)


def note(store: Store, job: PendingJob) -> bool:
    """Leave a note of a job, and return whether that was possible."""
    name = f"{int(job.submitted * 1000):013d}-{job.job_id}.json"
    try:
        with store.publishing(store.pending_jobs / name) as partial:
            partial.write_text(json.dumps(encode(job)) + "\n", encoding="utf-8")
    except (StagerError, OSError):
        return False
    return True


def drop(store: Store, job_id: str) -> None:
    """Remove this user's note of a job whose end has been seen."""
    for path in _own_notes(store):
        if path.name.endswith(f"-{job_id}.json"):
            _remove(path, _read(path))


def settle(store: Store, now: float, seconds: float = SETTLE_SECONDS) -> None:
    """Keep what the jobs that are over tell of their nodes, and remove their notes.

    So are notes that cannot be read, those of jobs that nothing was heard of for long, and the
    oldest where there are too many. A failed job takes a while to diagnose, and a log directory may
    be slow: notes that are not reached in time stay for the next command.
    """
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
    """Record what a finished job shows of its nodes; return whether nothing more is expected."""
    since = job.submitted - CLOCK_SECONDS
    ended = ended_job(Path(job.log_dir), job.job_id, job.project, since)
    if ended is not None:
        kept = keep(store, diagnosed(ended, Path(job.log_dir)), now)
        # One that Slurm has put back into the queue begins again.
        return kept and ended.result.ended_by != Ending.REQUEUED
    return max(job.submitted, _changed(job.events)) < now - KEPT_DAYS * DAY


def _own_notes(store: Store) -> Iterator[Path]:
    try:
        paths = sorted((store.root / PENDING_JOBS).iterdir(), reverse=True)
    except OSError:
        return
    for path in paths:
        with suppress(OSError):
            status = path.lstat()
            ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
            if ours and _NAME.fullmatch(path.name):
                yield path


def _read(path: Path) -> PendingJob | None:
    try:
        with opened(path) as handle:
            content = handle.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            return None
        job = decode(PendingJob, json.loads(content), strict=False)
    except (OSError, ValueError, RecursionError):
        return None
    is_ours = path.name.endswith(f"-{job.job_id}.json") and "\0" not in job.log_dir + job.bundle
    return job if is_ours else None


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
