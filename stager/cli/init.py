"""``stager init``: write a commented ``stager.toml``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .options.output import Json, Quiet
from .program import app, boundary, make_reports
from .settings_place import settings_place


@app.command()
def init(
    source: Annotated[
        Path | None,
        typer.Option(
            "--from", metavar="PATH", help="A requirements file to start from, or its folder."
        ),
    ] = None,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Write a commented stager.toml here."""
    from ..config.template import GUESSES, create

    console = make_reports(quiet=quiet, as_json=json)
    with boundary(console):
        place = settings_place()
        made = create(place if place.is_dir() else Path.cwd(), source)
        if json:
            console.emit(made)
        if made.requirements:
            named = ", ".join(made.requirements)
            console.say(f"wrote {made.path.name} for {named}; look at it, then: stager build")
        else:
            console.say(
                f"wrote {made.path.name} without requirements: there is no {', '.join(GUESSES)} "
                "here. Fill in environment.requirements, then: stager build"
            )
