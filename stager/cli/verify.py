"""``stager verify``: put the bundle on every node and check it there."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from bundle.protocol.words import Action

from .grouped import grouped
from .job import remember_refusal, run_job
from .options import BatchFlags, LaunchFlags, PlaceFlags, SlurmFlags, Talk, job_options
from .program import app, boundary


@app.command()
@grouped
def verify(
    *,
    place: PlaceFlags,
    slurm: SlurmFlags,
    launch: LaunchFlags,
    deep: Annotated[
        bool, typer.Option("--deep", help="Read every file, try the network between all nodes.")
    ] = False,
    batch: BatchFlags,
    talk: Talk,
) -> None:
    """Put the bundle on every node and check it; launch nothing."""
    from ..jobs.result import verify_report

    batch.check()
    options = replace(
        job_options(slurm, launch, place.allocation), dry_run=batch.dry_run, deep=deep
    )
    console = talk.console()
    with boundary(console):
        with remember_refusal(options, "verify"):
            outcome = run_job(console, place, options, Action.VERIFY, batch)
        if talk.json:
            console.emit(verify_report(outcome))
        raise typer.Exit(console.verified(outcome))
