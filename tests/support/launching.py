"""Starting the trainer as its users do: alone, or as ranks under torchrun."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.requirements import DATA
from tests.support.warm_ranks import WarmRanks

REPO = Path(__file__).resolve().parents[2]
SHARED = DATA
REAL = pytest.mark.needs("data")


def variables(**more: str) -> dict[str, str]:
    """The environment of a rank: this checkout, and one thread."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    return kept | {"PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"} | more


def command(ranks: int, folder: Path, *arguments: str, options: Sequence[str] = ()) -> list[str]:
    """A command line that trains with so many ranks; 0 for a process without a launcher."""
    if not ranks:
        return [sys.executable, "-m", "trainer", *arguments]
    # Else it leaves its logs in the temporary directory.
    launch = ["--standalone", "--nproc-per-node", str(ranks), "--log-dir", str(folder / "torchrun")]
    module = ["-m", "trainer", *arguments]
    return [sys.executable, "-m", "torch.distributed.run", *launch, *options, *module]


def train(
    ranks: int, folder: Path, *arguments: str, code: int = 0, more: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Train to the end in ``folder``, with ranks that have imported PyTorch before."""
    pytest.importorskip("torch")
    done = _warm_ranks().train(ranks, folder, arguments, variables(**(more or {})))
    assert done.returncode == code, done.stdout + done.stderr
    return done


@functools.cache
def _warm_ranks() -> WarmRanks:
    return WarmRanks(variables())


def metrics(out: Path) -> dict[str, Any]:
    """What a run has written at its end."""
    return dict(json.loads((out / "metrics.json").read_text(encoding="utf-8")))


def notes(out: Path) -> list[dict[str, Any]]:
    """What a run has noted of its steps and epochs."""
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def losses(out: Path) -> dict[int, float]:
    """The loss of each step."""
    return {line["step"]: line["loss"] for line in notes(out) if "loss" in line}


def weights(out: Path, name: str = "model.pt") -> dict[str, Any]:
    """The weights that a run has saved."""
    import torch

    return dict(torch.load(out / name, weights_only=True))


def same_bits(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two models are equal to the last bit."""
    return one.keys() == other.keys() and all(bool((one[key] == other[key]).all()) for key in one)
