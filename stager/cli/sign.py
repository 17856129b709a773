"""``stager sign``: sign a bundle with an SSH key."""

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


@app.command()
@grouped
def sign(
    *,
    bundle: Annotated[
        Path | None,
        typer.Argument(
            metavar="[BUNDLE]",
            parser=path_option,
            help="Default: the project's newest, made again if need be.",
        ),
    ] = None,
    id: BundleId = None,
    key: Annotated[
        Path,
        typer.Option(
            "--key",
            metavar="KEY",
            parser=path_option,
            help="The SSH key: a private one, the .pub of one in your ssh-agent, or a -cert.pub.",
        ),
    ],
    talk: Talk,
) -> None:
    """Sign a bundle with an SSH key."""
    from ..building.current_bundle import current_bundle
    from ..jobs.preparation import chosen_bundle, load_project
    from ..pack.bundle_file import ChosenBundle
    from ..trust import sign as make_signature

    asked = bundle_id(id, "--id")
    console = talk.reports()
    with boundary(console):
        if bundle is not None:
            chosen = ChosenBundle(path=bundle, id=asked)
        elif asked:
            chosen = chosen_bundle(load_project(None, asked, settings_place()), None, asked)
        else:  # made again if the project has changed: it is what the next job takes
            chosen = current_bundle(load_project(None, start=settings_place()), console)
        result = make_signature(chosen, key, console.note)
        if talk.json:
            console.emit(result)
        console.signed(result)
