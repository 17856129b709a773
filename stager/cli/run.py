"""``stager run``: verify, then launch the command once for each rank."""

from __future__ import annotations

from dataclasses import replace

import typer

from bundle.protocol.enumerations import Action

from .command_words import warn_of_options_behind
from .grouped import grouped
from .job import carry_out
from .options.batch import BatchFlags
from .options.bundle import PlaceFlags
from .options.job import job_options
from .options.launch import Command, LaunchFlags
from .options.output import Talk
from .options.request import RequestFlags
from .program import app, boundary


@app.command(context_settings={"allow_interspersed_args": False})
@grouped
def run(
    *,
    context: typer.Context,
    command: Command = None,
    place: PlaceFlags,
    slurm: RequestFlags,
    launch: LaunchFlags,
    batch: BatchFlags,
    talk: Talk,
) -> None:
    """Verify, then launch COMMAND (default: project.command)."""
    from ..jobs.outcome import run_result

    options = job_options(slurm, launch, place, batch, verbose=talk.verbose)
    options = replace(options, command=tuple(command or ()))
    console = talk.console()
    with boundary(console):
        warn_of_options_behind(context, options.command, console)
        carry_out(
            console,
            Action.RUN,
            options,
            result_of=run_result,
            render=console.ran,
        )
