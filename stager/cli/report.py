"""``stager report``: write one HTML page about a job."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .grouped import grouped
from .options import JobArgument, LogDir, Talk, chosen_files, path_option
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
            "-o",
            "--output",
            metavar="FILE",
            parser=path_option,
            help="Default: report.JOB.html beside the logs.",
        ),
    ] = None,
    talk: Talk,
) -> None:
    """Write one HTML page about a job: its failure, times and nodes."""
    from ..report.report import report as write_report

    console = talk.console()
    with boundary(console):
        page = write_report(chosen_files(job, log_dir, console), output)
        if talk.json:
            console.emit(page)
        else:
            console.data(str(page.path))
