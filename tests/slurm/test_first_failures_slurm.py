"""Which rank is named first where Slurm itself starts them, and its signals end what is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from bundle.launch.rank_monitor import SECONDS
from tests.support.processes import until
from tests.support.provoking import STAGER, Bench, Said

pytestmark = pytest.mark.slow


def diagnosed(bench: Bench) -> dict[str, Any]:
    """What `stager diagnose` says afterwards."""
    argv = [STAGER, "diagnose", "--json", "--log-dir", str(bench.logs), bench.job_id()]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    return dict(json.loads(done.stdout))


def named(said: Said) -> tuple[str, int | None, int | None, str]:
    found = said.failure
    return found["node"], found["rank"], found["exit_code"], found["class"]


def interrupted(bench: Bench, started: subprocess.Popen[str]) -> Said:
    os.killpg(started.pid, signal.SIGINT)
    Path(bench.env["BEGUN"], "enough").touch()
    said = bench.finish(started)
    assert said.code == 130, said.talk
    return said


@pytest.mark.full
def test_a_rank_that_a_signal_of_its_own_has_ended(bench: Bench) -> None:
    """The others get the same signal from their agents, some seconds later."""
    said = bench.stager("run", "--nodes", "3", "--", "train.py", "1=term", "all=sleep")
    assert said.code == 3, said.talk
    assert named(said) == ("node02", 1, -signal.SIGTERM, "killed")
    assert diagnosed(bench)["first_failure"] == said.failure
    bench.assert_clean()


@pytest.mark.full
def test_ctrl_c_at_a_rank_that_does_not_end(bench: Bench) -> None:
    """It is named while the job runs, and afterwards."""
    bench.env[SECONDS] = "1"
    started = bench.start("run", "--nodes", "3", "--", "train.py", "1=hang", "all=sleep")
    assert until(lambda: bench.events("lingering") or started.poll() is not None)
    said = interrupted(bench, started)
    assert named(said) == ("node02", 1, None, "hang"), said.talk
    assert "node02 rank 1: its program has ended, but its process goes on" in said.talk
    assert "before that:" in said.talk
    assert diagnosed(bench)["first_failure"] == said.failure
    bench.assert_clean()


@pytest.mark.full
def test_ctrl_c_after_a_failure(bench: Bench) -> None:
    """The driver gives the others some seconds to end by themselves, and somebody will not wait."""
    bench.env["STAGER_LAUNCH_GRACE_SECONDS"] = "300"  # until "enough" is there
    started = bench.start("run", "--nodes", "3", "--", "train.py", "2=raise", "all=deaf")

    def failed() -> bool:
        return any(not answer["ok"] for answer in bench.events("launch"))

    assert until(lambda: failed() or started.poll() is not None)
    said = interrupted(bench, started)
    assert named(said) == ("node03", 2, 1, "python-error"), said.talk
    assert said.report["consequences"] == []
    assert diagnosed(bench)["first_failure"] == said.failure
    bench.assert_clean()
