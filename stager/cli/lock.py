"""``stager lock``: pin the requirements in ``pylock.toml``."""

from __future__ import annotations

from .grouped import grouped
from .options.lock import ResolveFlags, Script, settings_for
from .options.output import Talk
from .program import app, boundary


@app.command()
@grouped
def lock(
    *,
    script: Script = None,
    resolving: ResolveFlags,
    talk: Talk,
) -> None:
    """Pin the requirements: pylock.toml, exact files and digests."""
    from .. import pipeline
    from ..building.build import BuildOptions

    console = talk.reports()
    with boundary(console):
        options = resolving.options(BuildOptions())
        written = pipeline.lock(settings_for(script), options, console)
        console.stop()
        if talk.json:
            console.emit(written)
        console.locked(written)
