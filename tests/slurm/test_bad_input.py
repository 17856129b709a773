"""What can be wrong with nodes and with Slurm: named, with a remedy, and nothing stays behind."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import time

import pytest

from bundle.system.network import FIRST_PORT, choose_port
from tests.support.building import HOST
from tests.support.cluster import Cluster
from tests.support.incidents import FULL, event_log
from tests.support.needs import lacks
from tests.support.node_faults import listening, only_python, other_pythons
from tests.support.provoking import ROOT, STAGER, Bench, Said, instead

pytestmark = pytest.mark.slow


def test_no_slurm_commands(bench: Bench, tmp_path: Path) -> None:
    """No node is to blame, so it is a mistake in the call: exit status 1."""
    bench.env["PATH"] = str(tmp_path)
    said = bench.stager("verify", "--nodes", "3")
    assert said.code == 1
    assert "the job needs 3 nodes, and Slurm is not available here" in said.error["message"]
    assert "not on PATH: salloc, sbatch, srun" in said.error["message"]
    assert "login node" in said.error["hint"]
    assert "--allocation local" in said.error["hint"]


@pytest.mark.full
def test_some_commands_are_missing_inside_an_allocation(bench: Bench, tmp_path: Path) -> None:
    for name in ("srun", "scontrol", "squeue"):
        (tmp_path / name).symlink_to(str(shutil.which(name)))
    bench.env |= {"PATH": str(tmp_path), "SLURM_JOB_ID": "7"}
    said = bench.stager("verify", "--nodes", "3")
    assert said.code == 1
    assert "job 7: Slurm's commands are missing here" in said.error["message"]
    assert "not on PATH: sbcast" in said.error["message"]


@pytest.mark.full
def test_a_number_that_comes_again_after_slurm_was_set_up_anew(bench: Bench) -> None:
    """What the older job left is neither believed nor lost; two commands may share a number."""
    used = bench.cluster.run(["sbatch", "--parsable", "--output=/dev/null", "--wrap=true"]).stdout
    number = str(int(used) + 1)
    old = event_log(bench.logs, {"n2": [FULL]}, job_id=number, ended=time() - 3600)
    log = bench.logs / f"older.{number}.node01.0.out"
    log.write_text("RuntimeError: of the older job\n")
    said = bench.stager("run", "--batch", "--wait", "--nodes", "1", "--", "train.py")
    assert (said.code, said.report["job_id"]) == (0, number), said.talk
    (folder,) = bench.logs.glob(f"older-{number}-*")
    assert f"files of another job {number} have been moved to {folder}" in said.talk
    assert {path.name for path in folder.iterdir()} == {old.name, log.name}
    (begun,) = bench.events("job")
    config = bench.cluster.run(["scontrol", "show", "config"]).stdout
    assert f"= {begun['cluster']}\n" in config
    assert "of the older job" not in " ".join(bench.lines())

    argv = [STAGER, "verify", "--log-dir", str(bench.logs), "--nodes", "1"]
    twice = f"cd {shlex.quote(str(bench.root))} && {shlex.join(argv)} && {shlex.join(argv)}"
    variables = [f"{name}={value}" for name, value in bench.env.items()]
    bench.cluster.run(["env", *variables, "salloc", "--nodes=1", "sh", "-c", twice])
    assert len(bench.events("job")) == 3
    assert len(list(bench.logs.glob("older-*"))) == 1


@pytest.mark.full
def test_a_disk_that_fills_before_the_broadcast(bench: Bench) -> None:
    """Slurm says no more than "Unspecified error"."""
    with before_sbcast(bench) as (started, _):
        bench.cluster.on("node02", ["mount", "-o", "remount,size=1M", "/tmp"])
    try:
        said = bench.finish(started)
    finally:
        bench.cluster.on("node02", ["mount", "-o", "remount,size=100%", "/tmp"])
    assert_named(said, "node02", "the bundle could not be sent to the node", " are free")
    assert f"/{ROOT}/incoming there" in said.problems("node02")
    bench.assert_clean()
    assert not list((bench.place("node02") / "envs").iterdir())


@pytest.mark.full
def test_a_place_that_cannot_be_written(bench: Bench) -> None:
    place = f"/{ROOT}/incoming"
    with before_sbcast(bench) as (started, number):
        bench.cluster.on("node02", ["mount", "--bind", place, place])
        bench.cluster.on("node02", ["mount", "-o", "remount,ro,bind", place])
    try:
        said = bench.finish(started)
    finally:
        bench.cluster.on("node02", ["umount", "--lazy", place])
    (bench.place("node02") / "incoming" / f"job-{number}.0").rmdir()  # the agent could not
    assert_named(
        said, "node02", "Read-only file system", "the free space and the permissions there"
    )
    bench.assert_clean()


@pytest.mark.full
def test_a_file_that_is_there_already(bench: Bench) -> None:
    """It can only be this job's own, so it is replaced: the longer one leaves no end behind."""
    with before_sbcast(bench) as (started, number):
        file = bench.place("node02") / "incoming" / f"job-{number}.0" / "bundle.tar"
        file.write_bytes(b"x" * (20 << 20))
    said = bench.finish(started)
    assert said.code == 0, said.talk
    assert said.report["bytes_broadcast"] == said.report["plan"]["bytes"] > 0
    bench.assert_clean()


@pytest.mark.full
def test_a_node_lost_before_the_launch(bench: Bench) -> None:
    gate = bench.gate("srun", "--job-name=stager-launch")
    started = bench.start("run", "--nodes", "3", "--", "train.py", "all=sleep")
    gate.reached(started)
    bench.cluster.lose("node02")
    gate.open()
    said = bench.finish(started)
    assert said.code == 3, said.talk
    assert (said.failure["node"], said.failure["class"]) == ("node02", "node-failure")
    assert "Slurm cannot start anything there" in said.failure["cause"]
    assert "--exclude=node02" in said.failure["hint"]
    bench.assert_clean()


@pytest.mark.full
def test_a_node_lost_before_the_broadcast(bench: Bench) -> None:
    with before_sbcast(bench) as (started, _):
        bench.cluster.lose("node03")
    said = bench.finish(started)
    assert_named(said, "node03", "--exclude=node03")
    bench.assert_clean()


def test_a_node_without_python(bench: Bench) -> None:
    with only_python(bench.cluster, "node02", "exit 127", bench.logs.parent):
        said = bench.stager("verify", "--nodes", "3")
    assert_named(said, "node02", "no Python 3.9 or newer was found", "--exclude=node02")
    bench.assert_clean()


@pytest.mark.full
def test_a_node_whose_python_is_too_old(bench: Bench) -> None:
    old = other_pythons(range(5, 9))
    if not old:
        lacks("older python", "there is none here")
    with only_python(bench.cluster, "node02", f'exec {old[-1]} "$@"', bench.logs.parent):
        said = bench.stager("verify", "--nodes", "3")
    assert_named(said, "node02", "no Python 3.9 or newer was found", "--exclude=node02")
    bench.assert_clean()


@pytest.mark.full
def test_a_node_whose_python_is_another_one(bench: Bench) -> None:
    others = other_pythons(range(9, 20))
    if not others:
        lacks("other python", "there is only one here")
    with only_python(bench.cluster, "node02", f'exec {others[0]} "$@"', bench.logs.parent):
        said = bench.stager("verify", "--nodes", "3")
    said_so = (f"there is no CPython {HOST.python}", f"put python{HOST.python} on PATH")
    assert_named(said, "node02", *said_so)
    bench.assert_clean()


@pytest.mark.full
def test_a_head_that_takes_its_name_for_loopback(bench: Bench) -> None:
    """As Debian's /etc/hosts has it; where it has one other address, that one is meant."""
    hosts = bench.logs.parent / "hosts"
    hosts.write_text("127.0.0.1 localhost\n127.0.1.1 node01\n")
    address = bench.cluster.address("node01")
    with instead(bench.cluster, "node01", {"/etc/hosts": hosts}):
        said = bench.stager("run", "--nodes", "2", "--", "train.py")
        assert said.code == 0, said.talk
        assert f"[RANK 1] WORLD_SIZE=2 MASTER_ADDR={address}" in bench.lines()
        link = interface(bench.cluster, "node01")
        more = ["ip", "address", "add", "192.0.2.1/24", "dev", link]
        bench.cluster.on("node01", more)
        try:
            said = bench.stager("verify", "--nodes", "2")
            named = bench.stager("verify", "--nodes", "2", "--interface", link)
        finally:
            bench.cluster.on("node01", [*more[:2], "del", *more[3:]])
    assert_named(said, "node01", f"{link} {address}, {link} 192.0.2.1", "--interface")
    assert named.code == 0, named.talk
    bench.assert_clean()


@pytest.mark.full
def test_a_port_that_is_taken(bench: Bench) -> None:
    for many in (1, 64):
        gate = bench.gate("srun", "--job-name=stager-preflight")
        started = bench.start("verify", "--nodes", "2")
        port = choose_port(gate.reached(started))
        assert port < FIRST_PORT + 4000  # not at the end, where they go round
        with listening(bench.cluster, "node01", port, port + many):
            gate.open()
            said = bench.finish(started)
        if many == 1:
            assert said.code == 0, said.talk
            told = {event["node"]: event for event in bench.events("preflight")}
            assert told["node01"]["port"] == port + 1
    assert_named(said, "node01", f"none of the 64 ports from {port} up can be used")
    assert "end the processes that earlier jobs left" in said.problems("node01")
    bench.assert_clean()


@pytest.mark.full
def test_a_map_with_an_interface_that_is_not_there(bench: Bench) -> None:
    bundle = next((bench.root.parent / "offline" / "bundles").glob("*.pkgs.tar"))
    folder = bench.logs.parent / "other"
    folder.mkdir()
    (folder / "stager.toml").write_text(
        '[environment]\nrequirements = []\n[launch]\ninterface = { "node0[2-3]" = "ib7" }\n'
    )
    bench.root = folder
    said = bench.stager("verify", "--nodes", "2", "--bundle", str(bundle))
    assert_named(said, "node02", "this node has no such interface", "ib7")
    there = f"{interface(bench.cluster, 'node02')} {bench.cluster.address('node02')}"
    assert there in said.problems("node02")
    assert "[launch] interface" in said.problems("node02")
    bench.assert_clean()


def assert_named(said: Said, node: str, *words: str) -> None:
    """Exit status 3, that node and no other, the words, and how to go on without it."""
    assert said.code == 3, said.talk
    assert [one["node"] for one in said.report["nodes"] if one["problems"]] == [node], said.talk
    for word in words:
        assert word in said.problems(node)
    assert f"--exclude={node}" in said.talk


def interface(cluster: Cluster, node: str) -> str:
    """Name of the interface that has the node's address."""
    lines = cluster.on(node, ["ip", "-o", "-4", "address"]).stdout.splitlines()
    return next(line.split()[1] for line in lines if cluster.address(node) in line)


@contextmanager
def before_sbcast(bench: Bench) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A job of three nodes that is just about to send; its number. It goes on afterwards."""
    gate = bench.gate("sbcast")
    started = bench.start("verify", "--nodes", "3", "--transfer", "sbcast")
    yield started, gate.reached(started)
    gate.open()
