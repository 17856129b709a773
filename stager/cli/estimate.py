"""``stager estimate``: predict how long staging takes, and whether it pays."""

from __future__ import annotations

from typing import Annotated

import typer

from .grouped import grouped
from .options import Bundle, NprocPerNode, Talk, node_counts
from .program import app, boundary


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
    bundle: Bundle = None,
    talk: Talk,
) -> None:
    """Predict how long staging takes, and whether it pays."""
    from ..building.current_bundle import offline_root
    from ..core.store import Store
    from ..forecast import history
    from ..forecast.estimate import MOST_NODES, setting_of
    from ..forecast.estimate import estimate as make_estimate
    from ..jobs.job import JobOptions, settle
    from ..jobs.prepare import named_bundle, project

    counts = node_counts(nodes, MOST_NODES)
    console = talk.reports()
    with boundary(console):
        config = settle(project(bundle), JobOptions(nproc_per_node=nproc_per_node))
        path, manifest = named_bundle(config, bundle)
        basis = history.known(Store(offline_root(config)))
        setting = setting_of(config, path, manifest, basis)
        result = make_estimate(setting, counts or (config.cluster.nodes[1],))
        if talk.json:
            console.emit(result)
        else:
            console.estimated(result)
