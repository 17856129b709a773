"""``stager script``: print the batch script, to read, change and submit by hand."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Annotated

import typer

from bundle.protocol.enumerations import Action

from ..config.job_settings import LAUNCH, SLURM, JobOptions
from .application import app, get_settings_place
from .job_commands import warn_about_misplaced_options
from .options import Command, JobFlags, JobTalk

_PANEL = "The script"


@app.command(context_settings={"allow_interspersed_args": False})
def script(
    *,
    context: typer.Context,
    command: Command = None,
    options: Annotated[JobOptions, JobFlags("bundle", "bundle_id", SLURM, LAUNCH)],
    requeue: Annotated[
        bool,
        typer.Option(
            "--requeue",
            help="Requeue at the time limit; resume from a checkpoint.",
            rich_help_panel=_PANEL,
        ),
    ] = False,
    embed: Annotated[
        bool | None,
        typer.Option(
            "--embed/--no-embed",
            show_default=False,
            help="Put the node program into the script (460 kB), or take it from the bundle, which"
            " nodes must see. Default: from a bundle on a shared file system.",
            rich_help_panel=_PANEL,
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
    warn_about_misplaced_options(context, options.command, console)
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
