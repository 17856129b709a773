"""Rows a second of three ways to train the same network, with 1, 2 and 4 processes, interleaved.

    python -m benchmarks.training --data FOLDER [--rounds N] [--python PYTHON]

FOLDER has the IDX files of MNIST; PYTHON has torch, transformers and accelerate. The first epoch of
each run is not counted. Prints a table, and the ratio of ours to each of the others.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
BATCH, EPOCHS = 16, 3
WAYS = ("ours", "minimal", "huggingface")


def main() -> int:
    """Measure, and print what came out."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training", description=__doc__)
    parser.add_argument("--data", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    parser.add_argument("--python", default=sys.executable, metavar="PYTHON")
    asked = parser.parse_args()
    rates: dict[tuple[str, int], list[float]] = {}
    for number in range(asked.rounds):
        for ranks in (1, 2, 4):
            for way in WAYS:
                rate = _measure(way, ranks, asked.python, asked.data.resolve())
                rates.setdefault((way, ranks), []).append(rate)
                print(f"round {number + 1}: {ranks} ranks, {way}: {rate:.0f}/s", flush=True)
    print(f"\n{'ranks':>5}" + "".join(f"{way:>22}" for way in WAYS) + "   ours/minimal  ours/HF")
    for ranks in (1, 2, 4):
        found = [rates[way, ranks] for way in WAYS]
        middles = [statistics.median(one) for one in found]
        shown = "".join(
            f"{middle:>8.0f} [{min(one):.0f}..{max(one):.0f}]".rjust(22)
            for middle, one in zip(middles, found, strict=True)
        )
        print(f"{ranks:>5}{shown}{middles[0] / middles[1]:>15.3f}{middles[0] / middles[2]:>9.3f}")
    return 0


def _measure(way: str, ranks: int, python: str, data: Path) -> float:
    """Rows a second of one run, over all ranks; the mean of all epochs but the first."""
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
            return _ours(Path(folder, "out", "metrics.jsonl"))
    found = [float(line.split()[1]) for line in done.stdout.splitlines() if line[:4] == "RATE"]
    return statistics.fmean(found[1:])


def _ours(log: Path) -> float:
    """The same, from the time of each step."""
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    rates = []
    for epoch in range(1, EPOCHS):
        inside = [line for line in lines if "loss" in line and epoch < line["epoch"] <= epoch + 1]
        rows = (inside[-1]["epoch"] - inside[0]["epoch"]) * _ROWS
        rates.append(rows / (inside[-1]["seconds"] - inside[0]["seconds"]))
    return statistics.fmean(rates)


_ROWS = 9999
"""Of the split that is published for tests, less the one that is held out."""

if __name__ == "__main__":
    sys.exit(main())
