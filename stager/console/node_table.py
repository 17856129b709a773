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


def node_table(nodes: Sequence[NodeCheck]) -> Table:
    """Return a row for each node of a result of ``verify``, without columns that no node fills."""
    packages = _packages(nodes)
    has_problems = any(node.problems for node in nodes)
    table = Table(box=None, pad_edge=False, header_style="bold")
    titles = (SHORT.get(name, visible(name)) for name in packages)
    for title in ("node", "state", "python", *titles, "interface", "address"):
        table.add_column(Text(title), no_wrap=True)
    table.add_column("seconds", justify="right")
    if has_problems:
        table.add_column("problem", ratio=1)
    for node in nodes:
        problem = [_cell("; ".join(node.problems))] if has_problems else []
        table.add_row(*_cells(node, packages), *problem)
    return table


def _packages(nodes: Sequence[NodeCheck]) -> list[str]:
    """Return the packages that get a column."""
    present = dict.fromkeys(name for node in nodes for name in node.packages)
    first = [name for name in REPORTED if name in present]
    others = [name for name in present if name not in REPORTED]
    return [*first, *others][:MAX_PACKAGES]


def _cells(node: NodeCheck, packages: list[str]) -> list[Text]:
    """Return the row of a node, but for its problems."""
    return [
        _cell(node.node),
        Text("OK", style="green") if node.ok else Text("FAILED", style="bold red"),
        _cell(node.python),
        *(_cell(node.packages.get(name, "")) for name in packages),
        _cell(node.interface),
        _cell(node.address),
        Text("" if node.seconds is None else f"{node.seconds:.1f}"),
    ]


def _cell(value: object) -> Text:
    """Return a value as it may be shown."""
    return Text(visible(str(value)))
