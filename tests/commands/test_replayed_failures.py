"""A rank that failed in a real training job fails in the same way when it is run again alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.failing_training import FAILURES, TRAIN, find_line
from tests.support.torch_project import TorchProject

ONE_NODE = ("--nodes", "1", "--nproc-per-node", "2")


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("case", sorted(FAILURES))
def test_each_failure_is_found_again(
    case: str, torch_project: TorchProject, tmp_path: Path
) -> None:
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / "rank1.csv").write_text("1,2,x,4")
    failed = torch_project.run(TRAIN, case, cwd=tmp_path, options=ONE_NODE)
    first = failed.report["first_failure"]
    expected = f"{FAILURES[case][0]} at script.py:{find_line(case)}"
    assert first["rank"] == 1
    assert first["step"] == {"step": 2}
    assert first["seeds"]["torch"] == "1"
    before = (tmp_path / "metrics.json").read_bytes()

    logs, env = tmp_path / "logs", {"TMPDIR": str(torch_project.nodes)}
    done = torch_project.stager("replay", "--json", "--log-dir", logs, cwd=tmp_path, env=env)
    said = json.loads(done.stdout)
    assert done.returncode == 1, done.stderr
    assert said["verdict"] == f"the same failure: {expected}"
    assert (said["same"], said["expected"], said["failure"]) == (True, expected, expected)
    assert (tmp_path / "metrics.json").read_bytes() == before
