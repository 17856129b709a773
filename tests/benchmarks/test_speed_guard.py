"""A guard against a slip that would cost seconds on every node: one ratio, and a generous one.

It is one of processor times, which a machine that has something else to do changes little. What can
be counted is counted elsewhere: layers that are built again, bytes that are sent, path
calls under shared places, processes that are started.
"""

from __future__ import annotations

import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from stager.core.store import Store
from stager.pack.node_program import find_compiled_program
from tests.support.bundles import CLEAN, node_program
from tests.support.processes import run
from tests.support.torch_project import TorchProject

GENEROUS = 3.0  # times tar's processor time that unpacking may take
ROUNDS = 4  # of both at most: the first is enough, unless something else was in the caches' way


@pytest.fixture
def memory(torch_project: TorchProject) -> Path:
    """A directory where the test's nodes are as well: in memory if there is enough of it."""
    return torch_project.nodes / "guard"


def seconds(argv: list[str], target: Path) -> float:
    """The processor time of a program, and of all that it starts."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = run(argv, env=CLEAN)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


@pytest.mark.slow
@pytest.mark.needs("zstd")
def test_unpacking_is_not_far_behind_tar(
    torch_project: TorchProject, memory: Path, tmp_path: Path
) -> None:
    program = node_program(torch_project.bundle, tmp_path)
    program = find_compiled_program(program, Store(tmp_path))
    ours = [sys.executable, "-I", "-S", str(program), "unpack", "--trusted"]
    ours += ["--python", sys.executable, str(torch_project.bundle), str(memory)]
    try:
        mine = [seconds(ours, memory)]
        [env] = (memory / next(memory.iterdir()).name / "envs").iterdir()
        archive = tmp_path / "env.tar.zst"
        pack = ["tar", "-I", "zstd -1 -T0", "-C", str(env), "-cf", str(archive), "."]
        subprocess.run(pack, check=True)
        theirs = ["tar", "--zstd", "-C", str(memory), "-xf", str(archive)]
        tars = [seconds(theirs, memory)]
        while min(mine) >= GENEROUS * min(tars) and len(mine) < ROUNDS:
            mine.append(seconds(ours, memory))
            tars.append(seconds(theirs, memory))
    finally:
        shutil.rmtree(memory, ignore_errors=True)
    assert min(mine) < GENEROUS * min(tars), f"{mine} s against {tars} s"
