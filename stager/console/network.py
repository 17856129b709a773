"""The network between the nodes, as ``verify --deep`` measured it: lines and a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bundle.protocol.counts import counted, sized

from ..core.errors import visible

if TYPE_CHECKING:
    from rich.table import Table

    from bundle.protocol.events import AllReduceMeasured, NodePair

SHOWN = 20
"""Pairs that are shown; of more, the slowest. ``--json`` has all."""


def shown(measured: AllReduceMeasured) -> list[NodePair]:
    """Return the pairs to show: all in their order, or the slowest, the very slowest first."""
    pairs = list(measured.pairs)
    return pairs if len(pairs) <= SHOWN else sorted(pairs, key=_rate)[:SHOWN]


def lines(measured: AllReduceMeasured) -> list[str]:
    """Return a line for each pair, for a file or a pipe."""
    return [
        f"PAIR {pair.a} {pair.b} -> {pair.gb_per_s:.2f} GB/s {pair.latency_us:.0f} us"
        for pair in shown(measured)
    ]


def summary(measured: AllReduceMeasured) -> list[str]:
    """Return a line about all ranks together, and one about the slowest pair."""
    summary = [
        f"all-reduce of {sized(measured.bytes)} over {counted(measured.world_size, 'rank')} "
        f"({measured.backend}): {measured.seconds:.3f} s, {measured.gb_per_s:.2f} GB/s"
    ]
    pairs = measured.pairs
    if pairs:
        worst = min(pairs, key=_rate)
        count = counted(len(pairs), "pair")
        of = f", shown are {SHOWN}" if len(pairs) > SHOWN else ""
        summary.append(
            f"{count} of nodes{of}; slowest: {worst.a} and {worst.b}, {worst.gb_per_s:.2f} GB/s"
        )
    return summary


def pair_table(measured: AllReduceMeasured) -> Table:
    """Return the same pairs for a terminal; the slowest stands out."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("node", overflow="fold")  # a name is never shortened
    table.add_column("node", overflow="fold")
    table.add_column("GB/s", justify="right", no_wrap=True)
    table.add_column("latency/us", justify="right", no_wrap=True)
    pairs = shown(measured)
    slowest = min(map(_rate, pairs), default=0.0) if len(pairs) > 1 else -1.0
    for pair in pairs:
        style = "yellow" if _rate(pair) == slowest else ""
        cells = (pair.a, pair.b, f"{pair.gb_per_s:.2f}", f"{pair.latency_us:.0f}")
        table.add_row(*(Text(visible(cell), style=style) for cell in cells))
    return table


def _rate(pair: NodePair) -> float:
    return pair.gb_per_s
