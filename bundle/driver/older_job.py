"""The files of another job of the same number, moved away before this job writes any.

Slurm's numbers begin anew when it is set up again, and two clusters may share a log directory.
"""

from __future__ import annotations

import json
import os
import re
import time
from contextlib import suppress

from ..protocol import log_names
from ..protocol.enumerations import Allocation
from ..protocol.events import JobBegins, Record, read_record
from ..protocol.job import Job
from ..system import permissions, processes
from .transports.slurm_commands import submit_time

_ASK_SECONDS = 30.0
CLOCK_SECONDS = 60.0
"""Seconds by which the clocks of two hosts may differ."""


def cluster_name(job: Job) -> str:
    """Return the name of the job's cluster; empty where it is not Slurm's."""
    return os.environ.get("SLURM_CLUSTER_NAME", "") if job.allocation is Allocation.SLURM else ""


def move_older_files(job: Job) -> str:
    """Move the files that another job of this number has left to a folder of their own.

    Returns:
        The folder; empty where there are none.

    Raises:
        OSError: they cannot be moved.
    """
    if job.allocation is not Allocation.SLURM or job.attempt:
        return ""
    last = _last_begin(os.path.join(job.log_dir, log_names.events(job.id)))
    if last is None or not _is_of_another(last, job):
        return ""
    begun = time.strftime("%Y%m%d-%H%M%S", time.localtime(last.time or 0))
    folder = os.path.join(job.log_dir, f"older-{job.id}-{begun}")
    permissions.make_folder(folder, job.log_mode)
    own = [os.fstat(descriptor) for descriptor in (1, 2)]  # Slurm has begun the batch log
    for name in filter(_names_of(job.id).fullmatch, os.listdir(job.log_dir)):
        path = os.path.join(job.log_dir, name)
        if not any(os.path.samestat(os.lstat(path), one) for one in own):
            os.rename(path, os.path.join(folder, name))
    return folder


def _names_of(job_id: str) -> re.Pattern[str]:
    names = (log_names.events, log_names.order, log_names.preflight, log_names.job)
    fixed = [re.escape(name(job_id)) for name in (*names, log_names.wrapper)]
    return re.compile("|".join((*fixed, rf".+\.{re.escape(job_id)}\.(?:batch|.+\.\d+)\.out")))


def _last_begin(events: str) -> Record | None:
    last = None
    with suppress(OSError), open(events, "rb") as lines:
        for line in lines:
            if b'"event": "job"' in line:
                with suppress(ValueError, RecursionError):
                    last = read_record(json.loads(line)) or last
    return last


def _is_of_another(last: Record, job: Job) -> bool:
    """Tell another job with this id: an allocation may have run earlier jobs under its number."""
    cluster, begun = cluster_name(job), last.event
    if cluster and isinstance(begun, JobBegins) and begun.cluster not in ("", cluster):
        return True
    env = {name: value for name, value in os.environ.items() if name != "SLURM_TIME_FORMAT"}
    try:
        argv = ["scontrol", "--oneliner", "show", "job", job.id]
        shown = processes.run(argv, timeout=_ASK_SECONDS, env=env).stdout
    except processes.ProcessError:
        return False
    return (last.time or 0.0) + CLOCK_SECONDS < (submit_time(shown) or 0.0)
