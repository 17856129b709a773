"""``stager config``: show every setting, its value, and where that came from."""

from __future__ import annotations

import os

from .grouped import grouped
from .options.output import Talk
from .program import app, boundary
from .settings_place import settings_place


@app.command()
@grouped
def config(*, talk: Talk) -> None:
    """Show every setting, its value, and where that came from."""
    from ..building.current_bundle import offline_root
    from ..config.load import find, listed, load
    from ..config.template import default

    console = talk.reports()
    with boundary(console):
        place = settings_place()
        found = find(place)
        config = load(place) if found else default(place)
        result = listed(config, os.environ, offline_root(config))
        if talk.json:
            console.emit(result)
            return
        if found is None:
            console.note("there is no stager.toml here: these are the values without one")
        console.configured(result)
