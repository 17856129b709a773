"""A job's log directory, and the number of a job that is claimed in it."""

from __future__ import annotations

import os
import secrets
import time
from dataclasses import replace
from pathlib import Path

from bundle.protocol import log_names
from bundle.protocol.enumerations import Allocation, LogMode
from bundle.protocol.job import Job
from bundle.system import permissions

from ..core.errors import ConfigError, StagerError
from ..core.store import keep_out_of_projects

_RANDOM_DIGITS = 6
"""Random digits at the end of the number of a job that Slurm has not numbered."""


def make_log_dir(log_dir: Path, mode: LogMode) -> None:
    """Make the log directory, which must not become part of a project's next bundle.

    Raises:
        StagerError: it cannot be written.
        ConfigError: its group is to read the logs, and is none of the user's.
    """
    try:
        permissions.make_folder(str(log_dir), mode)
        keep_out_of_projects(log_dir, mode)
        group = log_dir.stat().st_gid
    except OSError as exc:
        raise _unwritable(log_dir, exc) from exc
    if mode is LogMode.GROUP and os.geteuid() and group not in (os.getegid(), *os.getgroups()):
        raise ConfigError(
            f"cluster.log-mode: you are not a member of the group of {log_dir} (number {group})",
            hint="give the directory to a group of yours with chgrp, name another directory with"
            ' --log-dir, or set log-mode = "private"',
        )


def numbered(job: Job) -> Job:
    """Return the job with a number, where Slurm gives it none; nothing can be refused after that.

    Raises:
        StagerError: the log directory, in which the number is claimed, cannot be written.
    """
    return job if job.allocation is Allocation.SLURM else replace(job, id=_new_id(job))


def _new_id(job: Job) -> str:
    """Return a number for a job that Slurm has not numbered, claimed by creating its event log.

    It begins with the time, so that numbers sort by it. Jobs with other log directories do not see
    the claim, but use the same node root under their number: so the last digits are random.
    """
    log_dir = Path(job.log_dir)
    while True:
        milliseconds = time.time_ns() // 1_000_000 % 10**10
        number = milliseconds * 10**_RANDOM_DIGITS + secrets.randbelow(10**_RANDOM_DIGITS)
        claim = log_dir / log_names.events(str(number))
        try:
            open(claim, "xb", opener=permissions.opener(job.log_mode)).close()
        except FileExistsError:
            continue
        except OSError as exc:
            raise _unwritable(log_dir, exc) from exc
        return str(number)


def _unwritable(log_dir: Path, exc: OSError) -> StagerError:
    return StagerError(
        f"the log directory {log_dir} cannot be written: {exc.strerror or exc}",
        hint="name another one with --log-dir",
    )
