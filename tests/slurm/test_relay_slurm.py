"""The relay on real Slurm: the nodes pass the bundle on to each other, without ``sbcast``."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.building import Project
from tests.support.cluster import Cluster

pytestmark = pytest.mark.slow

BROKEN_SBCAST = """\
#!/bin/sh
echo called >>{note}
exit 1
"""


@pytest.fixture
def without_sbcast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An ``sbcast`` that fails; the file that it leaves a note in."""
    note, programs = tmp_path / "called", tmp_path / "programs"
    programs.mkdir()
    (programs / "sbcast").write_text(BROKEN_SBCAST.format(note=note))
    (programs / "sbcast").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    return note


@pytest.fixture
def torn(cluster: Cluster) -> Iterator[tuple[str, str]]:
    """Two nodes, not the first: what they send to each other is lost, until the test is over."""
    pair = cluster.nodes[1], cluster.nodes[2]
    for node, other in (pair, pair[::-1]):
        nobody = ["lladdr", "02:00:00:00:00:01", "nud", "permanent"]
        cluster.on(
            node, ["ip", "neigh", "replace", address(cluster, other), "dev", "eth0", *nobody]
        )
    yield pair
    for node, other in (pair, pair[::-1]):
        cluster.on(node, ["ip", "neigh", "del", address(cluster, other), "dev", "eth0"])


def address(cluster: Cluster, node: str) -> str:
    """The address of a node of the cluster."""
    done = cluster.on(node, ["sh", "-c", "ip -4 -o addr show dev eth0"])
    return done.stdout.split()[3].partition("/")[0]


def staged(project: Project, *options: str) -> tuple[dict[str, Any], list[dict[str, Any]], str]:
    """The result, the events and the talk of a verification whose bundle is relayed."""
    done = project.stager("verify", "--json", "--nodes", "3", "--transfer", "relay", *options)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    [log] = Path(report["log_dir"]).glob(f"events.{report['job_id']}.jsonl")
    return report, [json.loads(line) for line in log.read_text().splitlines()], done.stderr


def test_nodes_pass_the_bundle_on(
    cluster: Cluster, slurm_project: Project, without_sbcast: Path
) -> None:
    """The whole bundle first; then, where one file has changed, only that layer."""
    report, events, _ = staged(slurm_project)
    size = Path(report["bundle"]).stat().st_size
    assert [event["bytes"] for event in events if event["event"] == "sent"] == [size]
    assert all(node["ok"] for node in report["nodes"])
    (slurm_project.root / "more.py").write_text("print('more')\n")
    slurm_project.build()
    _, events, _ = staged(slurm_project)
    [changed] = [event["bytes"] for event in events if event["event"] == "sent"]
    assert 0 < changed < size / 2
    assert not without_sbcast.exists()
    for node in cluster.nodes:
        left = cluster.on(node, ["sh", "-c", "ls /tmp/stager-0/incoming"]).stdout
        assert left == ""


def test_nodes_that_cannot_reach_each_other_take_another_way(
    slurm_project: Project, without_sbcast: Path, torn: tuple[str, str]
) -> None:
    """A firewall that drops, and does not refuse."""
    (slurm_project.root / "new.bin").write_bytes(os.urandom(1 << 20))
    slurm_project.build()
    report, events, _ = staged(slurm_project)
    assert [node["ok"] for node in report["nodes"]] == [True, True, True]
    assert [event["bytes"] > 1 << 20 for event in events if event["event"] == "sent"] == [True]
    assert not without_sbcast.exists()
