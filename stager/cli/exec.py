"""``stager exec``: run any command in the environment, on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from .application import app, boundary, get_settings_place, make_reports
from .options import BundleChoice


@app.command(name="exec", context_settings={"allow_interspersed_args": False})
def exec_(
    *,
    command: Annotated[
        list[str], typer.Argument(metavar="-- COMMAND...", help="A program and its arguments.")
    ],
    chosen: BundleChoice,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="Print only errors.")] = False,
) -> None:
    """Run any command in the environment, on this machine."""
    from ..jobs.driver import execute
    from ..jobs.preparation import get_current_bundle, load_project
    from ..pack.bundle_file import ChosenBundle

    console = make_reports(quiet=quiet)
    with boundary(console):
        config = load_project(chosen.bundle, chosen.bundle_id, get_settings_place(), command)
        path, manifest = get_current_bundle(config, chosen.bundle, console, chosen.bundle_id)
        execute(config, ChosenBundle(path=path, id=manifest.id), command)
