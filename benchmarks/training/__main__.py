"""Rows a second of three ways to train the same network, with 1, 2 and 4 processes, interleaved.

    python -m benchmarks.training --data FOLDER [--rounds N] [--python PYTHON]

FOLDER has the IDX files of MNIST; PYTHON has torch, transformers and accelerate. The first epoch of
each run is not counted. Prints a table, the ratio of ours to each of the others in the same
round, and what our ranks spent their time on.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
BATCH, EPOCHS = 16, 3
WAYS = ("ours", "minimal", "huggingface")
RANKS = (1, 2, 4)


@dataclass(frozen=True)
class Measured:
    """One run."""

    rate: float
    """Rows a second, over all ranks; the mean of all epochs but the first."""
    shares: dict[str, float] = field(default_factory=dict)
    """What the ranks spent their steps on, each a share of the time (0 to 1); ours only."""


def main() -> int:
    """Measure, and print what came out."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training", description=__doc__)
    parser.add_argument("--data", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    parser.add_argument("--python", default=sys.executable, metavar="PYTHON")
    asked = parser.parse_args()
    found: dict[tuple[str, int], list[Measured]] = {}
    for number in range(asked.rounds):
        for ranks in RANKS:
            # Whoever is first may have a cooler machine: the order changes from round to round.
            for way in WAYS if number % 2 == 0 else WAYS[::-1]:
                one = _measure(way, ranks, asked.python, asked.data.resolve())
                found.setdefault((way, ranks), []).append(one)
                print(f"round {number + 1}: {ranks} ranks, {way}: {one.rate:.0f}/s", flush=True)
    print()
    for row in _table(found):
        print(row)
    return 0


def _table(found: Mapping[tuple[str, int], Sequence[Measured]]) -> Iterator[str]:
    """Yield the lines of the result: medians, and those of the ratios of each round."""
    yield (
        f"{'ranks':>5}"
        + "".join(f"{way:>22}" for way in WAYS)
        + (f"{'ours/minimal':>22}{'ours/Trainer':>22}   data, sync, compute")
    )
    for ranks in RANKS:
        ours, minimal, trainer = (_rates(found[way, ranks]) for way in WAYS)
        cells = [_spread(rates, ".0f") for rates in (ours, minimal, trainer)]
        cells += [_spread(_ratios(ours, peer), ".3f") for peer in (minimal, trainer)]
        shares = ", ".join(_shares(found["ours", ranks]))
        yield f"{ranks:>5}" + "".join(f"{cell:>22}" for cell in cells) + f"   {shares}"


def _rates(runs: Sequence[Measured]) -> list[float]:
    return [run.rate for run in runs]


def _ratios(ours: Sequence[float], peer: Sequence[float]) -> list[float]:
    """Return the ratio of each round."""
    return [own / other for own, other in zip(ours, peer, strict=True)]


def _shares(runs: Sequence[Measured]) -> Iterator[str]:
    """Yield the share of each part of a step, the median of all runs."""
    for name in ("data_share", "sync_share", "compute_share"):
        yield f"{statistics.median(run.shares[name] for run in runs):.0%}"


def _spread(values: Sequence[float], form: str) -> str:
    middle = statistics.median(values)
    return f"{middle:{form}} [{min(values):{form}}..{max(values):{form}}]"


def _measure(way: str, ranks: int, python: str, data: Path) -> Measured:
    """One run of one of the ways."""
    env = {**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        launch = [python, "-m", "torch.distributed.run", "--standalone"]
        launch += ["--nproc-per-node", str(ranks), "--log-dir", folder]
        if way == "ours":
            sizes = ["--batch-size", str(BATCH), "--epochs", str(EPOCHS), "--held-out", "1"]
            options = ["--data", str(data), "--precision", "float32", *sizes, "--out", "out"]
            argv = [*launch, "-m", "trainer", "mnist", *options]
        else:
            argv = [*launch, str(HERE / f"{way}.py"), str(data), str(BATCH), str(EPOCHS)]
        done = subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, check=True)
        if way == "ours":
            return _ours(Path(folder, "out"))
    found = [float(line.split()[1]) for line in done.stdout.splitlines() if line[:4] == "RATE"]
    return Measured(statistics.fmean(found[1:]))


def _ours(out: Path) -> Measured:
    """The same, from the time of each step."""
    text = (out / "metrics.jsonl").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in text.splitlines()]
    rates = []
    for epoch in range(1, EPOCHS):
        inside = [line for line in lines if "loss" in line and epoch < line["epoch"] <= epoch + 1]
        rows = (inside[-1]["epoch"] - inside[0]["epoch"]) * _ROWS
        rates.append(rows / (inside[-1]["seconds"] - inside[0]["seconds"]))
    metrics = json.loads((out / "metrics.json").read_text(encoding="utf-8"))
    shares = {name: value for name, value in metrics.items() if name.endswith("_share")}
    return Measured(statistics.fmean(rates), shares)


_ROWS = 9999
"""Of the split that is published for tests, less the one that is held out."""

if __name__ == "__main__":
    sys.exit(main())
