"""Nodes that cannot do their part, found and named by ``stager verify`` on real Slurm."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import pytest

from tests.support.building import Project
from tests.support.cluster import Cluster
from tests.support.node_faults import full_disk

pytestmark = pytest.mark.slow

SIZE = 8 << 20
"""Bytes of a file in the project: more than there is room for, and nothing that is linked."""


@pytest.fixture
def fresh(slurm_project: Project) -> Project:
    """A project of which no node has all layers."""
    (slurm_project.root / "weights.bin").write_bytes(os.urandom(SIZE))
    slurm_project.build()
    return slurm_project


def verify(
    project: Project, *options: str, env: Mapping[str, str] | None = None
) -> tuple[int, dict[str, Any], str]:
    """Exit code, JSON and talk of a verify on three nodes."""
    logs = str(project.root.parent / "logs")
    done = project.stager("verify", "--json", "--nodes", "3", "--log-dir", logs, *options, env=env)
    return done.returncode, json.loads(done.stdout), done.stderr


def bad(report: dict[str, Any]) -> dict[str, str]:
    """What is wrong, by node."""
    return {
        node["node"]: "; ".join(node["problems"]) for node in report["nodes"] if node["problems"]
    }


def test_a_full_node_has_another_place(cluster: Cluster, fresh: Project) -> None:
    with full_disk(cluster, "node02") as full:
        code, report, said = verify(fresh)
        assert (code, list(bad(report))) == (3, [full]), said  # memory is not taken unasked
        assert 'it takes memory, which node-root = "auto-memory" allows' in said
        code, _, said = verify(fresh, env={"STAGER_NODE_ROOT": "auto-memory"})
    assert code == 0, said
    assert f"{full} staged -> /dev/shm/stager-0/envs/" in said
    assert f"warning: {full}: the environment is in /dev/shm, where it takes memory" in said
