"""``verify``, ``run``, ``script`` and ``exec``."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from bundle.protocol.enumerations import Action

from ..config.job_settings import BATCH, BUNDLE, LAUNCH, SLURM, JobOptions
from ..core.errors import EXIT_JOB, CommandFailure, JobError
from .application import app, boundary, get_settings_place, option
from .options import BundleChoice, Command, JobFlags, JobTalk, make_reports

if TYPE_CHECKING:
    from ..console.job_result import Console
    from ..console.output import Output
    from ..forecast import PlannedJob
    from ..jobs.outcome import Outcome, SubmittedJob


_TALK = frozenset({"--quiet", "--verbose", "--json", "--help"})
"""Options that many programs have, too, and that change nothing of a job."""


def _warn_about_misplaced_options(
    context: typer.Context, command: Sequence[str], console: Output
) -> None:
    """Warn of options of ``stager`` behind a script, where no ``--`` says that they are its own."""
    is_marked = sys.argv[-len(command) - 1 :][:1] == ["--"]
    if is_marked or not command or not command[0].endswith(".py"):
        return
    own = _list_options(context) - _TALK
    named = [word.partition("=")[0] for word in command[1:] if word.startswith("--")]
    words = [word for word in dict.fromkeys(named) if word in own]
    if words:
        console.warn(
            f"{command[0]} gets {', '.join(words)}, and stager does not: words behind the script "
            f"are the program's. Options of stager stand before it; `-- {command[0]} ...` passes "
            "the same words on without this warning"
        )


def _list_options(context: typer.Context) -> set[str]:
    return {word for param in context.command.params for word in param.opts}


def run_command(
    console: Console,
    action: Action,
    options: JobOptions,
    result_of: Callable[[Outcome], object],
    render: Callable[[Outcome], int],
) -> NoReturn:
    """Do a job, show its result, start the on-failure command if it failed, and exit."""
    from .. import pipeline
    from ..config.load import find_project_file
    from ..jobs.outcome import Outcome
    from ..jobs.preparation import load_project
    from ..logs.job_files import choose_log_dir
    from ..logs.job_record import note_refused_command

    place, hook = get_settings_place(), options.on_failure
    log_dir = choose_log_dir(options.log_dir)
    try:
        # `stager diagnose` shows a command that fails before its job begins.
        with note_refused_command(log_dir, action.value, find_project_file(place)):
            config = load_project(options.bundle, options.bundle_id, place, options.command)
            hook = hook or config.launch.on_failure
            ended = pipeline.run_job(config, options, action, console)
    except JobError as exc:
        if not hook:
            raise
        console.error(exc)
        _start_hook(console, hook, CommandFailure.from_error(exc))
        raise typer.Exit(exc.exit_code) from None
    if not isinstance(ended, Outcome):
        _show_planned(console, ended, hook)
        raise typer.Exit
    if console.as_json:
        console.emit(result_of(ended))
    code = render(ended)
    if code == EXIT_JOB and hook and not options.dry_run:
        _start_hook(console, hook, result_of(ended))
    raise typer.Exit(code)


def _start_hook(console: Console, hook: Sequence[str], result: object) -> None:
    from ..jobs.driver import run_hook

    console.stop()
    run_hook(hook, result, console.warn)


def _show_planned(console: Console, ended: SubmittedJob | PlannedJob, hook: Sequence[str]) -> None:
    from ..forecast import PlannedJob

    if isinstance(ended, PlannedJob):
        console.show(ended, console.show_plan)
        return
    console.show(ended, lambda job: console.data(job.job_id))
    if hook:
        console.warn("--on-failure needs --wait: a submitted job is not watched")


@app.command()
def verify(
    *,
    options: Annotated[JobOptions, JobFlags(BUNDLE, SLURM, LAUNCH, BATCH, "deep")],
    console: JobTalk,
) -> None:
    """Put the bundle on every node and check it; launch nothing."""
    from ..jobs.outcome import make_verify_result

    options = replace(options, show_all=console.verbose)
    run_command(console, Action.VERIFY, options, make_verify_result, console.show_verify)


@app.command(context_settings={"allow_interspersed_args": False})
def run(
    *,
    context: typer.Context,
    command: Command = None,
    options: Annotated[JobOptions, JobFlags(BUNDLE, SLURM, LAUNCH, BATCH)],
    console: JobTalk,
) -> None:
    """Verify, then launch COMMAND (default: project.command)."""
    from ..jobs.outcome import make_run_result

    options = replace(options, command=tuple(command or ()), show_all=console.verbose)
    _warn_about_misplaced_options(context, options.command, console)
    run_command(console, Action.RUN, options, make_run_result, console.show_run)


_script_option = partial(option, rich_help_panel="The script")


@app.command(context_settings={"allow_interspersed_args": False})
def script(
    *,
    context: typer.Context,
    command: Command = None,
    options: Annotated[JobOptions, JobFlags("bundle", "bundle_id", SLURM, LAUNCH)],
    requeue: Annotated[
        bool,
        _script_option("--requeue", "Requeue at the time limit; resume from a checkpoint."),
    ] = False,
    embed: Annotated[
        bool | None,
        _script_option(
            "--embed/--no-embed",
            "Put the node program into the script (460 kB), or take it from the bundle, which"
            " nodes must see. Default: from a bundle on a shared file system.",
            show_default=False,
        ),
    ] = None,
    console: JobTalk,
) -> None:
    """Print the sbatch script of a run, or of a torchrun command."""
    from ..building.current_bundle import offline_root
    from ..core.store import Store
    from ..incidents.bad_nodes import exclude_bad_nodes, find_failed_nodes
    from ..jobs.batch import make_submission
    from ..jobs.outcome import ScriptResult
    from ..jobs.preparation import get_current_bundle, load_project, prepare
    from ..pack.bundle_file import mark

    options = replace(options, allocation="slurm", command=tuple(command or ()))
    _warn_about_misplaced_options(context, options.command, console)
    config = load_project(options.bundle, options.bundle_id, get_settings_place(), options.command)
    bundle = get_current_bundle(config, options.bundle, console, options.bundle_id)
    prepared = prepare(config, options, bundle, action=Action.RUN, source="sbatch")
    store = Store(offline_root(config))
    if not mark(store, prepared.bundle):
        console.warn(f"nothing keeps {prepared.bundle} for this script: it cannot be marked")
    prepared = exclude_bad_nodes(prepared, find_failed_nodes(store), console)
    for note in prepared.notes:
        console.note(note)
    text = make_submission(prepared, os.environ, requeue=requeue, embed=embed).script
    console.show(ScriptResult(script=text), lambda result: console.text(result.script))


@app.command(name="exec", context_settings={"allow_interspersed_args": False})
def exec_(
    *,
    command: Annotated[
        list[str], typer.Argument(metavar="-- COMMAND...", help="A program and its arguments.")
    ],
    chosen: BundleChoice,
    quiet: Annotated[bool, option("-q --quiet", "Print only errors.")] = False,
) -> None:
    """Run any command in the environment, on this machine."""
    from ..jobs.driver import execute
    from ..jobs.preparation import get_current_bundle, load_project
    from ..pack.bundle_file import ChosenBundle

    console = make_reports(quiet=quiet)
    with boundary(console):
        config = load_project(chosen.bundle, chosen.bundle_id, get_settings_place(), command)
        path, manifest = get_current_bundle(config, chosen.bundle, console, chosen.bundle_id)
        execute(config, ChosenBundle(path=path, id=manifest.id), command)
