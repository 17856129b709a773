"""The cost of each way of keeping ranks the same: seconds and bytes a step.

    python -m benchmarks.training.exchange --data FOLDER [--rounds N] [--python PYTHON]

FOLDER has the IDX files of MNIST; PYTHON has torch. As root: each run has a network namespace of
its own, in which only the ranks talk, so the loopback interface counts what they send. Two runs
that differ in their epochs only leave out what starting and ending cost in bytes; the time is that
of the epochs after the first, their checkpoints included.
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
WAYS = (("ddp", 2), ("all-reduce", 2), ("parameter-server", 2), ("dp", 1))
BATCH, ROWS = 64, 4096
SHORT, LONG = 1, 3
"""Epochs of the two runs."""
_INSIDE = 'ip link set lo up && "$@" >&2 && cat /proc/net/dev'


def main() -> int:
    """Measure, and print what came out."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training.exchange")
    parser.add_argument("--data", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    parser.add_argument("--python", default=sys.executable, metavar="PYTHON")
    asked = parser.parse_args()
    steps: dict[tuple[str, int], list[float]] = {}
    sent: dict[tuple[str, int], float] = {}
    ways = [(way, ranks * more) for way, ranks in WAYS for more in ((1, 2) if ranks > 1 else (1,))]
    for number in range(asked.rounds):
        for way, ranks in ways:
            seconds, count = _measure(way, ranks, asked.python, asked.data.resolve())
            steps.setdefault((way, ranks), []).append(seconds)
            sent[way, ranks] = count
            print(f"round {number + 1}: {way}, {ranks} ranks: {seconds * 1e3:.1f} ms", flush=True)
    print(f"\n{'way':<18}{'ranks':>5}{'ms a step':>22}{'sent a rank and step':>24}")
    for (way, ranks), found in steps.items():
        middle = statistics.median(found) * 1e3
        shown = f"{middle:.1f} [{min(found) * 1e3:.1f}..{max(found) * 1e3:.1f}]"
        print(f"{way:<18}{ranks:>5}{shown:>22}{sent[way, ranks] / 1e6:>21.2f} MB")
    return 0


def _measure(way: str, ranks: int, python: str, data: Path) -> tuple[float, float]:
    """Seconds a step, and bytes that each rank sends in one."""
    short = _run(way, ranks, SHORT, python, data)
    long = _run(way, ranks, LONG, python, data)
    count = (LONG - SHORT) * ROWS / (BATCH * ranks)
    return long[0], (long[1] - short[1]) / count / ranks


def _run(way: str, ranks: int, epochs: int, python: str, data: Path) -> tuple[float, int]:
    """Seconds of a step, and the bytes that all ranks have sent in the whole run."""
    env = {**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
    launch = [python, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    launch += ["--nproc-per-node", str(ranks), "-m"] if ranks > 1 else []
    launch = launch if ranks > 1 else [python, "-m"]
    sizes = ["--batch-size", str(BATCH), "--subset", str(ROWS + 1), "--held-out", "1"]
    options = ["--data", str(data), "--precision", "float32", "--epochs", str(epochs), *sizes]
    with tempfile.TemporaryDirectory() as folder:
        argv = [*launch, "trainer", "mnist", *options, "--sync", way, "--out", f"{folder}/out"]
        done = subprocess.run(
            ["unshare", "--net", "sh", "-c", _INSIDE, "sh", *argv],
            cwd=folder, env=env, capture_output=True, text=True, check=True,
        )  # fmt: skip
        log = Path(folder, "out", "metrics.jsonl").read_text(encoding="utf-8")
    return _seconds_a_step(log), _bytes_sent(done.stdout)


def _seconds_a_step(log: str) -> float:
    """Return the seconds of a step from the lines of metrics, without the first epoch if it can."""
    lines = [json.loads(line) for line in log.splitlines()]
    noted = [line for line in lines if "loss" in line]
    later = [line for line in noted if line["epoch"] > 1] or noted
    # Several steps are noted at a time: only the whole of them tells.
    steps = later[-1]["step"] - later[0]["step"]
    return float((later[-1]["seconds"] - later[0]["seconds"]) / steps)


def _bytes_sent(interfaces: str) -> int:
    """Return the bytes that went through the loopback interface, from ``/proc/net/dev``."""
    (loopback,) = [line for line in interfaces.splitlines() if line.strip().startswith("lo:")]
    return int(loopback.split()[9])


if __name__ == "__main__":
    sys.exit(main())
