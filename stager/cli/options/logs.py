"""The job whose logs a command reads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bundle.protocol.counts import counted

from .values import path_option

if TYPE_CHECKING:
    from ...console.job_result import Console
    from ...logs.job_files import JobFiles

LogDir = Annotated[
    Path | None,
    typer.Option("--log-dir", metavar="DIR", parser=path_option, help="Default: ~/slurm_logs."),
]
JobArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="[JOB|DIR]", help="A job's number or a directory of logs; default: the newest job."
    ),
]


def job_files(job: str | None, log_dir: Path | None) -> JobFiles:
    """Return the files of a job, by default of the newest."""
    from ...logs.job_files import default_folder, find

    return find(job, default_folder(log_dir))


def chosen_files(
    job: str | None, log_dir: Path | None, console: Console, *, named: bool = True
) -> JobFiles:
    """Return a job's files, or the newest's; its project, maybe a secret, is shown if ``named``."""
    files = job_files(job, log_dir)
    if job is None:
        summary = files.summary
        console.say(f"newest job: {summary if named else replace(summary, project='')}")
    if files.other_jobs:
        newest = max(log.job for log in files.logs)
        jobs = counted(len(files.other_jobs) + 1, "job")
        console.say(
            f"newest job: {newest}, of {jobs} in {files.folder}; "
            "--log-dir and a number choose another one"
        )
    return files
