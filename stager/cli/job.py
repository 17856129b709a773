"""The part that ``verify`` and ``run`` share: a job, and the ends of it that are no outcome."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from bundle.protocol.enumerations import Action

if TYPE_CHECKING:
    from ..console.job_result import Console
    from ..jobs.job import JobOptions
    from ..jobs.outcome import Outcome


def job_outcome(console: Console, action: Action, options: JobOptions) -> Outcome:
    """Return what became of a job; one that is only planned or submitted ends the command here.

    ``diagnose`` hears of a command that fails before its job begins.
    """
    from .. import pipeline
    from ..config.load import project_file
    from ..forecast.results import PlannedJob
    from ..jobs.outcome import Outcome
    from ..jobs.prepare import project
    from ..logs.files import default_folder
    from ..logs.refused import remembered

    verb = pipeline.run if action is Action.RUN else pipeline.verify
    with remembered(default_folder(options.log_dir), action.value, project_file()):
        ended = verb(project(options.bundle, options.bundle_id), options, console)
    if isinstance(ended, Outcome):
        return ended
    if console.as_json:
        console.emit(ended)
    elif isinstance(ended, PlannedJob):
        console.planned(ended)
    else:
        console.data(ended.job_id)
    raise typer.Exit
