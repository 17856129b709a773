"""``stager init``: write a commented ``stager.toml``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .options import Json, Quiet
from .program import app, boundary, make_console


@app.command()
def init(
    source: Annotated[
        Path | None,
        typer.Option("--from", help="A requirements file to start from, or its folder."),
    ] = None,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Write a commented stager.toml here."""
    from ..config.template import InitResult, create

    console = make_console(quiet=quiet, as_json=json)
    with boundary(console):
        path = create(Path.cwd(), source)
        if json:
            console.emit(InitResult(path=path))
        console.say(f"wrote {path.name}; look at it, then: stager build")
