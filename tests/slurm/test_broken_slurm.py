"""Slurm itself breaks, and the network: what can go on does, and the rest is told of whom it is."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cluster import Cluster, script
from processes import until
from provoking import Bench

pytestmark = pytest.mark.slow

ALL = ("--nodes", "3", "--", "train.py")


def controller(cluster: Cluster) -> int | None:
    """The number of the cluster's slurmctld; None while there is none."""
    conf = os.fsencode(cluster.state_dir / "slurm.conf")
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:  # it has ended
            continue
        if words[0].endswith(b"slurmctld") and conf in words:
            return int(entry.name)
    return None


def stop_controller(cluster: Cluster) -> None:
    """End it as a restart would, with all it knows written down."""
    number = controller(cluster)
    assert number is not None
    os.kill(number, signal.SIGTERM)
    assert until(lambda: controller(cluster) is None, 30)


@contextmanager
def dead_slurmd(cluster: Cluster, node: str) -> Iterator[None]:
    """A node whose slurmd is gone, and Slurm has not noticed."""
    number = cluster.slurmd(node)
    assert number is not None
    os.kill(number, signal.SIGKILL)
    try:
        yield
    finally:
        cluster.start_slurmd(node)


@contextmanager
def cut_off(cluster: Cluster, node: str) -> Iterator[None]:
    """A node whose network is gone, which Slurm does not notice while the block runs."""
    conf = cluster.state_dir / "slurm.conf"
    before = conf.read_text()
    conf.write_text(before.replace("SlurmdTimeout=10", "SlurmdTimeout=300"))
    cluster.run(["scontrol", "reconfigure"])
    cluster.on(node, ["ip", "link", "set", "eth0", "down"])
    try:
        yield
    finally:
        cluster.on(node, ["ip", "link", "set", "eth0", "up"])
        conf.write_text(before)
        cluster.run(["scontrol", "reconfigure"])


def test_a_node_that_is_cut_off_while_the_others_are_done(bench: Bench) -> None:
    """It ends no connection: without a look at it, srun would wait for it for minutes."""
    started = bench.start("run", *ALL, "1=sleep", "all=linger")
    bench.at_work(started, 3)
    with cut_off(bench.cluster, "node02"):
        said = bench.finish(started, 100)
    assert (said.code, said.failure["node"]) == (3, "node02"), said.talk
    assert "node02 is lost: others are done, and it cannot be reached any more" in said.talk
    assert "ping node02" in said.talk
    codes = said.report["task_codes"]
    assert (codes["0"], codes["1"] != 0, codes["2"]) == (0, True, 0)
    bench.assert_clean(60, killed=True)


def test_a_slurmstepd_that_is_killed(bench: Bench) -> None:
    """srun does not notice, and the node answers: without a look the job would wait for good."""
    started = bench.start("run", *ALL, "1=sleep", "all=linger")
    bench.at_work(started, 3)
    for number, line in bench.processes("node02").items():
        if line.startswith("slurmstepd"):
            os.kill(number, signal.SIGKILL)
    said = bench.finish(started, 100)
    assert (said.code, said.failure["node"]) == (3, "node02"), said.talk
    assert "nothing of the job runs there any more" in said.talk
    bench.assert_clean(60, killed=True)


def test_a_slurmd_that_has_died_unnoticed(bench: Bench) -> None:
    """The node's name is in what srun says; the others do without it."""
    with dead_slurmd(bench.cluster, "node02"):
        said = bench.stager("run", "--min-nodes", "2", *ALL, "all=none")
    assert said.code == 0, said.talk
    assert said.report["left_out"] == ["node02"]
    assert said.report["world_size"] == 2
    assert "Slurm can start nothing there" in said.talk
    bench.assert_clean()


def test_a_controller_that_is_restarted(bench: Bench) -> None:
    """While it is away no step can be made; it is waited for, which is said once."""
    gate = bench.gate("srun", "--job-name=stager-launch")
    started = bench.start("run", *ALL, "all=none")
    gate.reached(started)
    stop_controller(bench.cluster)
    gate.open()
    waits = "Slurm's controller does not answer"
    try:
        assert until(lambda: any(waits in one["text"] for one in bench.events("note")), 40)
    finally:
        script("up", "--name", bench.cluster.name)
    said = bench.finish(started, 90)
    assert said.code == 0, said.talk
    assert said.talk.count(waits) == 1
    assert sum("[RANK" in line for line in bench.lines()) == 3
    bench.assert_clean()


DAMAGING = """\
#!/bin/sh
# Sends another file than it was told to, as often as there are files once1, once2...
for word in "$@"; do
    case $word in --*|-F*) ;; *) if [ -z "$source" ]; then source=$word; fi ;; esac
done
for once in {folder}/once*; do
    if rm "$once" 2>/dev/null; then
        cp "$source" {folder}/copy
        printf X | dd of={folder}/copy bs=1 seek=$(($(stat -c %s "$source") / 2)) conv=notrunc \
            2>/dev/null
        source={folder}/copy
        break
    fi
done
for word do
    shift
    case $word in --*|-F*) set -- "$@" "$word" ;; esac
    target=$word
done
exec {sbcast} "$@" "$source" "$target"
"""
"""An ``sbcast`` on whose way one byte changes."""


@pytest.mark.parametrize("times", [1, 2])
def test_a_copy_that_is_damaged_on_its_way(bench: Bench, times: int) -> None:
    """It is sent once more, as the bundle itself is sound; then the way or the node is at fault."""
    folder = bench.logs.parent / "damaging"
    folder.mkdir()
    program = folder / "sbcast"
    program.write_text(DAMAGING.format(folder=folder, sbcast=shutil.which("sbcast")))
    program.chmod(0o755)
    for number in range(times):
        (folder / f"once{number}").touch()
    bench.env["PATH"] = f"{folder}:{os.environ['PATH']}"
    said = bench.stager("verify", "--nodes", "2", "--stage", "always")
    assert "was damaged on its way to node01, node02; sending it again" in said.talk
    if times == 1:
        assert said.code == 0, said.talk
    else:
        assert said.code == 3, said.talk
        assert "damaged on its way, twice" in said.problems("node01")
        assert "look at the network to node02" in said.problems("node02")
        assert "stager build" not in said.talk
    bench.assert_clean()


@pytest.mark.parametrize("batch", [(), ("--batch",)])
def test_nodes_that_there_never_will_be(bench: Bench, batch: tuple[str, ...]) -> None:
    """Slurm would let the job wait for ever."""
    said = bench.stager("run", *batch, "--nproc-per-node", "8", *ALL, "all=none", seconds=30)
    assert said.code == 1, said.talk
    assert "the job asks for 8 CPUs a node (8 ranks of 1 CPU)" in said.error["message"]
    assert "the largest node of partition torch has 4" in said.error["message"]
    assert "--nproc-per-node" in said.error["hint"]
    assert bench.queued() == ""
