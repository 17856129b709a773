"""One real Slurm cluster for all the tests here."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from stager.core.store import Store
from tests.support.building import Project, Supplies
from tests.support.cluster import (
    REPO,
    Cluster,
    make_cluster,
    remove_abandoned,
    remove_cluster,
)
from tests.support.needs import needs
from tests.support.provoking import bench, large_bench, large_project, small_project  # noqa: F401 - fixtures
from tests.support.slurm_torch import SlurmTorch
from tests.support.torch_project import TorchProject

RANK = """\
import os, sys, time
rank = os.environ["RANK"]
print(f"[RANK {rank}] WORLD_SIZE={os.environ['WORLD_SIZE']}", flush=True)
print("token:", os.environ.get("HF_TOKEN"), "mine:", os.environ.get("MINE"), flush=True)
if sys.argv[1:] == ["fail"] and rank == "1":
    raise ValueError("rank one is unhappy")
if sys.argv[1:] == ["sleep"]:
    time.sleep(3600)
"""
"""A program whose ranks name themselves, and fail or sleep when told to."""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that needs a cluster before anything else is built for it."""
    if {"cluster", "veiled"} & set(getattr(item, "fixturenames", ())):
        needs("slurm")


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Three nodes under a name of their own, so that a user's cluster is not in the way.

    A test that uses it has ``SLURM_CONF`` set, and leaves it to the next one with all nodes idle.
    """
    needs("slurm")
    remove_abandoned()
    name = f"test-{os.getpid()}"
    try:
        yield make_cluster(name)
    finally:
        remove_cluster(name)


@pytest.fixture(scope="session")
def private_home() -> Iterator[Path]:
    """A home that the nodes of ``veiled`` do not see; the login side and other nodes do."""
    home = Path(tempfile.mkdtemp(prefix="stager-home-", dir="/var/tmp"))
    yield home
    shutil.rmtree(home, ignore_errors=True)


@pytest.fixture(scope="session")
def veiled(private_home: Path) -> Iterator[Cluster]:
    """Three more nodes, that see neither ``private_home`` nor the tool that is tested here."""
    needs("slurm")
    name = f"test-{os.getpid()}-veiled"
    tool = Path(sys.prefix).resolve()  # often a directory of the repository, which hides it
    hidden = [private_home, REPO, *([] if tool.is_relative_to(REPO) else [tool])]
    try:
        yield make_cluster(name, *(word for path in hidden for word in ("--hide", str(path))))
    finally:
        remove_cluster(name)


@pytest.fixture(autouse=True)
def slurm_conf(
    request: pytest.FixtureRequest, isolated: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Point Slurm's commands at the cluster that the test uses, and tidy up after the test."""
    wanted = [name for name in ("veiled", "cluster") if name in request.fixturenames]
    if not wanted:
        yield
        return
    used: Cluster = request.getfixturevalue(wanted[0])
    for name, value in used.env.items():
        monkeypatch.setenv(name, value)
    yield
    used.settle()


@pytest.fixture
def shared(cluster: Cluster, request: pytest.FixtureRequest) -> Path:
    """A new directory for this test that the login side and all nodes see."""
    folder = cluster.shared / f"{len(list(cluster.shared.iterdir())):03d}"
    folder.mkdir()
    return folder


@pytest.fixture
def slurm_torch(cluster: Cluster, shared: Path, torch_project: TorchProject) -> SlurmTorch:
    """The project with PyTorch, built once, whose jobs run on the cluster from ``shared``.

    The environments stay on the nodes from test to test; ``clean`` removes them.
    """
    return SlurmTorch(project=torch_project, cluster=cluster, work=shared)


@pytest.fixture
def slurm_project(
    shared: Path,
    index_env: dict[str, str],
    supplies: Supplies,
    monkeypatch: pytest.MonkeyPatch,
) -> Project:
    """A project without torch, whose ranks Slurm starts; built where the nodes can see it."""
    monkeypatch.setenv("OFFLINE_ROOT", str(shared / "offline"))
    monkeypatch.delenv("STAGER_NODE_ROOT", raising=False)  # a directory that only we have
    root = shared / "project"
    root.mkdir()
    (root / "train.py").write_text(RANK)
    made = Project(root=root, store=Store(shared / "offline"))
    supplies.put_into(made.store)
    made.settings("alpha", more='[launch]\nlauncher = "srun"\nbackend = "gloo"')
    made.build()
    return made
