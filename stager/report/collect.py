"""Everything known about a job, from the files that it has left."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from bundle.protocol.enumerations import LogMode
from bundle.protocol.events import JobEnds, TransferPlan
from bundle.redaction.secrets import masked

from .. import __version__
from ..core.errors import BundleError
from ..core.files import text_of
from ..diagnosis.diagnosis import diagnose
from ..diagnosis.failure import Diagnosis
from ..logs.job_files import JobFiles
from ..logs.job_record import read_text, summarize
from ..pack.bundle_file import manifest_of
from ..redaction.redactor import Redactor
from ..slurm import messages
from ..support.evidence import cleaned
from .attempt import Attempt, JobPhases, Node, job_phases, last_attempt, nodes
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
class JobFacts:
    """The facts about a job; those not known are empty, or None."""

    job_id: str
    """Its number; empty for somebody else's logs."""
    folder: Path
    """Its log directory."""
    name: str = ""
    """The project's name."""
    command: str = ""
    """The command of each rank, without what looks like a secret."""
    world_size: int | None = None
    """The number of ranks."""
    launcher: str = ""
    """The launcher of the ranks."""
    backend: str = ""
    """The backend of the process group."""
    begun: float | None = None
    """The time of its beginning, in seconds since the epoch."""
    attempts: int = 0
    """The number of times it was started."""
    plan: str = ""
    """The way the bundle came to the nodes, with the reason."""
    sent: float | None = None
    """Bytes that were broadcast."""
    logs_lost: str = ""
    """The reason why its logs are not complete."""
    log_mode: LogMode = LogMode.PRIVATE
    """The mode of its files, and so of the page about it."""

    @property
    def title(self) -> str:
        """The title of the page."""
        if not self.job_id:
            return f"Logs in {self.folder.name or self.folder}"
        return f"Job {self.job_id}{f' ({self.name})' if self.name else ''}"


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

    facts: JobFacts
    """The job as a whole."""
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
    def first(self) -> str:
        """The node that failed first; empty where there is none, or it has no name."""
        first = None if self.diagnosis is None else self.diagnosis.first
        return "" if first is None else first.node


def collect(files: JobFiles) -> ReportData:
    """Return everything known about a job, from the files that it has left."""
    attempt, diagnosis = last_attempt(files), _diagnosis(files)
    verdict, now = _verdict(files, attempt.result, diagnosis), time.time()
    return ReportData(
        facts=_facts(files, attempt),
        verdict=verdict,
        diagnosis=None if diagnosis is None else cleaned(diagnosis, Redactor()),
        phases=job_phases(attempt, now if verdict is Verdict.RUNNING else None),
        nodes=nodes(attempt),
        training=training(files, attempt),
        contents=_bundle_contents(attempt),
        written=now,
        program=f"stager {__version__}",
    )


def _diagnosis(files: JobFiles) -> Diagnosis | None:
    """Return the diagnosis; None if the events are not a driver's: the rest still makes a page."""
    try:
        return diagnose(files)
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError):
        return None


def _facts(files: JobFiles, attempt: Attempt) -> JobFacts:
    job, result = attempt.job, attempt.result
    backend = "" if job.launch.backend == "auto" else job.launch.backend
    plans = [event for event in attempt.events if isinstance(event, TransferPlan)]
    return JobFacts(
        job_id=files.job_id,
        folder=files.folder.absolute(),
        name=job.name,
        command=shlex.join(masked(job.launch.command)),
        world_size=None if result is None else result.world_size,
        launcher=job.launch.launcher,
        backend=(result and result.backend) or backend,
        begun=attempt.first,
        attempts=attempt.count,
        plan=plans[-1].why if plans else "",
        sent=None if result is None else result.bytes_broadcast,
        logs_lost=_losses(result),
        log_mode=job.log_mode,
    )


def _verdict(files: JobFiles, result: JobEnds | None, diagnosis: Diagnosis | None) -> Verdict:
    """Return the verdict of the driver's result; without one, of the job's state or its logs."""
    if result is not None:
        return _reported(result)
    if _is_running(files):
        return Verdict.RUNNING
    return _of_logs(diagnosis)


def _reported(result: JobEnds) -> Verdict:
    if result.ok:
        return Verdict.WELL
    if result.interrupted and not result.ended_by:
        return Verdict.INTERRUPTED
    return Verdict.FAILED


def _of_logs(diagnosis: Diagnosis | None) -> Verdict:
    if diagnosis is None or diagnosis.ok is None:
        return Verdict.UNKNOWN
    return Verdict.WELL if diagnosis.ok else Verdict.FAILED


def _is_running(files: JobFiles) -> bool:
    if not files.job_id:
        return False
    begun = summarize(files.events).begun
    return messages.read_job_state(files.job_id, begun=begun) in _AT_WORK or _driven_here(files)


def _driven_here(files: JobFiles) -> bool:
    """Return whether a driver runs here: its file beside the logs has the process's number."""
    for path in files.folder.glob(".job.*.json"):
        with suppress(OSError, ValueError, RecursionError, IndexError):
            raw: Mapping[str, Any] = json.loads(text_of(path))
            process = Path("/proc", str(int(path.name.split(".")[2])))
            if isinstance(raw, dict) and read_text(raw, "id") == files.job_id:
                return b"stager" in (process / "cmdline").read_bytes()
    return False


def _losses(result: JobEnds | None) -> str:
    if result is None:
        return ""
    who = [f"{loss.node} {loss}".strip() for loss in result.logs_lost]
    return "; ".join(filter(None, [result.logs_fault, ", ".join(who)]))


def _bundle_contents(attempt: Attempt) -> BundleContents | None:
    path = attempt.job.bundle
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
    if manifest.id != attempt.job.bundle_id:
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
