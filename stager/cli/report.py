"""``stager report``: write one HTML page about a job."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from .grouped import grouped
from .options.logs import JobArgument, LogDir, chosen_files
from .options.output import Talk, file_option
from .program import app, boundary


@app.command()
@grouped
def report(
    *,
    job: JobArgument = None,
    log_dir: LogDir = None,
    output: Annotated[Path | None, file_option("Default: report.JOB.html beside the logs.")] = None,
    talk: Talk,
) -> None:
    """Write one HTML page about a job: its failure, times and nodes."""
    from ..report.page import report as write_report

    console = talk.console()
    with boundary(console):
        page = write_report(chosen_files(job, log_dir, console), output)
        if talk.json:
            console.emit(page)
        else:
            console.data(str(page.path))
