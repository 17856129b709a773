"""A home that the nodes cannot see: results and logs come back through srun, and only so."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from stager.core.store import Store
from stager.pack.bundle_file import read_manifest
from tests.support.building import Project, Supplies
from tests.support.cluster import Cluster, script
from tests.support.processes import until
from tests.support.provoking import ROOT, Bench

pytestmark = pytest.mark.slow

RESULT = """\
import contextlib, os, pathlib, socket, sys, time

def meet(rank, size):  # what one rank does then comes after what all have done
    place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if rank == 0:
        with socket.create_server(place) as server:
            others = [server.accept()[0] for _ in range(size - 1)]
        for other in others:
            other.sendall(b".")
        return
    while True:
        with contextlib.suppress(ConnectionRefusedError):
            with socket.create_connection(place) as head:
                return head.recv(1)
        time.sleep(0.05)

rank, size = os.environ["RANK"], os.environ["WORLD_SIZE"]
print(f"[RANK {rank}] WORLD_SIZE={size}", flush=True)
print("in", os.getcwd(), "token", os.environ.get("HF_TOKEN"), flush=True)
out = pathlib.Path("out")
out.mkdir(exist_ok=True)
(out / f"rank{rank}.txt").write_text(" ".join(sys.argv[1:]) or "fine")
if sys.argv[1:2] == ["large"]:
    (out / f"large{rank}").write_bytes(os.urandom(3 << 20))
print("[LAST]", rank, flush=True)
if sys.argv[-1:] == ["sleep"]:
    time.sleep(3600)
meet(int(rank), int(size))
if sys.argv[1:] == ["fail"] and rank == "3":
    raise ValueError("rank three is unhappy")
"""
SETTINGS = """\
[project]
outputs = ["out"]

[launch]
launcher = "srun"
backend = "gloo"
nproc-per-node = 2
"""


@pytest.fixture
def at_home(
    veiled: Cluster,
    private_home: Path,
    index_env: dict[str, str],
    supplies: Supplies,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Project]:
    """A project that lies in the home with its offline root, its run directory and its logs."""
    base = private_home / "user"
    (base / "project").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(base))
    monkeypatch.setenv("OFFLINE_ROOT", str(base / "offline"))
    monkeypatch.delenv("STAGER_NODE_ROOT", raising=False)
    made = Project(root=base / "project", store=Store(base / "offline"))
    (made.root / "train.py").write_text(RESULT)
    supplies.put_into(made.store)
    made.settings("alpha", more=SETTINGS)
    made.build()
    for node in veiled.nodes:
        assert veiled.on(node, ["ls", str(private_home)]).stdout == ""
    yield made
    shutil.rmtree(base)


def run(project: Project, *arguments: str) -> tuple[int, dict[str, Any], str]:
    """Exit code, JSON and talk of a run on three nodes with two ranks each."""
    bundle = [] if "--bundle" in arguments else ["--bundle", str(newest(project))]
    done = project.stager("run", "--json", "--nodes", "3", *bundle, *arguments)
    return done.returncode, json.loads(done.stdout), done.stderr


def bench_of(cluster: Cluster, project: Project) -> Bench:
    """What tests of ends look at."""
    return Bench(cluster=cluster, root=project.root, logs=project.root.parent / "logs", env={})


def newest(project: Project) -> Path:
    """The project's bundle; results that came home do not make it out of date."""
    return next((project.store.root / "bundles").glob("*.pkgs.tar"))


def rank_logs(project: Project, report: Mapping[str, Any]) -> dict[str, str]:
    """The text of each rank's log, by node and rank; where logs are unless one says otherwise."""
    folder = project.root.parent / "slurm_logs"
    found = folder.glob(f"project.{report['job_id']}.node*.out")
    return {path.name.split(".", 2)[2]: path.read_text() for path in found}


def jobs_left(cluster: Cluster) -> list[Path]:
    """Private directories of jobs that are still on the nodes."""
    return [path for node in cluster.nodes for path in cluster.root(node).glob(f"{ROOT}/jobs/*")]


def assert_logs_complete(project: Project, report: Mapping[str, Any]) -> None:
    logs = rank_logs(project, report)
    assert set(logs) == {f"node0{rank // 2 + 1}.{rank}.out" for rank in range(6)}
    for name, text in logs.items():
        rank = name.split(".")[1]
        assert text.count(f"[RANK {rank}] WORLD_SIZE=6\n") == 1
        assert text.count(f"[LAST] {rank}\n") == 1


def test_results_come_home(
    veiled: Cluster, at_home: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After success and after a failure; what is at home, and was not sent, is not touched."""
    code, report, said = run(at_home, "--", "train.py")
    assert (code, report["world_size"]) == (0, 6), said
    assert "srun:" not in said  # of a step that has ended well, or was ended from here
    assert "CANCELLED" not in said
    assert report["bytes_broadcast"] == read_manifest(Path(report["bundle"])).size
    assert "cannot see the bundle" in report["plan"]["why"]
    [collected] = report["collected"]
    assert (collected["node"], collected["to"]) == ("node01", str(at_home.root))
    assert collected["others"] == ["node02", "node03"]
    assert (collected["files"], collected["renamed"], collected["problems"]) == (6, {}, [])
    out = at_home.root / "out"
    files = [f"rank{rank}.txt" for rank in range(6)]
    assert {path.name: path.read_text() for path in out.iterdir()} == dict.fromkeys(files, "fine")
    assert_logs_complete(at_home, report)
    preflight = at_home.root.parent / "slurm_logs" / f"preflight.{report['job_id']}.txt"
    assert preflight.read_text().count(" proj=missing pkgs=missing ") == 3
    assert f"in {collected['from']}" in "".join(rank_logs(at_home, report).values())
    assert jobs_left(veiled) == []

    monkeypatch.setenv("STAGER_PROJECT_RESUME_LIMIT", "0")
    code, report, said = run(at_home, "--", "train.py", "fail")
    assert (code, report["bytes_broadcast"]) == (3, 0), said
    failure = report["first_failure"]
    assert (failure["node"], failure["rank"]) == ("node02", 3)
    assert failure["cause"] == "ValueError: rank three is unhappy"
    [collected] = report["collected"]
    assert collected["renamed"] == {"out": "out.1"}
    assert "out (6 files, 24 bytes): project.resume-limit is 0" in said
    assert "out.1" in said
    for name in files:
        assert (at_home.root / "out.1" / name).read_text() == "fail"
        assert (out / name).read_text() == "fine"
    assert_logs_complete(at_home, report)
    assert jobs_left(veiled) == []
    assert not list(at_home.root.glob(".stager-*"))
    # What came home is not shipped with the project the next time, under any of its names.
    before = newest(at_home)
    assert at_home.build().packed.path == before


@pytest.mark.full
def test_ctrl_c_while_the_controller_is_away(veiled: Cluster, at_home: Project) -> None:
    """What is on the nodes still goes, should it come back; but nobody waits for minutes."""
    at_home.settings("alpha", more=SETTINGS.replace('["out"]', "[]"))
    bench = bench_of(veiled, at_home)
    argv = ("--nodes", "3", "--bundle", str(newest(at_home)), "--", "train.py", "sleep")
    started = bench.start("run", *argv)
    bench.at_work(started, 6)
    veiled.stop_controller()
    try:
        os.killpg(started.pid, signal.SIGINT)
        said = bench.finish(started)
    finally:
        veiled.start_controller()
    assert said.code == 130, said.talk
    assert "does not answer" in said.talk
    assert "trying again for up to 5 s" in said.talk
    assert f"scancel {bench.job_id()} releases them" in said.talk


@pytest.mark.full
def test_ctrl_c_again_while_results_come_home(veiled: Cluster, at_home: Project) -> None:
    """The first one ends the ranks, the second one the transfer: what came in full is kept."""
    bench = bench_of(veiled, at_home)
    argv = ("--nodes", "3", "--bundle", str(newest(at_home)), "--", "train.py", "large", "sleep")
    started = bench.start("run", *argv)
    bench.at_work(started, 6)
    script("limit", "1mbit", "--name", veiled.name)  # 6 MB take a minute
    try:
        os.killpg(started.pid, signal.SIGINT)
        coming = at_home.root.glob  # a part of the first large file
        assert until(lambda: any(coming(".stager-results.*/**/large0")))
        os.killpg(started.pid, signal.SIGINT)
        said = bench.finish(started)
    finally:
        script("limit", "none", "--name", veiled.name)
    assert said.code == 130, said.talk
    [collected] = said.report["collected"]
    assert collected["files"] < 4
    assert "stager was told to end" in said.talk
    assert f"still on node01 in {collected['from']}" in said.talk
    assert not list(at_home.root.glob(".stager-*"))
    assert not list(at_home.root.glob("out.partial/large0"))
    size = veiled.on("node01", ["stat", "-c", "%s", f"{collected['from']}/out/large0"]).stdout
    assert int(size) == 3 << 20
    bench.assert_clean(killed=True)
