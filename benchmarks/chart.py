"""One picture of a run: how long each peer takes, ours being one, and where the targets are."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from .report import Results
from .rows import Verdict

_MET, _MISSED, _PLAIN = "#2a7f62", "#b3403a", "#7a8794"
_FLOOR = 0.002
"""Where a ratio of nothing is drawn, on an axis that has no zero."""


def drawn(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """The rows that have a ratio, in the order of the table."""
    return [verdict for verdict in verdicts if verdict.row.peer and verdict.figure is not None]


def draw(results: Results, path: Path) -> None:
    """Write the chart as a PNG file, whose folder is made."""
    with tempfile.TemporaryDirectory() as settings:
        os.environ.setdefault("MPLCONFIGDIR", settings)
        # By name: matplotlib is there when the benchmark runs, not when the code is checked.
        import_module("matplotlib").use("Agg")
        plt = import_module("matplotlib.pyplot")

        verdicts = drawn(results.verdicts)
        figure, axes = plt.subplots(figsize=(9, 1.2 + 0.32 * len(verdicts)))
        _bars(axes, verdicts)
        axes.set_title(f"{results.reference}\n{results.rounds} rounds, medians", fontsize=9)
        figure.tight_layout()
        path.parent.mkdir(parents=True, exist_ok=True)
        # No date and no version inside: the same figures make the same file.
        figure.savefig(path, dpi=110, metadata={"Software": None})
        plt.close(figure)


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
