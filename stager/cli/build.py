"""``stager build``: make the bundle from the project's settings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .grouped import grouped
from .options import Offline, Resolver, Talk, resolver_name
from .program import app, boundary


@app.command()
@grouped
def build(
    *,
    resolver: Resolver = "auto",
    offline: Offline = False,
    locked: Annotated[
        bool, typer.Option("--locked", help="Fail if the lock is not current.")
    ] = False,
    no_prove: Annotated[
        bool, typer.Option("--no-prove", help="Skip the proof that nothing is missing.")
    ] = False,
    jobs: Annotated[
        int | None,
        typer.Option("--jobs", metavar="N", min=1, help="Layers made at a time; default: CPUs."),
    ] = None,
    talk: Talk,
) -> None:
    """Make the bundle, and prove that nothing is missing in it."""
    from .. import pipeline
    from ..building.build import BuildOptions
    from ..config.load import load

    console = talk.reports()
    with boundary(console):
        options = BuildOptions(
            resolver=resolver_name(resolver),
            offline=offline,
            locked=locked,
            prove=not no_prove,
            jobs=jobs,
        )
        try:
            result = pipeline.build(load(Path.cwd()), options, console)
        except KeyboardInterrupt:
            console.say("what was fetched and made is kept: the next build goes on from there")
            raise
        if talk.json:
            console.emit(result)
        else:
            console.built(result)
