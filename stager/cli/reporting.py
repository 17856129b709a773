"""``report``: a job as one page to read, to keep, or to send to somebody."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .grouped import grouped
from .looking import JobArgument, job_files
from .options import LogDir, Talk
from .program import app, boundary


@app.command()
@grouped
def report(
    *,
    job: JobArgument = None,
    log_dir: LogDir = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", metavar="FILE", help="Default: report.JOB.html beside the logs."
        ),
    ] = None,
    talk: Talk,
) -> None:
    """Write a job's story as one HTML file: what failed, times, curves, nodes, the bundle."""
    from ..report.report import report as written

    console = talk.console()
    with boundary(console):
        made = written(job_files(job, log_dir), output)
        if talk.json:
            console.emit(made.to_json())
        else:
            console.data(str(made.path))
