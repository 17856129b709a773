"""The state that Slurm knows of a job that has left no result, and the way the job ended."""

from __future__ import annotations

import re
import shutil

from bundle.driver.transports.slurm_commands import ENDED_BY_STATE
from bundle.protocol.enumerations import Ending

from ..core.errors import StagerError
from ..core.processes import Runner, run

_TIMEOUT_SECONDS = 10.0


def state(job_id: str, runner: Runner = run) -> str:
    """Return the job's state in Slurm's words; empty where Slurm does not know it.

    The accounting is asked first, which remembers for months, then the controller, which does for
    minutes.
    """
    if not job_id.isdigit():
        return ""
    sacct = ["sacct", "-n", "-X", "-P", "-j", job_id, "-o", "State"]
    scontrol = ["scontrol", "-o", "show", "job", job_id]
    for argv in (sacct, scontrol):
        known = parse(_output(argv, runner))
        if known:
            return known
    return ""


def _output(argv: list[str], runner: Runner) -> str:
    """Return what a command prints; empty where it is missing or fails."""
    if shutil.which(argv[0]) is None:
        return ""
    try:
        return runner(argv, timeout=_TIMEOUT_SECONDS, check=False).stdout
    except StagerError:
        return ""


def parse(printed: str) -> str:
    """Return the state in what ``sacct -P -o State`` or ``scontrol show job`` has printed."""
    field = re.search(r"\bJobState=([A-Z_]+)", printed)
    if field:
        return field[1]
    word = printed.strip().split(" ")[0]  # sacct: "CANCELLED by 1000"
    return word if re.fullmatch(r"[A-Z_]+", word) else ""


def ended_by(state: str) -> Ending | None:
    """Return why Slurm ended a job that has this state; None if it did not end it."""
    return ENDED_BY_STATE.get(state)
