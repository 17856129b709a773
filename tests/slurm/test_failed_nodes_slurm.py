"""A node whose disk is full, on real Slurm: remembered, pointed out, listed, and avoided."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from tests.support.building import Project
from tests.support.cluster import Cluster
from tests.support.node_faults import full_disk

pytestmark = pytest.mark.slow

ONCE = "node02: disk full once in 7 days"


@pytest.fixture
def fresh(slurm_project: Project, monkeypatch: pytest.MonkeyPatch) -> Project:
    """A project of which no node has all layers, and for which only ``/tmp`` will do."""
    monkeypatch.setenv("STAGER_NODE_ROOT", "/tmp")
    (slurm_project.root / "weights.bin").write_bytes(os.urandom(8 << 20))
    slurm_project.build()
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
