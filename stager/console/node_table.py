"""The nodes of a verification as a table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich.table import Table
from rich.text import Text

from ..core.printable import visible

SHORT = {"transformers": "tfm"}
"""Packages whose names the one-line form shortens as well."""
REPORTED = ("torch", "transformers", "datasets", "numpy")
"""Packages that come first; a project without them has its own."""
MOST = 5
"""Columns for packages: more do not fit on a screen."""


def node_table(nodes: Iterable[Mapping[str, Any]]) -> Table:
    """One row a node, from the report of ``verify``; columns that no node fills are left out."""
    nodes = list(nodes)
    names = dict.fromkeys([*REPORTED, *(name for node in nodes for name in node["packages"])])
    known = [name for name in names if any(name in node["packages"] for node in nodes)][:MOST]
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("node", no_wrap=True)
    table.add_column("state", no_wrap=True)
    for title in (
        "python",
        *(SHORT.get(name, visible(name)) for name in known),
        "interface",
        "address",
    ):
        table.add_column(Text(title), no_wrap=True)
    table.add_column("seconds", justify="right")
    if any(node["problems"] for node in nodes):
        table.add_column("problem", ratio=1)
    for node in nodes:
        seconds = node["seconds"]
        table.add_row(
            Text(visible(str(node["node"]))),
            Text("OK", style="green") if node["ok"] else Text("FAILED", style="bold red"),
            Text(visible(str(node["python"]))),
            *(Text(visible(str(node["packages"].get(name, "")))) for name in known),
            Text(visible(str(node["interface"]))),
            Text(visible(str(node["address"]))),
            "" if seconds is None else f"{seconds:.1f}",
            *(
                [Text(visible("; ".join(node["problems"])))]
                if len(table.columns) > len(known) + 6
                else []
            ),
        )
    return table
