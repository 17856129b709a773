"""An estimate of the time that staging takes, as lines and as a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from ..core.errors import visible

if TYPE_CHECKING:
    from rich.table import Table

    from ..forecast import Estimate

PHASES = ("preflight", "send", "unpack", "stage", "probe", "launch", "total")
"""Sending and unpacking overlap: both are in ``stage``."""
_WIDTHS = (10, 7, 7, 7, 7, 7, 8)
_CASE = 18
_COLD = "nothing there yet"
_FILE_SYSTEMS = {"lustre": "Lustre", "nfs": "NFS"}


def phases(seconds: Mapping[str, float]) -> str:
    """Return the seconds of each phase in a line."""
    return ", ".join(f"{name} {seconds[name]:.1f} s" for name in PHASES)


def lines(estimate: Estimate) -> list[str]:
    """Return the rows for a file or a pipe; they fit 80 columns."""
    rows = [f"{'nodes':>6} {'case':{_CASE}}{_aligned(PHASES)}"]
    for nodes, case, cells in _rows(estimate):
        rows.append(f"{nodes:>6} {case:{_CASE}.{_CASE}}{_aligned(cells)}")
    return rows


def _aligned(cells: Sequence[str]) -> str:
    return "".join(f"{cell:>{width}}" for cell, width in zip(cells, _WIDTHS, strict=True))


def forecast_table(estimate: Estimate) -> Table:
    """Return the same rows for a terminal; the alternatives to staging stand out."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("nodes", justify="right", no_wrap=True)
    table.add_column("case", no_wrap=True)
    for name in PHASES:
        table.add_column(name, justify="right", no_wrap=True)
    before = None
    for nodes, case, cells in _rows(estimate):
        style = _style(case)
        count = "" if nodes == before else str(nodes)
        table.add_row(count, Text(visible(case)), *(Text(cell, style=style) for cell in cells))
        before = nodes
    return table


def _style(case: str) -> str:
    if case == _COLD:
        return "bold"
    return "yellow" if case.startswith("run") else ""


def _rows(estimate: Estimate) -> Iterator[tuple[int, str, list[str]]]:
    """Yield the number of nodes, the case and the cells of each row."""
    for forecast in estimate.forecasts:
        cases = {
            _COLD: forecast.cold,
            "nothing changed": forecast.unchanged,
            f"{estimate.changed} changed": forecast.one_changed,
        }
        for case, phases in cases.items():
            if phases is not None:
                seconds = asdict(phases)
                yield forecast.nodes, case, [_seconds(seconds[name]) for name in PHASES]
        for name, total in forecast.shared.items():
            blank = [""] * (len(PHASES) - 1)
            yield forecast.nodes, f"run from {_FILE_SYSTEMS[name]}", [*blank, _seconds(total)]


def _seconds(value: float) -> str:
    return f"{value:.1f}" if value < 1000 else f"{value:,.0f}"
