"""``stager diagnose``: say what failed first in a job, why, and what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .grouped import grouped
from .options.logs import JobArgument, LogDir, chosen_files
from .options.output import Talk
from .program import app, boundary
from .settings_place import settings_place

if TYPE_CHECKING:
    from pathlib import Path

    from ..console.job_result import Console
    from ..diagnosis.failure import Diagnosis


@app.command()
@grouped
def diagnose(*, job: JobArgument = None, log_dir: LogDir = None, talk: Talk) -> None:
    """Say what failed first in a job, why, and what to do."""
    from ..diagnosis.failure import diagnosis_result

    console = talk.console()
    with boundary(console):
        diagnosis = _diagnosis(job, log_dir, console)
        if talk.json:
            console.emit(diagnosis_result(diagnosis))
        else:
            console.diagnosed(diagnosis)


def _diagnosis(job: str | None, log_dir: Path | None, console: Console) -> Diagnosis:
    """Return the diagnosis of a job, by default of what came last here; that may be a refusal."""
    from ..config.load import project_file
    from ..diagnosis.diagnosis import diagnose as diagnose_job
    from ..diagnosis.diagnosis import of_refused
    from ..logs import job_record
    from ..logs.job_files import default_folder

    folder = default_folder(log_dir)
    refusal = (
        job_record.find_refused(folder, project_file(settings_place())) if job is None else None
    )
    if refusal:
        return of_refused(refusal, folder)
    return diagnose_job(chosen_files(job, log_dir, console))
