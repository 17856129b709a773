"""The nodes that failed lately, as lines and as a table."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import TYPE_CHECKING

from ..core.errors import in_one_line

if TYPE_CHECKING:
    from rich.table import Table

    from ..incidents.node_history import NodesResult

TITLES = ("node", "times", "last", "job", "failure")
_WIDTHS = (14, 5, 10, 9)
_LINE = 80


def lines(result: NodesResult) -> list[str]:
    """Return the rows for a file or a pipe; they fit 80 columns unless names are very long."""
    return [_aligned(TITLES), *(_aligned(cells) for cells in _rows(result))]


def _aligned(cells: tuple[str, ...]) -> str:
    node, times, last, job, failure = cells
    widths = iter(_WIDTHS)
    begin = (
        f"{node:{next(widths)}} {times:>{next(widths)}}  {last:{next(widths)}}  "
        f"{job:{next(widths)}} "
    )
    room = max(_LINE - len(begin), 20)
    return begin + (failure if len(failure) <= room else f"{failure[: room - 3]}...")


def table(result: NodesResult) -> Table:
    """Return the same rows for a terminal, with causes as a whole."""
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=None, pad_edge=False, header_style="bold")
    drawn.add_column(TITLES[0], overflow="fold")  # a name is never shortened
    for title in TITLES[1:-1]:
        drawn.add_column(title, no_wrap=True, justify="right" if title == "times" else "left")
    drawn.add_column(TITLES[-1], ratio=1)
    before = ""
    for node, *cells in _rows(result):
        drawn.add_row(*map(Text, ("" if node == before else node, *cells)))
        before = node
    return drawn


def _rows(result: NodesResult) -> Iterator[tuple[str, ...]]:
    several = len({node.cluster for node in result.nodes}) > 1
    for node in result.nodes:
        name = f"{node.node} ({node.cluster})" if several and node.cluster else node.node
        for fault in node.faults:
            last = datetime.fromtimestamp(fault.last).strftime("%Y-%m-%d")
            failure = in_one_line(f"{fault.fault.words}: {fault.cause}")
            yield name, str(fault.times), last, fault.job_id, failure
