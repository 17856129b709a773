"""The nodes of a verification, as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from ..core.printable import visible

if TYPE_CHECKING:
    from ..jobs.summary import NodeCheck

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

    Args:
        nodes: the nodes.
        width: characters of a line of the terminal.
    """
    packages = _packages(nodes)
    columns = [
        ("node", *(visible(node.node) for node in nodes)),
        ("state", *("OK" if node.ok else "FAILED" for node in nodes)),
        ("python", *(visible(node.python) for node in nodes)),
        *(
            (SHORT.get(name, visible(name)), *(visible(n.packages.get(name) or "") for n in nodes))
            for name in packages
        ),
        ("interface", *(visible(node.interface) for node in nodes)),
        ("address", *(visible(node.address) for node in nodes)),
        ("seconds", *("" if node.seconds is None else f"{node.seconds:.1f}" for node in nodes)),
    ]
    has_problems = any(node.problems for node in nodes)
    room = width - _PROBLEM_WIDTH if has_problems else width
    while len(columns) > _KEPT_COLUMNS and _width(columns) > room:
        columns.pop()
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title, *_ in columns:
        right = title == "seconds"
        table.add_column(Text(title), no_wrap=True, justify="right" if right else "left")
    if has_problems:
        table.add_column("problem", ratio=1)
    for number, node in enumerate(nodes, start=1):
        row = [Text(column[number]) for column in columns]
        row[1].stylize("green" if node.ok else "bold red")
        problem = [Text(visible("; ".join(node.problems)))] if has_problems else []
        table.add_row(*row, *problem)
    return table


def _width(columns: Sequence[Sequence[str]]) -> int:
    """Return the characters that columns need beside each other."""
    return sum(max(map(len, column)) + 2 for column in columns)


def _packages(nodes: Sequence[NodeCheck]) -> list[str]:
    """Return the packages that get a column."""
    present = dict.fromkeys(name for node in nodes for name in node.packages)
    first = [name for name in REPORTED if name in present]
    others = [name for name in present if name not in REPORTED]
    return [*first, *others][:MAX_PACKAGES]
