"""The commands of the model.

python -m benchmarks.model measure   measures jobs on scripts/cluster, as root; some minutes
python -m benchmarks.model show      fits the model, and prints its tables
python -m benchmarks.model draw      draws docs/scale.png; needs matplotlib
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from ..errors import BenchError
from ..output import say
from ..tools import REPO
from . import fit, scale
from .measure import MEASURED, Measurements, measure_all


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.model",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add("command", choices=("measure", "show", "draw"))
    add("--file", type=Path, default=MEASURED, help="the measurements")
    add("--nodes", type=int, default=64, help="measure, or fit phases, up to so many nodes")
    add("--least", type=int, default=2, help="measure from so many nodes on")
    add("--rounds", type=int, default=1, help="measure each job so often")
    add("--stager", metavar="PATH", default=shutil.which("stager") or "stager")
    add("--work", type=Path, default=Path.home(), help="seen by all nodes; 500 MB")
    add("--chart", type=Path, default=REPO / "docs" / "scale.png", help="what is drawn")
    return made


def main(argv: list[str]) -> int:
    """Carry out one command; return the exit status."""
    asked = parser().parse_args(argv)
    try:
        if asked.command == "measure":
            measure_all(asked)
            return 0
        measured = Measurements.load(asked.file)
        costs = fit.fit(measured, most=asked.nodes)
        jobs = scale.scale(costs)
        if asked.command == "draw":
            scale.draw(jobs, asked.chart)
            return 0
        coarse = scale.coarseness(costs)
        sections = (
            scale.checks_table(fit.checks(measured, fit.fit(measured))),
            scale.costs_table(costs),
            scale.computed_table(jobs),
            scale.computed_table(scale.sensitivity(costs)),
            scale.table(("chunks simulated", "sent s"), [(str(n), f"{s:.3f}") for n, s in coarse]),
        )
        print("\n\n".join(sections))
    except BenchError as exc:
        say(str(exc))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
