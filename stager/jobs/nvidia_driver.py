"""The NVIDIA driver that a project's jobs will find: what is known of it before there is a job."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from bundle.driver.cuda import parse_version
from bundle.driver.transports.slurm_text import make_step_argv
from bundle.driver.transports.transport import Step
from bundle.node.machine import Question, kernel_driver, parse_driver_version
from bundle.protocol.messages import PreflightAnswer
from bundle.system.hostlist import expand_hostlist

from ..core.errors import StagerError
from ..core.processes import Runner, run
from ..lock.resolver import KnownDriver
from ..logs import job_files
from ..logs.job_record import read_records

_SECONDS = 120.0  # time for the nodes of an allocation to answer
_ACCOUNT = "/proc/driver/nvidia/version"


def find_driver(
    project: str,
    env: Mapping[str, str] = os.environ,
    *,
    log_dir: Path | None = None,
    run: Runner = run,
) -> KnownDriver:
    """Return the oldest driver of the allocation, else of the last job, else of this machine."""
    known = _query_allocation(env, run) or _read_last_job(
        project, job_files.choose_log_dir(log_dir)
    )
    if known is not None:
        return known
    driver = kernel_driver()
    facts = None if driver else Question(env).answer()
    return KnownDriver(version=facts.driver if facts else driver, where="this machine")


def _query_allocation(env: Mapping[str, str], run: Runner) -> KnownDriver | None:
    job_id, listed = env.get("SLURM_JOB_ID", ""), env.get("SLURM_JOB_NODELIST", "")
    if not job_id or not listed or shutil.which("srun", path=env.get("PATH")) is None:
        return None
    try:
        step = Step("gpus", tuple(expand_hostlist(listed)), cpus=1)
        done = run(make_step_argv(step, ["cat", _ACCOUNT]), timeout=_SECONDS, check=False)
    except (StagerError, ValueError):
        return None
    versions = {parse_driver_version(line) for line in done.stdout.splitlines()}
    if not versions - {""} and "No such file" not in done.stderr:
        return None  # srun itself has failed
    return _choose_oldest(versions, f"allocation {job_id}")


def _read_last_job(project: str, log_dir: Path) -> KnownDriver | None:
    job = job_files.find_last_job(project, log_dir)
    events = [record.event for record in read_records(job.events)] if job else []
    answers = [event for event in events if isinstance(event, PreflightAnswer)]
    if job is None or not answers:
        return None
    versions = {answer.gpus.driver for answer in answers if answer.gpus is not None}
    return _choose_oldest(versions, f"the nodes of job {job.job_id}")


def _choose_oldest(versions: set[str], where: str) -> KnownDriver:
    return KnownDriver(version=min(versions - {""}, key=parse_version, default=""), where=where)
