"""Nodes that cannot do their part, found and named by ``stager verify`` on real Slurm."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from bundle.format.archive import BundleFile
from bundle.format.manifest import estimate_room
from tests.support.building import Project
from tests.support.cluster import Cluster
from tests.support.failing import remounted
from tests.support.node_faults import full_disk
from tests.support.processes import until

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


@pytest.mark.full
def test_no_room_for_what_is_sent_besides(cluster: Cluster, fresh: Project) -> None:
    """The file that is sent lies beside the environment until that is made from it."""
    bundle = max((fresh.store.root / "bundles").iterdir(), key=lambda path: path.stat().st_mtime)
    with BundleFile(str(bundle)) as opened:
        needed = estimate_room(opened.manifest.layers)[0]
    node = "node02"
    size, used = cluster.on(node, ["df", "-B1", "--output=size,used", "/tmp"]).stdout.split()[-2:]
    limit = int(used) + needed + SIZE // 2
    with remounted(cluster, node, f"size={limit}", f"size={size}"):
        code, report, said = verify(fresh, "--stage", "always", env={"STAGER_NODE_ROOT": "/tmp"})
        assert code == 3, said
        assert list(bad(report)) == [node]
        assert "free" in bad(report)[node]
        assert "sbcast" not in said
        assert report["bytes_broadcast"] == 0  # it was known before anything was sent


def test_a_full_node_has_another_place(cluster: Cluster, fresh: Project) -> None:
    with full_disk(cluster, "node02") as full:
        code, report, said = verify(fresh)
        assert (code, list(bad(report))) == (3, [full]), said  # memory is not taken unasked
        assert 'it takes memory, which node-root = "auto-memory" allows' in said
        code, _, said = verify(fresh, env={"STAGER_NODE_ROOT": "auto-memory"})
    assert code == 0, said
    assert f"{full} staged -> /dev/shm/stager-0/envs/" in said
    assert f"warning: {full}: the environment is in /dev/shm, where it takes memory" in said


@pytest.mark.full
def test_a_node_that_is_down(cluster: Cluster, fresh: Project) -> None:
    """It was up when the allocation was given."""
    go = fresh.root.parent / "go"
    granted = fresh.root.parent / "granted"
    wait = f'touch {granted}; until [ -e {go} ]; do sleep 0.1; done; exec "$@"'
    tool = str(Path(sys.executable).with_name("stager"))
    inner = [tool, "verify", "--json", "--log-dir", str(fresh.root.parent / "logs")]
    with subprocess.Popen(
        ["salloc", "--nodes=3", "--no-kill", "sh", "-c", wait, "sh", *inner],
        cwd=fresh.root,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as started:
        try:
            assert until(granted.exists)
            cluster.lose("node02")
            cluster.wait_state("node02", "down*", "down")
        finally:
            go.touch()
        out, said = started.communicate(timeout=600)
    assert started.returncode == 3, said
    assert list(bad(json.loads(out))) == ["node02"]
    assert "--exclude=node02" in said
