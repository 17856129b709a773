"""A job in one line: its number, action, project and time, as its description has them."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

from bundle.protocol.enumerations import Action
from bundle.protocol.job import parse
from bundle.protocol.problem import NodeError

from ..core.files import opened


@dataclass(frozen=True, kw_only=True)
class JobSummary:
    """A job in short, as far as it is known without reading its logs."""

    job_id: str
    """The job's number."""
    action: Action | None
    """Its purpose; None for a job that has left no description, or one of another version."""
    dry_run: bool
    """Whether it was to stop after the plan."""
    project: str
    """The project's name; empty if unknown."""
    time: float
    """When it began, or when it last wrote something; in seconds since the epoch."""

    @property
    def planned_only(self) -> bool:
        """True if it neither verified nor ran anything."""
        return self.dry_run or self.action is Action.CLEAN

    @property
    def kind(self) -> str:
        """Its kind in words; empty if unknown."""
        if self.action is None:
            return ""
        return f"dry run of {self.action.value}" if self.dry_run else self.action.value

    def __str__(self) -> str:
        what = self.action.value if self.action else ""
        of_project = f" of {self.project}" if self.project else ""
        dry_run = "dry run" if self.dry_run else ""
        parts = (self.job_id, what + of_project, dry_run, _minute(self.time))
        return ", ".join(part for part in parts if part)


def job_summary(job_id: str, description: Path, changed: float) -> JobSummary:
    """Summarize a job; ``changed`` (s since the epoch) is its time without a ``job.json``."""
    try:
        with opened(description) as handle:
            job = parse(json.load(handle))
            changed = os.fstat(handle.fileno()).st_mtime
    except (OSError, ValueError, RecursionError, NodeError):
        return JobSummary(job_id=job_id, action=None, dry_run=False, project="", time=changed)
    return JobSummary(
        job_id=job_id, action=job.action, dry_run=job.dry_run, project=job.name, time=changed
    )


def _minute(seconds: float) -> str:
    """Format a time in the local zone; empty for 0 and for an invalid one."""
    try:
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds)) if seconds else ""
    except (OverflowError, ValueError, OSError):
        return ""
