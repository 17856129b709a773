"""``stager verify``: put the bundle on every node and check it there."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from bundle.protocol.enumerations import Action

from .grouped import grouped
from .job import carry_out
from .options.batch import BatchFlags
from .options.bundle import PlaceFlags
from .options.job import job_options
from .options.launch import LaunchFlags
from .options.output import Talk
from .options.request import RequestFlags
from .program import app, boundary


@app.command()
@grouped
def verify(
    *,
    place: PlaceFlags,
    slurm: RequestFlags,
    launch: LaunchFlags,
    deep: Annotated[
        bool, typer.Option("--deep", help="Read every file, try the network between all nodes.")
    ] = False,
    batch: BatchFlags,
    talk: Talk,
) -> None:
    """Put the bundle on every node and check it; launch nothing."""
    from ..jobs.outcome import verify_result

    options = job_options(slurm, launch, place, batch, verbose=talk.verbose)
    console = talk.console()
    with boundary(console):
        carry_out(
            console,
            Action.VERIFY,
            replace(options, deep=deep),
            result_of=verify_result,
            render=console.verified,
        )
