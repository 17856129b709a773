"""``stager mirror``: a folder of wheels with an index, for pip and uv inside an air gap."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .grouped import grouped
from .options.lock import Offline
from .options.output import Talk
from .options.values import path_option
from .program import app, boundary
from .settings_place import settings_place

if TYPE_CHECKING:
    from ..config.load import Config


@app.command()
@grouped
def mirror(
    *,
    folder: Annotated[
        Path,
        typer.Argument(metavar="DIR", parser=path_option, help="The folder; made if need be."),
    ],
    requirements: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[REQUIREMENT ...]",
            help="What to add, with all that it needs: packages or requirement files; "
            "default: the project's lock.",
        ),
    ] = None,
    offline: Offline = False,
    talk: Talk,
) -> None:
    """Keep a folder of wheels with an index for pip and uv."""
    from ..core.home import expanded
    from ..mirror.mirror import mirror_wheels

    console = talk.reports()
    with boundary(console):
        config = _settings(alone=bool(requirements))
        root = expanded(folder).absolute()
        result = mirror_wheels(config, root, requirements or (), console, offline=offline)
        console.stop()
        if talk.json:
            console.emit(result)
        console.mirrored(result)


def _settings(*, alone: bool) -> Config:
    """Return the project's settings; the default ones if there is none, and none is needed."""
    from ..config.load import find, load
    from ..config.template import default

    place = settings_place()
    return default(place) if alone and find(place) is None else load(place)
