"""The part that ``verify`` and ``run`` share: a job from its options to its exit code."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

import typer

from bundle.protocol.enumerations import Action

from ..core.errors import EXIT_JOB, CommandFailure, JobError
from .settings_place import settings_place

if TYPE_CHECKING:
    from ..config.load import Config
    from ..console.job_result import Console
    from ..forecast import PlannedJob
    from ..jobs.job_description import JobOptions
    from ..jobs.outcome import Outcome, SubmittedJob


def carry_out(
    console: Console,
    action: Action,
    options: JobOptions,
    *,
    result_of: Callable[[Outcome], object],
    render: Callable[[Outcome], int],
) -> NoReturn:
    """Do a job, show what became of it, start the command that hears of a failure, and exit.

    ``diagnose`` hears of a command that fails before its job begins.
    """
    from ..config.load import project_file
    from ..jobs.outcome import Outcome
    from ..jobs.preparation import load_project
    from ..logs.job_files import default_folder
    from ..logs.job_record import remember_refused

    config: Config | None = None
    try:
        with remember_refused(
            default_folder(options.log_dir), action.value, project_file(settings_place())
        ):
            config = load_project(
                options.bundle, options.bundle_id, settings_place(), options.command
            )
            ended = _verb(action)(config, options, console)
    except JobError as exc:
        if config is None or not _hook(config, options):
            raise
        console.error(exc)
        _start_hook(console, config, options, CommandFailure.of(exc))
        raise typer.Exit(exc.exit_code) from None
    if not isinstance(ended, Outcome):
        _show_planned(console, config, options, ended)
        raise typer.Exit
    if console.as_json:
        console.emit(result_of(ended))
    code = render(ended)
    if code == EXIT_JOB and not options.dry_run:
        _start_hook(console, config, options, result_of(ended))
    raise typer.Exit(code)


def _verb(
    action: Action,
) -> Callable[[Config, JobOptions, Console], Outcome | SubmittedJob | PlannedJob]:
    from .. import pipeline

    return pipeline.run if action is Action.RUN else pipeline.verify


def _hook(config: Config, options: JobOptions) -> tuple[str, ...]:
    return options.on_failure or config.launch.on_failure


def _start_hook(console: Console, config: Config, options: JobOptions, result: object) -> None:
    from ..jobs.driver import run_hook

    hook = _hook(config, options)
    if hook:
        console.stop()
        run_hook(hook, result, console.warn)


def _show_planned(
    console: Console, config: Config, options: JobOptions, ended: SubmittedJob | PlannedJob
) -> None:
    from ..forecast import PlannedJob

    if console.as_json:
        console.emit(ended)
    elif isinstance(ended, PlannedJob):
        console.planned(ended)
    else:
        console.data(ended.job_id)
    if not isinstance(ended, PlannedJob) and _hook(config, options):
        console.warn(
            "the on-failure command is not started for this job: nobody waits for it; --wait does"
        )
