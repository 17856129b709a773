#!/usr/bin/env python3
"""Measures stager against other tools on this machine, and holds the ratios against the targets.

    scripts/bench.py                      every row but those on Slurm, 3 rounds; half an hour
    scripts/bench.py --slurm --curve      everything; needs root for the local cluster
    scripts/bench.py --relay              1 to 32 nodes with slow links; as root, and nothing else
    scripts/bench.py --cuda               the CUDA environment and nothing else; 32 GiB, an hour
    scripts/bench.py --quick              a reduced environment, once; under 3 minutes
    scripts/bench.py --only unpack size   only these rows or groups of rows

The peers (pip, uv, pex) and this checkout are installed into .venv-bench; tar, zstd and
squashfs-tools come from the system. The first run needs a package index, as pip of this user has
it. What is measured are builds from downloaded wheels, and what follows; nothing is fetched then.

Exit status: 0 when all targets are met, 1 when one is missed or something is wrong, 2 for a wrong
command line, 130 when interrupted. Everything but .venv-bench, --cache and the results is removed;
these are written after each group of rows, so that a failure costs no more than its own group.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path
from types import FrameType

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

from benchmarks import tools  # noqa: E402
from benchmarks.errors import BenchError  # noqa: E402

RESULTS = REPO / "benchmarks" / "results" / "latest.json"
RELAY_RESULTS = RESULTS.with_name("relay.json")
CUDA_RESULTS = RESULTS.with_name("cuda.json")
SCRATCH = Path("/var/tmp")  # noqa: S108 - on a disk, and nodes of a local cluster see it
CHART = REPO / "docs" / "performance.png"
RELAY_CHART = REPO / "docs" / "relay.png"
CUDA_CHART = REPO / "docs" / "cuda.png"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = made.add_argument
    add("--rounds", type=_many, default=3, metavar="N", help="how often (default: 3)")
    add("--quick", action="store_true", help="a reduced environment, one round, fewer rows")
    add("--only", nargs="+", default=[], metavar="ROW", help="only these rows or groups")
    add("--list", action="store_true", help="print rows, groups and targets, and end")
    add("--slurm", action="store_true", help="also on a real Slurm, made by scripts/cluster")
    add("--relay", action="store_true", help="only the relay, over nodes with slow links")
    add("--cuda", action="store_true", help="only the CUDA environment")
    add("--curve", action="store_true", help="also over the size of the environment")
    add("--cpus", type=_many, default=2, metavar="N", help="CPUs for everything (default: 2)")
    add(
        "--scratch",
        type=Path,
        default=SCRATCH,
        metavar="DIR",
        help="a disk with 14 GiB (default: /var/tmp)",
    )
    add("--cache", type=Path, metavar="DIR", help="keep wheels and locks there for the next run")
    add("--json", type=Path, metavar="FILE", help="where the results go")
    add(
        "--chart",
        type=Path,
        nargs="?",
        const=CHART,
        metavar="FILE",
        help="draw a PNG (default: performance.png in docs, relay.png, cuda.png)",
    )
    return made


def _many(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("give 1 or more")
    return number


def say(line: str) -> None:
    """Progress, on standard error: standard output belongs to the tables."""
    print(line, file=sys.stderr, flush=True)


def main(argv: list[str]) -> int:
    """Measure, show, and return the exit status."""
    asked = parser().parse_args(argv)
    if asked.list:
        return _list()
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        made = tools.make_tools(tools.DEFAULT, say)
        if Path(sys.prefix).resolve() != tools.DEFAULT.resolve():
            # The tables and the chart need what has just been installed.
            os.execv(made.python, [made.python, __file__, *argv])  # noqa: S606
        return _measured(asked, made)
    except BenchError as exc:
        say(str(exc))
        return 1
    except KeyboardInterrupt:
        say("interrupted; what was made has been removed")
        return 130


def _measured(asked: argparse.Namespace, made: tools.Tools) -> int:
    from benchmarks import chart, plan, report, verdicts

    options = plan.Options(
        rounds=asked.rounds,
        quick=asked.quick,
        only=tuple(asked.only),
        slurm=asked.slurm,
        relay=asked.relay,
        cuda=asked.cuda,
        curve=asked.curve,
        cpus=asked.cpus,
        scratch=asked.scratch,
        cache=asked.cache,
    )
    own = RELAY_RESULTS if asked.relay else CUDA_RESULTS if asked.cuda else RESULTS
    kept = asked.json or own
    results = plan.carry_out(options, made, say, lambda sofar: report.write_json(sofar, kept))
    report.show(results)
    report.write_json(results, kept)
    say(f"results: {kept}")
    if asked.chart is not None:
        usual = RELAY_CHART if asked.relay else CUDA_CHART if asked.cuda else CHART
        path = usual if asked.chart == CHART else asked.chart
        draw = chart.draw_relay if asked.relay else chart.draw
        draw(results, path)
        say(f"chart: {path}")
    return verdicts.exit_status(results.verdicts)


def _list() -> int:
    from benchmarks.rows import ROWS

    for row in ROWS:
        target = "" if row.target is None else f"<= {row.target:g}"
        print(f"{row.group:8} {row.key:20} {row.what:26} {row.versus:18} {target}")
    return 0


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
