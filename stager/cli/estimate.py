"""``stager estimate``: predict how long staging takes, and whether it pays."""

from __future__ import annotations

from typing import Annotated

import typer

from .grouped import grouped
from .options.bundle import BundleFlags
from .options.job import ranks
from .options.launch import NprocPerNode
from .options.output import Talk
from .program import app, boundary
from .settings_place import settings_place


@app.command()
@app.command("plan", hidden=True)  # its former name, for scripts that use it
@grouped
def estimate(
    *,
    nodes: Annotated[
        list[str] | None,
        typer.Option("--nodes", metavar="N,...", help="Numbers of nodes, as in 2,16,64."),
    ] = None,
    nproc_per_node: NprocPerNode = None,
    chosen: BundleFlags,
    talk: Talk,
) -> None:
    """Predict how long staging takes, and whether it pays."""
    from .. import forecast
    from ..building.current_bundle import offline_root
    from ..core.store import Store
    from ..forecast import MOST_NODES, setting_of
    from ..forecast import estimate as make_estimate
    from ..jobs.job_description import JobOptions, settle
    from ..jobs.preparation import load_project, named_bundle

    counts, asked = node_counts(nodes, MOST_NODES), chosen.asked
    console = talk.reports()
    with boundary(console):
        options = JobOptions(nproc_per_node=ranks(nproc_per_node))
        config = settle(load_project(chosen.bundle, asked, settings_place()), options)
        path, manifest = named_bundle(config, chosen.bundle, asked)
        basis = forecast.find_known_rates(Store(offline_root(config)))
        setting = setting_of(config, path, manifest, basis)
        result = make_estimate(setting, counts or (config.cluster.nodes[1],))
        if talk.json:
            console.emit(result)
        else:
            console.estimated(result)


def node_counts(texts: list[str] | None, most: int) -> tuple[int, ...]:
    """Return numbers of nodes, each once, the fewest first; another value is a usage error."""
    words = [word.strip() for text in texts or () for word in text.split(",")]
    return tuple(sorted({_node_count(word, most) for word in words}))


def _node_count(word: str, most: int) -> int:
    count = int(word) if word.isascii() and word.isdigit() else 0
    if not 1 <= count <= most:
        raise typer.BadParameter(
            f"{word!r} cannot be used, allowed: 1 to {most}, as in 1,8,64",
            param_hint="--nodes",
        )
    return count
