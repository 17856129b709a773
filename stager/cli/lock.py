"""``stager lock``: pin the requirements in ``pylock.toml``."""

from __future__ import annotations

from pathlib import Path

from bundle.protocol.counts import counted

from .grouped import grouped
from .options import Offline, Resolver, Talk, resolver_name
from .program import app, boundary


@app.command()
@grouped
def lock(
    *,
    resolver: Resolver = "auto",
    offline: Offline = False,
    talk: Talk,
) -> None:
    """Pin the requirements: pylock.toml, exact files and digests."""
    from ..building.build import BuildOptions, lock_project
    from ..config.load import load

    console = talk.reports()
    with boundary(console):
        options = BuildOptions(resolver=resolver_name(resolver), offline=offline)
        written = lock_project(load(Path.cwd()), options, console)
        console.stop()
        if talk.json:
            console.emit(written)
        console.say(f"locked {counted(written.packages, 'package')} in {written.lock}", "good")
