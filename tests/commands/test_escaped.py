"""Processes that ranks leave behind, out of their session and without our variable: none stays."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.support.building import STAGER, Project
from tests.support.job_processes import find_node_programs
from tests.support.processes import is_alive, start, until
from tests.support.small_torch import with_small_torch

TRAIN = """\
import os, pathlib, subprocess, sys, time
code = "import pathlib, signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
code += "pathlib.Path(sys.argv[1]).touch(); time.sleep(600)"
command = {"heeds": ["sleep", "600"], "ignores": [sys.executable, "-c", code, "ready"]}[sys.argv[1]]
left = subprocess.Popen(["env", "-i", "setsid", *command])
while sys.argv[1] == "ignores" and not pathlib.Path("ready").exists():
    time.sleep(0.05)
pathlib.Path("part").write_text(str(left.pid))
os.rename("part", "left")
time.sleep(float(sys.argv[2]))
"""


@pytest.fixture
def ready(project: Project) -> Project:
    """A project whose one rank leaves a process behind and notes its number."""
    return with_small_torch(project, TRAIN, "grace-seconds = 1")


def started(project: Project, *arguments: str) -> subprocess.Popen[str]:
    argv = [*STAGER, "run", "--allocation", "local", "--log-dir", "logs", "--", "train.py"]
    return start([*argv, *arguments], cwd=project.root)


def gone(project: Project) -> bool:
    """Tell whether the process that was left behind is no more; end it where it is."""
    pid = int((project.root / "left").read_text())
    if not is_alive(pid):
        return True
    os.kill(pid, signal.SIGKILL)
    return False


@pytest.mark.parametrize("left", ["heeds", "ignores"])
def test_nothing_of_a_job_that_went_well_goes_on(left: str, ready: Project) -> None:
    running = started(ready, left, "0")
    _, said = running.communicate(timeout=300)
    assert gone(ready)
    assert running.returncode == 0, said


@pytest.mark.parametrize("left", ["heeds", "ignores"])
def test_nothing_of_a_job_that_was_interrupted_goes_on(left: str, ready: Project) -> None:
    running = started(ready, left, "600")
    note = ready.root / "left"
    begun = until(note.exists)
    running.terminate()
    _, said = running.communicate(timeout=300)
    assert begun, said
    assert gone(ready)
    assert "nothing is left running" in said


def test_nothing_of_an_agent_that_was_killed_goes_on(ready: Project) -> None:
    """The driver adopts what it leaves; the next job removes its directory."""
    running = started(ready, "heeds", "600")
    note = ready.root / "left"
    begun = until(note.exists)
    for agent in find_node_programs(ready, "agent"):
        os.kill(agent, signal.SIGKILL)
    _, said = running.communicate(timeout=300)
    assert begun, said
    assert gone(ready)
    assert running.returncode == 3, said
    own = f"stager-{os.geteuid()}"
    jobs = Path(os.environ["STAGER_NODE_ROOT"], own, "nodes", "local1", own, "jobs")
    assert len(list(jobs.iterdir())) == 1
    ready.expect("verify", "--allocation", "local", "--log-dir", "logs")
    assert list(jobs.iterdir()) == []
