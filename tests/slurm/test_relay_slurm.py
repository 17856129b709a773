"""How the bundle comes to the nodes of a real Slurm: the plan, and the relay without ``sbcast``."""

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
from tests.support.cluster import Cluster
from tests.support.provoking import empty_nodes
from tests.support.torch_project import STAGER

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
    nobody = ("lladdr", "02:00:00:00:00:01", "dev", "eth0", "nud", "permanent")
    for node, other in (pair, pair[::-1]):
        cluster.on(node, ["ip", "neigh", "replace", cluster.address(other), *nobody])
    yield pair
    for node, other in (pair, pair[::-1]):
        cluster.on(node, ["ip", "neigh", "del", cluster.address(other), "dev", "eth0"])


def staged(project: Project, *options: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The result and the events of a verification; its bundle is relayed by default."""
    options = options or ("--transfer", "relay")
    done = project.stager("verify", "--json", "--nodes", "3", *options)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    [log] = Path(report["log_dir"]).glob(f"events.{report['job_id']}.jsonl")
    return report, [json.loads(line) for line in log.read_text().splitlines()]


def renew(project: Project) -> str:
    """Add what no node has yet; the new bundle's id."""
    (project.root / "new.bin").write_bytes(os.urandom(1 << 20))
    return read_manifest(project.build().packed.path).id


def test_a_plan_and_why(cluster: Cluster, slurm_project: Project) -> None:
    """In an allocation that stands: one line says which way, and a dry run ends with it."""
    bundle_id = renew(slurm_project)
    logs = str(slurm_project.root.parent / "logs")
    for stage, said, how in (
        ("auto", "3 nodes read the shared bundle: reading", "shared"),
        ("always", "relay to 3 nodes: sending is asked for", "relay"),
    ):
        options = ["--dry-run", "--json", "--stage", stage, "--log-dir", logs, "--", "train.py"]
        done = subprocess.run(
            ["salloc", "--nodes=3", STAGER, "run", *options],
            cwd=slurm_project.root,
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        plan = json.loads(done.stdout)["plan"]
        assert plan["why"].startswith(said)
        assert plan["why"] in done.stderr
        assert (plan["bytes"] > 1 << 20) is (how == "relay")
        [group] = plan["groups"]
        assert (group["nodes"], group["how"]) == (list(cluster.nodes), how)
        assert "\n" not in plan["why"]
    for node in cluster.nodes:
        made = ["test", "-e", f"/tmp/stager-0/envs/{bundle_id}"]
        assert cluster.on(node, made, check=False).returncode == 1


def test_nodes_pass_the_bundle_on(
    cluster: Cluster, slurm_project: Project, without_sbcast: Path
) -> None:
    """The whole bundle first; then, where one file has changed or is damaged, only that layer."""
    empty_nodes(cluster)
    report, events = staged(slurm_project)
    size = read_manifest(Path(report["bundle"])).size
    assert [event["bytes"] for event in events if event["event"] == "sent"] == [size]
    assert all(node["ok"] for node in report["nodes"])
    (slurm_project.root / "more.py").write_text("print('more')\n")
    slurm_project.build()
    _, events = staged(slurm_project)
    [changed] = [event["bytes"] for event in events if event["event"] == "sent"]
    assert 0 < changed < size / 2

    begins = Path(report["bundle"]).name.rpartition("-")[2].partition(".")[0]
    place = f"*/envs/{begins}*/site-packages/alpha/__init__.py"
    find = ["find", "/tmp", "-path", place]
    path = cluster.on("node02", find).stdout.strip()
    cluster.on("node02", ["truncate", "--size=0", path])
    report, events = staged(slurm_project)
    [again] = [event["bytes"] for event in events if event["event"] == "sent"]
    assert 0 < again < size / 2
    notes = [event["text"] for event in events if event["event"] == "note"]
    assert any("node02" in note and "alpha/__init__.py" in note for note in notes)
    assert staged(slurm_project)[0]["bytes_broadcast"] == 0
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
    report, events = staged(slurm_project)
    assert [node["ok"] for node in report["nodes"]] == [True, True, True]
    assert [event["bytes"] > 1 << 20 for event in events if event["event"] == "sent"] == [True]
    assert not without_sbcast.exists()
