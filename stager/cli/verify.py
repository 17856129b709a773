"""``stager verify``: put the bundle on every node and check it there."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from bundle.protocol.enumerations import Action

from .grouped import grouped
from .job import job_outcome
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
    from ..jobs.summary import verify_result

    options = job_options(slurm, launch, place, batch, verbose=talk.verbose)
    console = talk.console()
    with boundary(console):
        outcome = job_outcome(console, Action.VERIFY, replace(options, deep=deep))
        if talk.json:
            console.emit(verify_result(outcome))
        raise typer.Exit(console.verified(outcome))
