"""The state that Slurm knows of a job that has left no result, and the way the job ended."""

from __future__ import annotations

import re
import shutil

from bundle.driver.logs import CLOCK_SECONDS
from bundle.driver.transports.slurm_text import ENDED_BY_STATE, submit_time
from bundle.protocol.enumerations import Ending

from ..core.errors import StagerError
from ..core.processes import Runner, run

_TIMEOUT_SECONDS = 10.0


def state(job_id: str, runner: Runner = run, *, begun: float | None = None) -> str:
    """Return the job's state in Slurm's words; empty where Slurm does not know it.

    The accounting is asked first, which remembers for months, then the controller, which does for
    minutes.

    Args:
        job_id: the job's number.
        runner: runs the commands.
        begun: when it began; one that was submitted later is another job of the same number.
    """
    if not job_id.isdigit():
        return ""
    sacct = ["sacct", "-n", "-X", "-P", "-j", job_id, "-o", "State,Submit"]
    scontrol = ["scontrol", "-o", "show", "job", job_id]
    for argv in (sacct, scontrol):
        printed = _output(argv, runner)
        known, submitted = parse(printed), submit_time(printed)
        if known:
            is_another = begun and submitted and begun + CLOCK_SECONDS < submitted
            return "" if is_another else known
    return ""


def _output(argv: list[str], runner: Runner) -> str:
    """Return what a command prints; empty if it is missing or fails."""
    if shutil.which(argv[0]) is None:
        return ""
    try:
        return runner(argv, timeout=_TIMEOUT_SECONDS, check=False).stdout
    except StagerError:
        return ""


def parse(printed: str) -> str:
    """Return the state in what ``sacct -P -o State,Submit`` or ``scontrol show job`` prints."""
    field = re.search(r"\bJobState=([A-Z_]+)", printed)
    if field:
        return field[1]
    word = re.split("[ |]", printed.strip())[0]  # sacct: "CANCELLED by 1000"
    return word if re.fullmatch(r"[A-Z_]+", word) else ""


def ended_by(state: str) -> Ending | None:
    """Return why Slurm ended a job that has this state; None if it did not end it."""
    return ENDED_BY_STATE.get(state)
