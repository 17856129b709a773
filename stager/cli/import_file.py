"""``stager import``: take a bundle out of a carried file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .grouped import grouped
from .options.bundle import BundleId, bundle_id
from .options.output import Talk
from .options.values import path_option
from .program import app, boundary
from .settings_place import settings_place


@app.command("import")
@grouped
def import_file(
    *,
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", parser=path_option, help="What `stager export` wrote."),
    ],
    id: BundleId = None,
    project: Annotated[
        Path | None,
        typer.Option(
            "--project",
            metavar="DIR",
            parser=path_option,
            help="Write the project's code to a new directory, to edit it and build it there.",
        ),
    ] = None,
    for_builds: Annotated[
        bool,
        typer.Option(
            "--for-builds",
            help="Let builds here take its packages, as --project does; needs trust in its maker.",
        ),
    ] = False,
    talk: Talk,
) -> None:
    """Add the bundle in a carried file to the offline root."""
    from ..carrying.carry import ImportOptions, import_bundle
    from ..jobs import preparation

    console = talk.reports()
    with boundary(console):
        config = preparation.load_project(file, "", settings_place())
        options = ImportOptions(asked=bundle_id(id, "--id"), project=project, for_builds=for_builds)
        result = import_bundle(config, file, options, console)
        console.stop()
        if talk.json:
            console.emit(result)
        console.imported(result)
