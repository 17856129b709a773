"""A damaged environment on one node of a real cluster is named, and repaired by one layer."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.building import Project
from tests.support.cluster import Cluster

pytestmark = pytest.mark.slow

SIZE = 8 << 20


def verify(project: Project) -> tuple[dict[str, Any], str]:
    """JSON and talk of a verify on three nodes to which everything is sent that they lack."""
    logs = str(project.root.parent / "logs")
    options = ["--json", "--nodes", "3", "--log-dir", logs, "--stage", "always"]
    done = project.stager("verify", *options, env={"STAGER_NODE_ROOT": "/tmp"})
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


def test_only_the_damaged_layer_is_sent_again(cluster: Cluster, slurm_project: Project) -> None:
    (slurm_project.root / "weights.bin").write_bytes(os.urandom(SIZE))
    slurm_project.build()
    report, _ = verify(slurm_project)
    assert report["bytes_broadcast"] > SIZE
    begins = Path(report["bundle"]).name.rpartition("-")[2].partition(".")[0]
    place = f"*/envs/{begins}*/site-packages/alpha/__init__.py"
    path = cluster.on("node02", ["find", "/tmp", "-path", place]).stdout.strip()
    cluster.on("node02", ["truncate", "--size=0", path])
    cluster.on("node03", ["rm", path])
    report, said = verify(slurm_project)
    for node, why in (("node02", "it has 0 bytes, not "), ("node03", "it is missing")):
        (line,) = [line for line in said.splitlines() if f"{node}: /tmp" in line]
        assert "alpha/__init__.py" in line
        assert why in line
    assert 0 < report["bytes_broadcast"] < SIZE // 8
    report, said = verify(slurm_project)
    assert report["bytes_broadcast"] == 0
    assert "damaged" not in said
