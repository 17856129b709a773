"""Everything known about a job, from the files that it has left."""

from __future__ import annotations

import shlex
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

from bundle.redaction.secrets import masked

from .. import __version__
from ..core.errors import BundleError
from ..core.files import bytes_of
from ..diagnosis.diagnosis import diagnose
from ..diagnosis.failure import Diagnosis
from ..logs.job_files import JobFiles, KeptJob, kept_job
from ..logs.job_record import JobRecord, read_events
from ..pack.bundle_file import manifest_of
from ..redaction.redactor import Redactor
from ..slurm import messages
from ..support.evidence import cleaned
from .attempt import JobPhases, Node, job_phases, nodes
from .charts import Training, training


class Verdict(Enum):
    """The outcome of a job."""

    WELL = "ended well"
    FAILED = "failed"
    RUNNING = "still running"
    INTERRUPTED = "interrupted"
    UNKNOWN = "unknown"


_AT_WORK = {
    *("RUNNING", "PENDING", "COMPLETING", "CONFIGURING", "SUSPENDED", "REQUEUED", "RESIZING"),
    *("STOPPED", "SIGNALING", "STAGE_OUT", "REQUEUE_HOLD"),
}
"""Slurm's states of a job that has not ended (``man squeue``, job state codes)."""


@dataclass(frozen=True, kw_only=True)
class BundlePart:
    """A package, the project or an asset."""

    name: str
    """Its name, with a package's version."""
    kind: str
    """Its source: ``wheel``, ``project``..."""
    packed: int
    """Bytes in the bundle."""
    unpacked: int
    """Bytes on a node."""
    files: int
    """The number of its files."""


@dataclass(frozen=True, kw_only=True)
class BundleContents:
    """The parts of a bundle, or the reason why they are not known."""

    path: str
    """The bundle's file."""
    missing: str = ""
    """The reason why its parts are not known; empty where they are."""
    parts: tuple[BundlePart, ...] = ()
    """Its parts, the largest first."""


@dataclass(frozen=True, kw_only=True)
class ReportData:
    """Everything that a page about a job shows."""

    job_id: str
    """The job's number; empty for somebody else's logs."""
    folder: Path
    """Its log directory."""
    job: KeptJob
    """The job as its driver got it, without what looks like a secret."""
    record: JobRecord
    """Its events."""
    verdict: Verdict
    """What became of it."""
    diagnosis: Diagnosis | None
    """Its diagnosis; None where that could not be made."""
    phases: JobPhases
    """The phases of each node."""
    nodes: tuple[Node, ...]
    """The nodes."""
    training: Training
    """The curves of the training."""
    contents: BundleContents | None
    """The contents of the bundle."""
    written: float
    """The time of writing, in seconds since the epoch."""
    program: str
    """The program that writes it, with its version."""

    @property
    def title(self) -> str:
        """The title of the page."""
        if not self.job_id:
            return f"Logs in {self.folder.name or self.folder}"
        return f"Job {self.job_id}{f' ({self.job.name})' if self.job.name else ''}"

    @property
    def command(self) -> str:
        """The command of each rank."""
        return shlex.join(self.job.launch.command)

    @property
    def backend(self) -> str:
        """The backend of the process group; empty where it is not known."""
        asked = self.job.launch.backend
        result = self.record.result
        return (result and result.backend) or ("" if asked == "auto" else asked)

    @property
    def logs_lost(self) -> str:
        """The reason why its logs are not complete."""
        result = self.record.result
        if result is None:
            return ""
        who = ", ".join(f"{loss.node} {loss}".strip() for loss in result.logs_lost)
        return "; ".join(filter(None, [result.logs_fault, who]))

    @property
    def first(self) -> str:
        """The node that failed first; empty where there is none, or it has no name."""
        first = None if self.diagnosis is None else self.diagnosis.first
        return "" if first is None else first.node


def collect(files: JobFiles) -> ReportData:
    """Return everything known about a job, from the files that it has left."""
    job = files.read_job()
    launch = replace(job.launch, command=tuple(masked(job.launch.command)))
    record = read_events(files.events) if files.job_id else JobRecord()
    diagnosis = _diagnosis(files, record)
    verdict, now = _verdict(files, record, diagnosis), time.time()
    return ReportData(
        job_id=files.job_id,
        folder=files.folder.absolute(),
        job=replace(job, launch=launch),
        record=record,
        verdict=verdict,
        diagnosis=None if diagnosis is None else cleaned(diagnosis, Redactor()),
        phases=job_phases(record, now if verdict is Verdict.RUNNING else None),
        nodes=nodes(record),
        training=training(files, job, record),
        contents=_bundle_contents(job),
        written=now,
        program=f"stager {__version__}",
    )


def _diagnosis(files: JobFiles, record: JobRecord) -> Diagnosis | None:
    """Return the diagnosis; None if the events are not a driver's: the rest still makes a page."""
    try:
        return diagnose(files, record)
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError):
        return None


def _verdict(files: JobFiles, record: JobRecord, diagnosis: Diagnosis | None) -> Verdict:
    """Return the verdict of the driver's result; without one, of the job's state or its logs."""
    result = record.result
    if result is not None and result.ok:
        return Verdict.WELL
    if result is not None:
        is_the_users = result.interrupted and not result.ended_by
        return Verdict.INTERRUPTED if is_the_users else Verdict.FAILED
    if files.job_id:
        state = messages.read_job_state(files.job_id, begun=record.begun)
        if state in _AT_WORK or _driven_here(files):
            return Verdict.RUNNING
    if diagnosis is None or diagnosis.ok is None:
        return Verdict.UNKNOWN
    return Verdict.WELL if diagnosis.ok else Verdict.FAILED


def _driven_here(files: JobFiles) -> bool:
    """Return whether a driver runs here: its file beside the logs has the process's number."""
    for path in files.folder.glob(".job.*.json"):
        with suppress(OSError, ValueError, IndexError):
            process = Path("/proc", str(int(path.name.split(".")[2])))
            if kept_job(bytes_of(path)).id == files.job_id:
                return b"stager" in (process / "cmdline").read_bytes()
    return False


def _bundle_contents(job: KeptJob) -> BundleContents | None:
    path = job.bundle
    if not path:
        return None
    try:
        if not Path(path).is_file():
            return BundleContents(
                path=path, missing="the bundle is gone, or cannot be seen from here"
            )
        manifest = manifest_of(Path(path))
    except (BundleError, OSError, ValueError) as exc:
        return BundleContents(path=path, missing=f"the bundle cannot be read: {exc}")
    if manifest.id != job.bundle_id:
        return BundleContents(path=path, missing="a different bundle is there now")
    parts = [
        BundlePart(
            name=f"{layer.name} {layer.version}".strip(),
            kind=layer.kind,
            packed=layer.size,
            unpacked=layer.unpacked_size,
            files=layer.files,
        )
        for layer in manifest.layers
    ]
    parts.sort(key=lambda part: (-part.packed, part.name))
    return BundleContents(path=path, parts=tuple(parts))
