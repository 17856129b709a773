"""What Slurm still knows of a job that has left no result: its state, and how it ended."""

from __future__ import annotations

import re
import shutil

from ..core.errors import StagerError
from ..core.processes import Runner, run

_PATIENCE = 10.0
_ENDINGS = {
    "TIMEOUT": "time-limit",
    "DEADLINE": "time-limit",
    "PREEMPTED": "preempted",
    "NODE_FAIL": "node-failure",
    "BOOT_FAIL": "node-failure",
    "CANCELLED": "cancelled",
}
"""Slurm's job states to the driver's words for them (``man squeue``, job state codes)."""


def state(job_id: str, runner: Runner = run) -> str:
    """The job's state in Slurm's words; empty where Slurm is not there or has forgotten it.

    The accounting is asked first, which remembers for months, then the controller, which does for
    minutes.
    """
    if not job_id.isdigit():
        return ""
    sacct = ["sacct", "-n", "-X", "-P", "-j", job_id, "-o", "State"]
    for argv in (sacct, ["scontrol", "-o", "show", "job", job_id]):
        if shutil.which(argv[0]) is None:
            continue
        try:
            said = runner(argv, timeout=_PATIENCE, check=False).stdout
        except StagerError:
            continue
        if found := parse(said):
            return found
    return ""


def parse(said: str) -> str:
    """The state in what ``sacct -P -o State`` or ``scontrol show job`` has printed."""
    named = re.search(r"\bJobState=([A-Z_]+)", said)
    if named:
        return named[1]
    first = said.strip().split("\n")[0].split(" ")[0]
    return first if re.fullmatch(r"[A-Z_]+", first) else ""


def ended_by(state: str) -> str:
    """A state as the driver would call it; empty for one that is no end of Slurm's making."""
    return _ENDINGS.get(state, "")
