"""A node whose disk is full, on real Slurm: remembered, pointed out, listed, and avoided."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from time import time
from typing import Any

import pytest

from stager.incidents.node_history import keep_incidents
from tests.support.building import Project
from tests.support.cluster import Cluster
from tests.support.incidents import FULL, incidents_of
from tests.support.node_faults import full_disk
from tests.support.processes import until

pytestmark = pytest.mark.slow

STAGER = str(Path(sys.executable).with_name("stager"))
ONCE = "node02: disk full once in 7 days"


@pytest.fixture
def fresh(slurm_project: Project, monkeypatch: pytest.MonkeyPatch) -> Project:
    """A project of which no node has all layers, and for which only ``/tmp`` will do."""
    monkeypatch.setenv("STAGER_NODE_ROOT", "/tmp")
    (slurm_project.root / "weights.bin").write_bytes(os.urandom(8 << 20))
    slurm_project.build()
    return slurm_project


@pytest.fixture
def failed(cluster: Cluster, slurm_project: Project) -> Project:
    """A project on whose cluster the disk of node02 was full an hour ago."""
    incidents = incidents_of({"node02": [FULL]}, nodes=cluster.nodes, ended=time() - 3600)
    assert keep_incidents(slurm_project.store, incidents, time())
    return slurm_project


def stager(project: Project, *arguments: str) -> tuple[int, dict[str, Any], str]:
    """Exit code, JSON and talk of a command whose logs are beside the project."""
    logs = ("--log-dir", str(project.root.parent / "logs"))
    done = project.stager(arguments[0], "--json", *logs, *arguments[1:])
    assert "Traceback" not in done.stderr.replace("  | Traceback", ""), done.stderr
    return done.returncode, json.loads(done.stdout), done.stderr


def remembered(project: Project) -> dict[str, int]:
    """How often each node has failed, by ``stager nodes``."""
    report = json.loads(project.stager("nodes", "--json").stdout)
    return {node["node"]: node["times"] for node in report["nodes"]}


def names(report: dict[str, Any]) -> list[str]:
    return [node["node"] for node in report["nodes"]]


def test_a_node_that_is_left_out_and_one_that_fails_a_job_are_remembered(
    cluster: Cluster, fresh: Project
) -> None:
    with full_disk(cluster, "node02"):
        code, report, said = stager(fresh, "verify", "--nodes", "3", "--min-nodes", "2")
        assert (code, report["left_out"]) == (0, ["node02"]), said
        assert "disk full" not in said  # nothing was remembered before
        assert remembered(fresh) == {"node02": 1}

        code, report, said = stager(fresh, "verify", "--nodes", "3")
        assert code == 3
        assert f"  {ONCE}" in said.splitlines()
        assert remembered(fresh) == {"node02": 2}

        code, report, said = stager(fresh, "verify", "--nodes", "2", "--avoid-bad")
        assert code == 0, said
        assert names(report) == ["node01", "node03"]
        assert "avoiding node02: disk full 2 times in 7 days" in said
    table = fresh.stager("nodes").stdout.splitlines()
    assert table[1].split()[:2] == ["node02", "2"]
    assert "disk full" in table[1]


@pytest.mark.full
def test_a_batch_job_that_nobody_waits_for_is_read_later_and_once(
    cluster: Cluster, fresh: Project
) -> None:
    with full_disk(cluster, "node02"):
        code, submitted, said = stager(fresh, "verify", "--nodes", "3", "--batch")
        assert code == 0, said
        number = submitted["job_id"]
        assert until(lambda: cluster.ended(number))
        for _ in range(2):
            assert remembered(fresh) == {"node02": 1}
        assert list((fresh.store.root / "pending-jobs").iterdir()) == []

        code, _, said = stager(fresh, "verify", "--nodes", "3", "--batch", "--wait")
        assert code == 3
        assert f"  {ONCE}" in said.splitlines()
        assert list((fresh.store.root / "pending-jobs").iterdir()) == [], said
        assert remembered(fresh) == {"node02": 2}


def test_an_error_of_the_program_is_no_nodes_fault(
    cluster: Cluster, slurm_project: Project
) -> None:
    code, _, said = stager(slurm_project, "run", "--nodes", "3", "--", "train.py", "fail")
    assert code == 3, said
    assert remembered(slurm_project) == {}


@pytest.mark.parametrize("batch", [(), pytest.param(("--batch", "--wait"), marks=pytest.mark.full)])
def test_avoiding_by_setting_beside_the_users_own(
    cluster: Cluster, failed: Project, batch: tuple[str, ...]
) -> None:
    more = '[launch]\nlauncher = "srun"\nbackend = "gloo"\n[cluster]\navoid-bad = true'
    failed.settings("alpha", more=more).build()
    code, report, said = stager(failed, "verify", *batch, "--nodes", "1", "--exclude", "node01")
    assert (code, names(report)) == (0, ["node03"]), said
    assert f"avoiding {ONCE}" in said
    code, report, said = stager(failed, "verify", *batch, "--no-avoid-bad", "--nodes", "3")
    assert (code, len(names(report))) == (0, 3), said


@pytest.mark.full
def test_where_it_is_avoided_and_where_it_cannot_be(cluster: Cluster, failed: Project) -> None:
    """In a script and a plan; not where too few nodes would be left, nor in what stands already."""
    asked = ("--nodes", "1", "--avoid-bad", "--exclude", "node03")
    code, report, said = stager(failed, "script", *asked, "--", "train.py")
    assert code == 0, said
    assert "#SBATCH --exclude=node03,node02" in report["script"].splitlines()
    code, report, said = stager(failed, "run", "--dry-run", *asked, "--", "train.py")
    assert "--exclude=node03,node02" in report["argv"], said

    code, report, said = stager(failed, "verify", "--nodes", "3", "--avoid-bad")
    assert (code, names(report)) == (0, list(cluster.nodes)), said
    assert "warning: not avoiding node02, which failed lately: the job needs 3 nodes" in said
    assert f"  {ONCE}" in said.splitlines()

    inner = [STAGER, "verify", "--avoid-bad", "--log-dir", str(failed.root.parent / "logs")]
    done = subprocess.run(
        ["salloc", "--nodes=3", *inner],
        cwd=failed.root,
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    assert f"  {ONCE}" in done.stderr.splitlines()
    assert "warning: node02 cannot be avoided: this allocation stands already" in done.stderr

    incidents = incidents_of(
        {"gone99": [FULL]}, nodes=("gone99", "n1"), ended=time() - 60, job_id="9"
    )
    assert keep_incidents(failed.store, incidents, time())
    code, report, said = stager(failed, "verify", "--nodes", "2", "--avoid-bad")
    assert (code, names(report)) == (0, ["node01", "node03"]), said
    assert "not avoiding gone99: Slurm has no such node" in said
