"""``scripts/gpu_check.py`` where there is no GPU, and its parts that need none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bundle.node.machine import host_facts

REPO = Path(__file__).resolve().parents[2]
PARTS = """
import sys, tempfile, pathlib
sys.path.insert(0, "scripts")
import gpu_check
with tempfile.TemporaryDirectory() as folder:
    machine = gpu_check.Machine(sys.executable, pathlib.Path(folder))
    print(gpu_check.an_xid_is_diagnosed(machine))
    print(machine.diagnosed("oom", "torch.OutOfMemoryError: CUDA out of memory. Tried ...\\n"))
    print(machine.diagnosed("none", "step 1\\n"))
    try:
        gpu_check.torch_sees_the_gpus(gpu_check.Machine("/nowhere", pathlib.Path(folder)))
    except gpu_check.Failed as exc:
        print(exc)
"""


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, *arguments]
    return subprocess.run(argv, cwd=REPO, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.skipif(host_facts().gpus > 0, reason="there is a GPU: run scripts/gpu_check instead")
def test_without_a_gpu_it_says_so() -> None:
    done = python("scripts/gpu_check.py")
    assert (done.returncode, done.stderr) == (4, "")
    assert done.stdout.startswith("there is no NVIDIA GPU on this machine")


def test_its_parts_that_need_no_gpu() -> None:
    done = python("-c", PARTS)
    assert done.stderr == ""
    xid, memory, nothing, missing = done.stdout.splitlines()
    assert xid.startswith("node-failure")
    assert (memory, nothing) == ("out-of-memory", "None")
    assert "No such file" in missing
