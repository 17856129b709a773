"""``stager inspect``: show what is in a bundle."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .options.output import Json
from .program import app, boundary, make_reports
from .settings_place import settings_place


@app.command()
def inspect(
    bundle: Annotated[
        Path | None, typer.Argument(metavar="[BUNDLE]", help="Default: the project's newest.")
    ] = None,
    files: Annotated[bool, typer.Option("--files", help="List every file.")] = False,
    json: Json = False,
) -> None:
    """Show what is in a bundle."""
    from ..building.current_bundle import newest_bundle
    from ..config.load import load
    from ..pack.existing import ChosenBundle
    from ..pack.inspect import inspect as inspect_bundle
    from ..pack.inspect import inspect_files

    console = make_reports(as_json=json)
    with boundary(console):
        chosen = ChosenBundle(path=bundle) if bundle else newest_bundle(load(settings_place()))
        look = inspect_files if files else inspect_bundle
        result = look(chosen.path, asked=chosen.id)
        if json:
            console.emit(result)
        else:
            console.inspected(result)
