"""Starting the trainer as its users do: alone, or as ranks under torchrun."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.requirements import DATA
from tests.support.warm_ranks import Running, WarmRanks, as_torchrun_does

REPO = Path(__file__).resolve().parents[2]
SHARED = DATA
REAL = pytest.mark.needs("data")


def variables(**more: str) -> dict[str, str]:
    dropped = ("HF_", "GLOO_", "NCCL_", "PYTORCH_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    return kept | {"PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"} | more


def command(
    ranks: int, folder: Path, *arguments: str, options: Sequence[str] = (), program: str = ""
) -> list[str]:
    """A command line that trains, or runs a program, with so many ranks; 0: without a launcher."""
    module = [*([program] if program else ["-m", "trainer"]), *arguments]
    if not ranks:
        return [sys.executable, *module]
    # Else it leaves its logs in the temporary directory.
    launch = ["--standalone", "--nproc-per-node", str(ranks), "--log-dir", str(folder / "torchrun")]
    return [sys.executable, "-m", "torch.distributed.run", *launch, *options, *module]


def train(
    ranks: int, folder: Path, *arguments: str, code: int = 0, more: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Train to the end with ranks that have imported PyTorch; 1 if any of several failed."""
    running = start(ranks, folder, *arguments, more=more)
    codes, output, errors = running.wait()
    assert (int(any(codes)) if len(codes) > 1 else codes[0]) == code, output + errors
    return subprocess.CompletedProcess(list(arguments), code, output, errors)


def start(
    ranks: int,
    folder: Path,
    *arguments: str,
    more: Mapping[str, str] | None = None,
    program: str = "",
) -> Running:
    pytest.importorskip("torch")
    hugging_face = "tiny-bert" in arguments
    if hugging_face:
        pytest.importorskip("transformers")
        pytest.importorskip("datasets")
    started = as_torchrun_does(ranks, variables(**(more or {})))
    started = [replace(rank, program=program) for rank in started]
    return warm_ranks(hugging_face).start(started, folder, arguments)


def warm_ranks(hugging_face: bool = False) -> WarmRanks:
    """The process that ranks are forked from; its cache of Hugging Face is empty."""
    return _warm_ranks(hugging_face)  # one way to ask, as a cache tells apart how it is asked


@functools.cache
def _warm_ranks(hugging_face: bool) -> WarmRanks:
    home = os.environ["HOME"]  # of the test that comes first
    env = variables(HF_HOME=f"{home}/empty", TORCH_CPP_LOG_LEVEL="ERROR")
    return WarmRanks(env, "transformers" if hugging_face else "torch")


def metrics(out: Path) -> dict[str, Any]:
    return dict(json.loads((out / "metrics.json").read_text(encoding="utf-8")))


def notes(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def losses(out: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in notes(out) if "loss" in line}


def weights(out: Path, name: str = "model.pt") -> dict[str, Any]:
    import torch

    return dict(torch.load(out / name, weights_only=True))


def same_bits(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return one.keys() == other.keys() and all(bool((one[key] == other[key]).all()) for key in one)
