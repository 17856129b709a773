"""The incidents in the offline root, and notes of batch jobs whose end is not known yet."""

from __future__ import annotations

import json
import os
import re
import stat
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from bundle.driver.logs import CLOCK_SECONDS
from bundle.protocol import log_names
from bundle.protocol.codec import AnyText, decode, encode
from bundle.protocol.enumerations import Ending
from bundle.protocol.events import JobEnds

from ..core.errors import StagerError
from ..core.files import opened
from ..core.store import INCIDENTS, PENDING_JOBS, Store
from ..logs.job_files import of_job
from ..logs.job_record import parse_event, read_events
from ..pack.bundle_file import unmark
from .node_history import EndedJob, Incident, incidents_of

# --- The incidents in the offline root: one small file of JSON lines for each job that had any

# A file is named for the end of its job and the job's number, and gets that name by one rename. So
# jobs of several users never write to the same file, a job that is read twice is kept once, and the
# names alone say which files are old. All who share the root may write there, so what a file holds
# is hostile until checked: a line that cannot be true is skipped.

DAY = 24 * 3600.0
KEPT_DAYS = 90
"""Days after which an incident is removed."""
MAX_FILES = 1000
"""Jobs whose incidents are kept, the newest of all."""
MAX_BYTES = 1 << 20
"""A larger file is none of ours, and is not read."""
MAX_LINES = 500
"""Incidents of one job that are kept and read."""
_NAME = re.compile(r"(\d{13})-(\d{1,20})\.jsonl")
"""Milliseconds since the epoch, and the job's number."""
_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")
"""The name of a node: one that goes into Slurm's ``--exclude`` stands for no others."""


def is_node_name(text: str) -> bool:
    """Return whether a text can be the name of one node."""
    return _NODE.fullmatch(text) is not None


def keep(store: Store, job: EndedJob, now: float) -> bool:
    """Keep what the nodes of a job are to blame for, once; return False where that is impossible.

    A root that cannot be written is no failure of the job.
    """
    incidents = incidents_of(job)[:MAX_LINES]
    if not incidents:
        return True
    try:
        path = store.incidents / f"{int(job.ended * 1000):013d}-{job.job_id}.jsonl"
        if not path.exists():
            _publish(store, path, incidents)
        _remove_old(store, now)
    except (StagerError, OSError):
        return False
    return True


def read(store: Store, days: int, now: float) -> tuple[Incident, ...]:
    """Return the incidents of the last days, the newest job first; what is damaged is skipped."""
    since = now - days * DAY
    incidents: list[Incident] = []
    possible = [(path, ended) for path, ended in _files(store) if since <= ended <= now + DAY]
    for path, ended in possible[:MAX_FILES]:  # a clock may be wrong, but not by more than a day
        incidents += _incidents(path, ended)
    return tuple(incidents)


def forget(store: Store, nodes: Collection[str]) -> int:
    """Remove all incidents of some nodes, and return how many there were.

    An empty file stays in the place of one that had no others: its job is not counted again.

    Raises:
        StagerError: the root cannot be written.
    """
    count = 0
    for path, ended in _files(store):
        incidents = _incidents(path, ended)
        others = [incident for incident in incidents if incident.node not in nodes]
        if len(others) < len(incidents):
            _publish(store, path, others)
            count += len(incidents) - len(others)
    return count


def _publish(store: Store, path: Path, incidents: Collection[Incident]) -> None:
    lines = [json.dumps(encode(incident)) + "\n" for incident in incidents]
    with store.publishing(path) as partial:
        partial.write_text("".join(lines), encoding="utf-8")


def _remove_old(store: Store, now: float) -> None:
    """Remove files that are too old, too many or in the future: no user may crowd out others."""
    files = _files(store)
    possible = [path for path, ended in files if now - KEPT_DAYS * DAY <= ended <= now + DAY]
    kept = set(possible[:MAX_FILES])
    for path, _ in files:
        if path not in kept:
            with suppress(OSError):
                path.unlink()


def _files(store: Store) -> list[tuple[Path, float]]:
    """List the files with the times at which their jobs ended, newest first."""
    folder = store.root / INCIDENTS
    try:
        names = sorted((path.name for path in folder.iterdir()), reverse=True)
    except OSError:
        return []
    found = [match for name in names if (match := _NAME.fullmatch(name))]
    return [(folder / match[0], int(match[1]) / 1000) for match in found]


def _incidents(path: Path, ended: float) -> list[Incident]:
    try:
        with opened(path) as handle:
            content = handle.read(MAX_BYTES + 1)
    except OSError:
        return []
    if len(content) > MAX_BYTES:
        return []
    return list(_checked(content.splitlines()[:MAX_LINES], path, ended))


def _checked(lines: Collection[bytes], path: Path, ended: float) -> Iterator[Incident]:
    for line in lines:
        try:
            incident = decode(Incident, json.loads(line), strict=False)
        except (ValueError, RecursionError):
            continue
        named_alike = path.name.endswith(f"-{incident.job_id}.jsonl")
        if named_alike and abs(incident.time - ended) < 1 and is_node_name(incident.node):
            yield incident


# --- Jobs that are over, read from the files that they have left in their log directory ----------

_LAST_BYTES = 1 << 20
"""An event log is examined from its end: those of jobs that still run are not read as a whole."""


def ended_job(log_dir: Path, job_id: str, project: str, since: float = 0.0) -> EndedJob | None:
    """Return a job that has ended, else None; one begun before ``since`` is another job."""
    events = log_dir / log_names.events(job_id)
    if not _may_have_ended(events):
        return None
    summary = read_events(events)
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
        return replace(job, first=diagnose(of_job(log_dir, job.job_id)).first)
    return job


# --- Notes of batch jobs that are not followed: they are read when they are over, by a later
# command

# Each note is a small file in the offline root. Only the user who wrote it reads it, as nobody else
# may read the job's files. What a job's nodes are to blame for is kept before its note is removed.

NOTE_DAYS = 30
"""Days after which a job that never began, or never ended, is given up."""
MAX_NOTES = 1000
"""Notes of one user that are kept, the newest of all."""
SETTLE_SECONDS = 2.0
"""Time after which a command reads no more notes: the next one goes on."""
_NOTE_NAME = re.compile(r"\d{13}-\d{1,20}\.json")


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


def note_job(store: Store, job: PendingJob) -> bool:
    """Leave a note of a job, and return whether that was possible."""
    name = f"{int(job.submitted * 1000):013d}-{job.job_id}.json"
    try:
        with store.publishing(store.pending_jobs / name) as partial:
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
    return max(job.submitted, _changed(job.events)) < now - NOTE_DAYS * DAY


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
