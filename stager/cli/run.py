"""``stager run``: verify, then launch the command once for each rank."""

from __future__ import annotations

from dataclasses import replace

import typer

from bundle.protocol.words import Action

from .grouped import grouped
from .job import remember_refusal, run_job
from .options import BatchFlags, Command, LaunchFlags, PlaceFlags, SlurmFlags, Talk, job_options
from .program import app, boundary


@app.command(context_settings={"allow_interspersed_args": False})
@grouped
def run(
    *,
    command: Command = None,
    place: PlaceFlags,
    slurm: SlurmFlags,
    launch: LaunchFlags,
    batch: BatchFlags,
    talk: Talk,
) -> None:
    """Verify, then launch COMMAND (default: project.command)."""
    from ..jobs.result import run_report

    batch.check()
    options = replace(
        job_options(slurm, launch, place.allocation),
        dry_run=batch.dry_run,
        command=tuple(command or ()),
    )
    console = talk.console()
    with boundary(console):
        with remember_refusal(options, "run"):
            outcome = run_job(console, place, options, Action.RUN, batch)
        if talk.json:
            console.emit(run_report(outcome))
        raise typer.Exit(console.ran(outcome))
