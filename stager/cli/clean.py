"""``stager clean``: remove what nobody uses any more from the nodes and the offline root."""

from __future__ import annotations

import typer

from .grouped import grouped
from .options import CleanFlags, LaunchFlags, LogDir, PlaceFlags, SlurmFlags, Talk, job_options
from .program import app, boundary


@app.command()
@grouped
def clean(
    *,
    what: CleanFlags,
    place: PlaceFlags,
    slurm: SlurmFlags,
    log_dir: LogDir = None,
    talk: Talk,
) -> None:
    """Remove environments, bundles and layers that nobody uses."""
    from .. import pipeline
    from ..jobs.prepare import project

    options = what.options(job_options(slurm, LaunchFlags(log_dir=log_dir), place))
    console = talk.console()
    with boundary(console):
        config = project(place.bundle, place.asked)
        result = pipeline.clean(config, options, console)
        code = console.nodes_cleaned(result)
        if talk.json:
            console.emit(result)
        else:
            console.cleaned(result)
        raise typer.Exit(code)
