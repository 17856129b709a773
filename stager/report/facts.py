"""The facts about a job as a whole, and its verdict in a word."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bundle.protocol.events import JobEnds, TransferPlan
from bundle.protocol.words import LogMode
from bundle.redaction.masking import masked

from ..core.regular_files import text_of
from ..diagnosis.failure import Diagnosis
from ..logs.files import JobFiles
from ..logs.json_fields import table, text, texts
from ..slurm import accounting
from .attempt import Attempt

WELL, FAILED, RUNNING = "ended well", "failed", "still running"
INTERRUPTED, UNKNOWN = "interrupted", "unknown"
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
    action: str = ""
    """``run`` or ``verify``."""
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


def facts(files: JobFiles, attempt: Attempt) -> JobFacts:
    """Return the facts about a job as a whole."""
    job, result = attempt.job, attempt.result
    launch = table(job, "launch")
    plans = [event for event in attempt.events if isinstance(event, TransferPlan)]
    backend = text(launch, "backend")
    return JobFacts(
        job_id=files.job_id,
        folder=files.folder.absolute(),
        name=text(job, "name"),
        action=text(job, "action"),
        command=shlex.join(masked(texts(launch, "command"))),
        world_size=None if result is None else result.world_size,
        launcher=text(launch, "launcher"),
        backend=(result and result.backend) or (backend if backend != "auto" else ""),
        begun=attempt.first,
        attempts=attempt.count,
        plan=plans[-1].why if plans else "",
        sent=None if result is None else result.bytes_broadcast,
        logs_lost=_losses(result),
        log_mode=LogMode.GROUP if text(job, "log_mode") == LogMode.GROUP else LogMode.PRIVATE,
    )


def verdict(files: JobFiles, result: JobEnds | None, diagnosis: Diagnosis | None) -> str:
    """Return the verdict on a job, in a word.

    The driver's own result counts most. Where it has left none it runs, or was killed: Slurm may
    know, or for a job on this machine the process itself.

    Args:
        files: the job's files.
        result: the driver's last event; None where there is none.
        diagnosis: the diagnosis of the logs; None where they cannot be read.
    """
    if result is not None and result.ok:
        return WELL
    if result is not None:
        by_user = result.interrupted and not result.ended_by
        return INTERRUPTED if by_user else FAILED
    if files.job_id and (accounting.state(files.job_id) in _AT_WORK or _driven_here(files)):
        return RUNNING
    if diagnosis is None or diagnosis.ok is None:
        return UNKNOWN
    return WELL if diagnosis.ok else FAILED


def _driven_here(files: JobFiles) -> bool:
    """Return whether a driver of this job runs on this machine.

    As long as one does, there is a file with the process's number in its name beside the logs.
    """
    for path in files.folder.glob(".job.*.json"):
        with suppress(OSError, ValueError, RecursionError, IndexError):
            raw: Mapping[str, Any] = json.loads(text_of(path))
            process = Path("/proc", str(int(path.name.split(".")[2])))
            if isinstance(raw, dict) and text(raw, "id") == files.job_id:
                return b"stager" in (process / "cmdline").read_bytes()
    return False


def _losses(result: JobEnds | None) -> str:
    """Return the reason why the logs are not complete, and the output that each rank lost."""
    if result is None:
        return ""
    who = [f"{loss.node} {loss}".strip() for loss in result.logs_lost]
    return "; ".join(filter(None, [result.logs_fault, ", ".join(who)]))
