"""Pictures of a run: how long each peer takes, ours being one; and the relay's time over nodes."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from bundle.protocol.counts import format_count

from .report import Results
from .rows import RELAY_NODES
from .verdicts import Verdict

_MET, _MISSED, _PLAIN = "#2a7f62", "#b3403a", "#7a8794"
_FLOOR = 0.002
"""Where a ratio of nothing is drawn, on an axis that has no zero."""

_RELAY_LINES = (
    ("sbcast", "sbcast by hand", _MISSED),
    ("our-sbcast", "--transfer sbcast", _PLAIN),
    ("relay", "--transfer relay", _MET),
)
"""The ways to send, what the chart calls them, and their colours."""


def drawn(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """The rows that have a ratio, in the order of the table."""
    return [verdict for verdict in verdicts if verdict.row.peer and verdict.figure is not None]


def draw(results: Results, path: Path) -> None:
    """Write the chart of all ratios as a PNG file, whose folder is made."""
    verdicts = drawn(results.verdicts)
    with _axes(results, path, (9, 1.2 + 0.32 * len(verdicts))) as axes:
        _bars(axes, verdicts)


def draw_relay(results: Results, path: Path) -> None:
    """Write the relay's time over the number of nodes as a PNG file, whose folder is made."""
    with _axes(results, path, (7, 4.5)) as axes:
        _lines(axes, results)


@contextmanager
def _axes(results: Results, path: Path, size: tuple[float, float]) -> Iterator[Any]:
    """Give axes to draw on, and write the picture when the block ends."""
    with tempfile.TemporaryDirectory() as settings:
        os.environ.setdefault("MPLCONFIGDIR", settings)
        # By name: matplotlib is there when the benchmark runs, not when the code is checked.
        import_module("matplotlib").use("Agg")
        plt = import_module("matplotlib.pyplot")
        figure, axes = plt.subplots(figsize=size)
        yield axes
        rounds = format_count(results.rounds, "round")
        axes.set_title(f"{results.reference}\n{rounds}, medians", fontsize=9)
        figure.tight_layout()
        path.parent.mkdir(parents=True, exist_ok=True)
        # No date and no version inside: the same figures make the same file.
        figure.savefig(path, dpi=110, metadata={"Software": None})
        plt.close(figure)


def _lines(axes: Any, results: Results) -> None:  # noqa: ANN401 - see above
    samples = results.samples
    for way, label, colour in _RELAY_LINES:
        nodes = [nodes for nodes in RELAY_NODES if f"relay/{nodes}/{way}" in samples]
        values = [samples.of(f"relay/{count}/{way}") for count in nodes]
        middle = [samples.middle(f"relay/{count}/{way}") for count in nodes]
        least = [at - min(found) for at, found in zip(middle, values, strict=True)]
        most = [max(found) - at for at, found in zip(middle, values, strict=True)]
        axes.errorbar(nodes, middle, [least, most], label=label, color=colour, marker="o")
    for verdict in results.verdicts:
        if verdict.row.target and verdict.row.key.endswith("-wire") and verdict.peer:
            at = int(verdict.row.key.split("-")[1])
            axes.plot((at * 0.9, at * 1.1), [verdict.row.target * verdict.peer] * 2, color="black")
    if "relay/wire" in samples:
        wire = samples.middle("relay/wire")
        axes.axhline(wire, color="grey", linewidth=0.8, label="the wire: size / rate")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    for axis, ticks in ((axes.xaxis, RELAY_NODES), (axes.yaxis, (1, 2, 4, 8, 16, 32))):
        axis.set_ticks(ticks, [str(tick) for tick in ticks])
    axes.set_xlabel("nodes; black marks are the targets", fontsize=8)
    axes.set_ylabel("seconds until the last node has the file", fontsize=8)
    axes.legend(fontsize=8, loc="upper left")


def _bars(axes: Any, verdicts: Sequence[Verdict]) -> None:  # noqa: ANN401 - see above
    colours = {"met": _MET, "missed": _MISSED}
    for number, verdict in enumerate(verdicts):
        ratio = max(verdict.figure or 0.0, _FLOOR)
        axes.barh(number, ratio - _FLOOR, left=_FLOOR, color=colours.get(verdict.state, _PLAIN))
        axes.text(ratio * 1.06, number, f"{verdict.figure:.2f}", va="center", fontsize=7)
        if verdict.row.target:
            axes.plot([verdict.row.target] * 2, [number - 0.4, number + 0.4], color="black")
    axes.set_yticks(range(len(verdicts)))
    labels = [f"{verdict.row.what} / {verdict.row.versus}" for verdict in verdicts]
    axes.set_yticklabels(labels, fontsize=7)
    axes.invert_yaxis()
    axes.margins(y=0.01)
    axes.set_xscale("log")
    axes.set_xlim(_FLOOR, 3)
    axes.axvline(1.0, color="grey", linewidth=0.6)
    axes.set_xlabel("ours / peer (less is better); black marks are the targets", fontsize=8)
