"""``stager nodes``: list the nodes that failed lately, and forget those that were repaired."""

from __future__ import annotations

from time import time
from typing import Annotated

import typer

from .grouped import grouped
from .options.output import Talk
from .program import app, boundary
from .settings_place import settings_place

MOST_DAYS = 90


@app.command()
@grouped
def nodes(
    *,
    days: Annotated[
        int, typer.Option("--days", metavar="N", min=1, max=MOST_DAYS, help="How many days count.")
    ] = 7,
    forget: Annotated[
        list[str] | None,
        typer.Option("--forget", metavar="NODES", help="Forget the failures of NODES."),
    ] = None,
    talk: Talk,
) -> None:
    """List the nodes that failed lately, and why."""
    from ..building.current_bundle import offline_root
    from ..config.load import find, load
    from ..config.template import default
    from ..core.store import Store
    from ..incidents import incident_files
    from ..incidents.node_history import NodesResult, histories

    names = _node_names(forget)
    console = talk.reports()
    with boundary(console):
        here = settings_place()
        store = Store(offline_root(default(here) if find(here) is None else load(here)))
        now = time()
        incident_files.settle_notes(store, now)
        forgotten = incident_files.forget(store, names) if names else None
        incidents = incident_files.read(store, days, now)
        result = NodesResult(days=days, nodes=histories(incidents), forgotten=forgotten)
        if talk.json:
            console.emit(result)
        else:
            console.failed_nodes(result)


def _node_names(texts: list[str] | None) -> frozenset[str]:
    from bundle.protocol.problem import NodeError
    from bundle.system.hostlist import expand_hostlist

    names: set[str] = set()
    for text in texts or ():
        try:
            names.update(expand_hostlist(text))
        except NodeError as exc:
            raise typer.BadParameter(exc.problem.without_place, param_hint="--forget") from None
    return frozenset(names)
