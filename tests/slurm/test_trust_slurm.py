"""Signatures that are required, on real Slurm: refused before a job, and once more on each node."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stager.trust import locate_signature
from tests.support.building import Project
from tests.support.cluster import Cluster
from tests.support.processes import until
from tests.support.provoking import ROOT, empty_nodes, instead
from tests.support.signing import ALICE, Key, allow, begun_in_time

pytestmark = pytest.mark.slow

HELD = {"SALLOC_OPTS": "--hold"}
TRAIN = "import os, pathlib\npathlib.Path({ran!r}, os.environ['RANK']).touch()\n"


@pytest.fixture
def asking(
    slurm_project: Project, shared: Path, alice: Key, monkeypatch: pytest.MonkeyPatch
) -> Project:
    """A project that requires alice's signature; each of its ranks leaves a file."""
    ran(slurm_project).mkdir()
    (slurm_project.root / "train.py").write_text(TRAIN.format(ran=str(ran(slurm_project))))
    slurm_project.build()
    signers = allow(slurm_project.root.parent, f"{ALICE} {alice.public}")
    monkeypatch.setenv("STAGER_TRUST_ALLOWED_SIGNERS", str(signers))
    monkeypatch.setenv("STAGER_TRUST_REQUIRE", "true")
    return slurm_project


def ran(project: Project) -> Path:
    """Where the ranks leave their files."""
    return project.root.parent / "ran"


def sign(project: Project, key: Key) -> Path:
    """Sign the project's bundle; its path."""
    done = project.stager("sign", "--json", "--key", str(key.private))
    assert done.returncode == 0, done.stderr
    return Path(json.loads(done.stdout)["bundle"])


def job(
    project: Project, action: str, *arguments: str, nodes: int = 3, **env: str
) -> tuple[int, dict[str, Any], str]:
    """Exit code, JSON and talk of a job."""
    options = ["--json", "--nodes", str(nodes), "--log-dir", str(project.root.parent / "logs")]
    command = ["--", "train.py"] if action == "run" else []
    done = project.stager(action, *options, *arguments, *command, env=env)
    return done.returncode, json.loads(done.stdout), done.stderr


def released(cluster: Cluster, project: Project, number: str) -> str:
    """Let a job that was held run to its end; its log."""
    cluster.run(["scontrol", "release", number])
    assert until(lambda: cluster.ended(number))
    return (project.root.parent / "logs" / f"project.{number}.batch.out").read_text()


def environments(cluster: Cluster) -> list[Path]:
    return [path for node in cluster.nodes for path in cluster.root(node).glob(f"{ROOT}/envs/*")]


@pytest.fixture
def empty(cluster: Cluster) -> Cluster:
    """The cluster, with no environment on any node."""
    empty_nodes(cluster)
    return cluster


@pytest.mark.full
def test_a_key_that_expires_in_the_queue(empty: Cluster, asking: Project, alice: Key) -> None:
    """Each node refuses the bundle before it has a directory of it."""

    def submit() -> str | None:
        code, report, said = job(asking, "run", "--batch", **HELD)
        assert code == 0 or "key has expired" in said, said
        return None if code else str(report["job_id"])

    sign(asking, alice)
    number = begun_in_time(asking.root.parent, alice, submit)
    log = released(empty, asking, number)
    assert log.count("the bundle's signature is not accepted") >= 3, log
    assert "key has expired" in log
    assert [*ran(asking).iterdir()] == []
    assert environments(empty) == []


def test_a_job_in_the_queue_keeps_the_signature_and_the_signers_it_was_accepted_with(
    cluster: Cluster, asking: Project, alice: Key, mallory: Key
) -> None:
    """Nodes may see neither file; a new job is held to what is there then."""
    bundle = sign(asking, alice)
    code, report, said = job(asking, "run", "--batch", **HELD)
    assert code == 0, said
    locate_signature(bundle).unlink()
    allow(asking.root.parent, f"{ALICE} {mallory.public}")
    log = released(cluster, asking, report["job_id"])
    assert {path.name for path in ran(asking).iterdir()} == {"0", "1", "2"}, log
    code, _, said = job(asking, "run", "--batch")
    assert code == 1, said


@pytest.mark.parametrize("place", [700, pytest.param(-3000, marks=pytest.mark.full)])
def test_a_bundle_that_is_altered_in_the_queue(
    empty: Cluster, asking: Project, alice: Key, place: int
) -> None:
    """In its manifest or in a layer: the signature is still that of the id, the bytes are not."""
    bundle = sign(asking, alice)
    code, report, said = job(asking, "run", "--batch", **HELD)
    assert code == 0, said
    data = bytearray(bundle.read_bytes())
    data[place] ^= 1
    bundle.write_bytes(data)
    log = released(empty, asking, report["job_id"])
    assert [*ran(asking).iterdir()] == [], log
    assert environments(empty) == []


@pytest.mark.full
def test_a_node_without_ssh_keygen_is_named(cluster: Cluster, asking: Project, alice: Key) -> None:
    sign(asking, alice)
    with instead(cluster, "node02", {"/usr/bin/ssh-keygen": Path("/dev/null")}):
        code, _, said = job(asking, "run")
    assert code == 0, said
    assert "node02: the bundle's signature was not checked there, only its id" in said
    assert "node01" not in said[said.index("was not checked there") - 60 :].splitlines()[0]
