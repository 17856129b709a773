"""The nodes of a verification, as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from ..core.errors import visible

if TYPE_CHECKING:
    from ..jobs.outcome import NodeCheck

SHORT = {"transformers": "tfm"}
"""Names of packages that the one-line form shortens as well."""
REPORTED = ("torch", "transformers", "datasets", "numpy")
"""Packages that come first; a project without them has its own."""
MAX_PACKAGES = 5
"""Columns for packages: more do not fit on a screen."""
_KEPT_COLUMNS = 2
"""Columns that are shown whole on any terminal: node and state."""
_PROBLEM_WIDTH = 40
"""Characters that are left for a column of problems."""


def node_table(nodes: Sequence[NodeCheck], width: int) -> Table:
    """Return a row for each node of a result of ``verify``.

    Node and state are never shortened: where the columns do not fit, the last facts are left out.
    """
    has_problems = any(node.problems for node in nodes)
    titles, rows = _fitting(nodes, width - _PROBLEM_WIDTH if has_problems else width)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in titles:
        right = title == "seconds"
        table.add_column(Text(title), no_wrap=True, justify="right" if right else "left")
    if has_problems:
        table.add_column("problem", ratio=1)
    for node, row in zip(nodes, rows, strict=True):
        cells = list(map(Text, row))
        cells[1].stylize("green" if node.ok else "bold red")
        problem = [Text(visible("; ".join(node.problems)))] if has_problems else []
        table.add_row(*cells, *problem)
    return table


def _fitting(nodes: Sequence[NodeCheck], width: int) -> tuple[list[str], list[list[str]]]:
    packages = _packages(nodes)
    titles = [SHORT.get(name, visible(name)) for name in packages]
    titles = ["node", "state", "python", *titles, "interface", "address", "seconds"]
    rows = [_cells(node, packages) for node in nodes]
    count = len(titles)
    widths = [max(map(len, column)) + 2 for column in zip(titles, *rows, strict=True)]
    while count > _KEPT_COLUMNS and sum(widths[:count]) > width:
        count -= 1
    return titles[:count], [row[:count] for row in rows]


def _cells(node: NodeCheck, packages: Sequence[str]) -> list[str]:
    return [
        visible(node.node),
        "OK" if node.ok else "FAILED",
        visible(node.python or ""),
        *(visible(node.packages.get(name) or "") for name in packages),
        visible(node.interface or ""),
        visible(node.address or ""),
        "" if node.seconds is None else f"{node.seconds:.1f}",
    ]


def _packages(nodes: Sequence[NodeCheck]) -> list[str]:
    present = dict.fromkeys(name for node in nodes for name in node.packages)
    first = [name for name in REPORTED if name in present]
    others = [name for name in present if name not in REPORTED]
    return [*first, *others][:MAX_PACKAGES]
