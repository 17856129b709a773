"""Four hosts with an ``sshd`` each, and a small project that they do not see."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from stager.core.store import Store
from tests.support.air_gap import Inside, made_inside
from tests.support.building import Project, Supplies
from tests.support.cluster import make_hosts, nodes_of, remove_abandoned, remove_cluster
from tests.support.needs import needs
from tests.support.ssh_hosts import SshHosts

RANK = """\
import os, pathlib, shutil, sys, time
rank, world = os.environ["RANK"], os.environ["WORLD_SIZE"]
print(f"[RANK {rank}] WORLD_SIZE={world} mine={os.environ.get('MINE')}", flush=True)
print(f"home={os.environ['HOME']}", flush=True)
secret = os.environ.get("HF_TOKEN", "")
if secret:
    print("token is here", flush=True)
    for entry in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        if entry.exists() and secret.encode() in entry.read_bytes():
            print("token is seen in", entry, flush=True)
if sys.argv[1:2] == ["read"]:
    print("read", pathlib.Path(sys.argv[2]).read_text(), flush=True)
if sys.argv[1:] == ["resume"]:
    step = pathlib.Path("out/step")
    print("step", step.read_text(), flush=True)
    step.write_text("2")
    shutil.rmtree("out/old")
if sys.argv[1:] == ["sleep"] or sys.argv[1:] == ["sleep-once"] and (
    os.environ["STAGER_ATTEMPT"] == "0"
):
    time.sleep(3600)
if rank == "0":
    pathlib.Path("out").mkdir(exist_ok=True)
    pathlib.Path("out/world.txt").write_text(world)
"""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that needs hosts before anything else is built for it."""
    if "hosts" in getattr(item, "fixturenames", ()):
        needs("ssh")


@pytest.fixture(scope="session")
def hosts() -> Iterator[SshHosts]:
    """Four hosts under a name of their own."""
    needs("ssh")
    remove_abandoned()
    name = f"test-{os.getpid()}-ssh"
    try:
        hidden = make_hosts(name, 4)
        yield SshHosts(name=name, nodes=nodes_of(name), hidden=hidden)
    finally:
        remove_cluster(name)


@pytest.fixture(autouse=True)
def own_place(hosts: SshHosts, isolated: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the offline root where no host sees it; hosts choose their node roots."""
    monkeypatch.setenv("OFFLINE_ROOT", str(hosts.hidden / "offline"))
    monkeypatch.delenv("STAGER_NODE_ROOT", raising=False)


@pytest.fixture
def project(
    hosts: SshHosts, index_env: dict[str, str], supplies: Supplies, own_place: None
) -> Path:
    """The folder of a project without torch, built once; no results of another test are in it."""
    root = hosts.hidden / "project"
    for results in root.glob("out*"):
        shutil.rmtree(results)
    if not root.exists():
        root.mkdir()
        (root / "train.py").write_text(RANK)
        (root / "conf").mkdir()
        (root / "conf" / "lr.txt").write_text("lr is 1")
        made = Project(root=root, store=Store(hosts.hidden / "offline"))
        supplies.put_into(made.store)
        made.settings(
            "alpha",
            more='[project]\noutputs = ["out"]\n[launch]\nlauncher = "processes"\nbackend = "gloo"',
        )
        made.build()
    return root


@pytest.fixture
def inside(hosts: SshHosts) -> Iterator[Inside]:
    """The login node behind an air gap, with an empty home."""
    with made_inside(hosts) as made:
        yield made
