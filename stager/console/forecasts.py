"""What staging is going to take, as lines and as a table: a row for each case of some nodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ..core.printable import visible

if TYPE_CHECKING:
    from rich.table import Table

PHASES = ("preflight", "send", "unpack", "stage", "probe", "launch", "total")
"""Sending and unpacking overlap: both are in ``stage``."""
_WIDTHS = (10, 7, 7, 7, 7, 7, 8)
_CASE = 18


def phases(seconds: Mapping[str, float]) -> str:
    """The seconds of each phase in a line."""
    return ", ".join(f"{name} {seconds[name]:.1f} s" for name in PHASES)


def lines(report: Mapping[str, Any]) -> list[str]:
    """The rows for a file or a pipe; they fit 80 columns."""
    titles = "".join(f"{name:>{width}}" for name, width in zip(PHASES, _WIDTHS, strict=True))
    said = [f"{'nodes':>6} {'case':{_CASE}}{titles}"]
    for nodes, case, cells in _rows(report):
        shown = "".join(f"{cell:>{width}}" for cell, width in zip(cells, _WIDTHS, strict=True))
        said.append(f"{nodes:>6} {case:{_CASE}.{_CASE}}{shown}")
    return said


def forecast_table(report: Mapping[str, Any]) -> Table:
    """The same rows for a terminal; what is weighed against staging stands out."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("nodes", justify="right", no_wrap=True)
    table.add_column("case", no_wrap=True)
    for name in PHASES:
        table.add_column(name, justify="right", no_wrap=True)
    before = None
    for nodes, case, cells in _rows(report):
        style = (
            "bold" if case == "nothing there yet" else "yellow" if case.startswith("run") else ""
        )
        named = "" if nodes == before else str(nodes)
        table.add_row(named, Text(visible(case)), *(Text(cell, style=style) for cell in cells))
        before = nodes
    return table


def _rows(report: Mapping[str, Any]) -> Iterator[tuple[int, str, list[str]]]:
    """Nodes, case and cells."""
    named = {
        "cold": "nothing there yet",
        "unchanged": "nothing changed",
        "one_changed": f"{report['changed']} changed",
    }
    for one in report["forecasts"]:
        for key, case in named.items():
            if one[key] is not None:
                yield one["nodes"], case, [_seconds(one[key][name]) for name in PHASES]
        for name, seconds in one["shared"].items():
            blank = [""] * (len(PHASES) - 1)
            yield one["nodes"], f"run from {_NAMES[name]}", [*blank, _seconds(seconds)]


_NAMES = {"lustre": "Lustre", "nfs": "NFS"}


def _seconds(value: float) -> str:
    return f"{value:.1f}" if value < 1000 else f"{value:.0f}"
