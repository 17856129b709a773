"""``scripts/gpu_check.py`` where there is no GPU, and its parts that need none."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bundle.node.machine import host_facts
from tests.support.processes import Done, run

REPO = Path(__file__).resolve().parents[2]


def python(*arguments: str) -> Done:
    return run([sys.executable, *arguments], cwd=REPO)


@pytest.mark.skipif(host_facts().gpus > 0, reason="there is a GPU: run scripts/gpu_check instead")
def test_without_a_gpu_it_says_so() -> None:
    done = python("scripts/gpu_check.py")
    assert (done.returncode, done.stderr) == (4, "")
    assert done.stdout.startswith("there is no NVIDIA GPU on this machine")
