"""The relay on real Slurm: the nodes pass the bundle on to each other, without ``sbcast``."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stager.pack.bundle_file import read_manifest
from tests.support.building import Project
from tests.support.cluster import Cluster, make_cluster, remove_cluster

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
        lose(cluster, node, [other])
    yield pair
    for node, other in (pair, pair[::-1]):
        cluster.on(node, ["ip", "neigh", "del", address(cluster, other), "dev", "eth0"])


@pytest.fixture
def apart() -> Iterator[Cluster]:
    """Eight nodes that cannot reach each other: what they send is lost."""
    name = f"test-{os.getpid()}-apart"
    try:
        cluster = make_cluster(name, "--nodes", "8")
        for node in cluster.nodes:
            lose(cluster, node, [other for other in cluster.nodes if other != node])
        yield cluster
    finally:
        remove_cluster(name)


def lose(cluster: Cluster, node: str, others: list[str]) -> None:
    """Lose what a node sends to others, as a firewall that drops does."""
    nobody = "lladdr 02:00:00:00:00:01 dev eth0 nud permanent"
    command = f"for place; do ip neigh replace $place {nobody}; done"
    cluster.on(node, ["sh", "-ec", command, "sh", *(address(cluster, other) for other in others)])


def address(cluster: Cluster, node: str) -> str:
    """The address of a node of the cluster."""
    done = cluster.on(node, ["sh", "-c", "ip -4 -o addr show dev eth0"])
    return done.stdout.split()[3].partition("/")[0]


def staged(project: Project, *options: str) -> tuple[dict[str, Any], list[dict[str, Any]], str]:
    """The result, the events and the talk of a verification; its bundle is relayed by default."""
    options = options or ("--nodes", "3", "--transfer", "relay")
    done = project.stager("verify", "--json", *options)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    [log] = Path(report["log_dir"]).glob(f"events.{report['job_id']}.jsonl")
    return report, [json.loads(line) for line in log.read_text().splitlines()], done.stderr


def renew(project: Project) -> None:
    """Add what no node has yet."""
    (project.root / "new.bin").write_bytes(os.urandom(1 << 20))
    project.build()


def test_nodes_pass_the_bundle_on(
    cluster: Cluster, slurm_project: Project, without_sbcast: Path
) -> None:
    """The whole bundle first; then, where one file has changed, only that layer."""
    report, events, _ = staged(slurm_project)
    size = read_manifest(Path(report["bundle"])).size
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


@pytest.mark.full
def test_nodes_that_cannot_reach_each_other_take_another_way(
    slurm_project: Project, without_sbcast: Path, torn: tuple[str, str]
) -> None:
    """A firewall that drops, and does not refuse."""
    renew(slurm_project)
    report, events, _ = staged(slurm_project)
    assert [node["ok"] for node in report["nodes"]] == [True, True, True]
    assert [event["bytes"] > 1 << 20 for event in events if event["event"] == "sent"] == [True]
    assert not without_sbcast.exists()


@pytest.mark.full
def test_a_few_nodes_that_reach_no_other_get_it_from_the_source(
    slurm_project: Project, apart: Cluster, without_sbcast: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    renew(slurm_project)
    for name, value in apart.env.items():
        monkeypatch.setenv(name, value)
    report, events, said = staged(slurm_project, "--nodes", "8", "--stage", "always")
    [sent] = [event for event in events if event["event"] == "sent"]
    assert sent["relayed"] is True
    assert [node["ok"] for node in report["nodes"]] == [True] * 8
    assert "relay to 8 nodes: sending is asked for" in said
    assert "cannot connect to node0" in said
    assert not without_sbcast.exists()


@pytest.mark.full
def test_a_node_that_does_not_begin_keeps_the_others_from_nothing(
    cluster: Cluster, slurm_project: Project, without_sbcast: Path
) -> None:
    """As one whose disk does not answer: its agent waits for a lock that another process holds."""
    options = ("--nodes", "3", "--transfer", "relay", "--stage", "always", "--min-nodes", "2")
    staged(slurm_project, *options)
    renew(slurm_project)
    hurt = cluster.nodes[1]
    lock = ["flock", "--exclusive", "/tmp/stager-0/.lock", "sh", "-c", "echo held; exec cat"]
    holding = [*cluster.entering(hurt), *lock]
    with subprocess.Popen(holding, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"held\n"
            report, events, said = staged(slurm_project, *options)
        finally:
            holder.communicate()
    assert report["left_out"] == [hurt]
    assert f"{hurt} is lost: no message from it for 20 s" in said
    [sent] = [event for event in events if event["event"] == "sent"]
    assert sent["relayed"] is True
    assert {node["node"] for node in report["nodes"] if node["ok"]} == {*cluster.nodes} - {hurt}
    assert not without_sbcast.exists()


@pytest.mark.full
def test_the_relay_is_what_is_usual(slurm_project: Project, without_sbcast: Path) -> None:
    """And it is remembered how fast it was, for the next forecast."""
    renew(slurm_project)
    report, events, said = staged(slurm_project, "--nodes", "3", "--stage", "always")
    [sent] = [event for event in events if event["event"] == "sent"]
    assert sent["relayed"] is True
    assert [group["how"] for group in report["plan"]["groups"]] == ["relay"]
    assert "relay to 3 nodes: sending is asked for" in said
    assert not without_sbcast.exists()
    history = json.loads((slurm_project.store.root / "history.json").read_text())
    assert [job["relayed"] for job in history["jobs"]] == [True]
