"""Slurm itself breaks, and the network: what can go on does, and the rest is told of whom it is."""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import pytest

from tests.support.cluster import Cluster
from tests.support.processes import until
from tests.support.provoking import Bench

pytestmark = pytest.mark.slow

ALL = ("--nodes", "3", "--", "train.py")


@contextmanager
def unnoticed(cluster: Cluster) -> Iterator[None]:
    """Slurm does not notice a node's silence while the block runs, however long that takes."""
    conf = cluster.state_dir / "slurm.conf"
    before = conf.read_text()
    conf.write_text(before.replace("SlurmdTimeout=10", "SlurmdTimeout=900"))
    cluster.run(["scontrol", "reconfigure"])
    for node in cluster.nodes:  # since 23.11 it starts all daemons anew
        cluster.wait_state(node, "idle", "mixed", "allocated")
    try:
        yield
    finally:
        conf.write_text(before)
        cluster.run(["scontrol", "reconfigure"])


@contextmanager
def dead_slurmd(cluster: Cluster, node: str) -> Iterator[None]:
    """A node whose slurmd is gone, and Slurm has not noticed."""
    with unnoticed(cluster):
        try:
            cluster.stop_slurmd(node)
            yield
        finally:
            cluster.start_slurmd(node)


@contextmanager
def cut_off(cluster: Cluster, node: str) -> Iterator[None]:
    """A node whose network is gone, which Slurm does not notice while the block runs."""
    with unnoticed(cluster):
        cluster.on(node, ["ip", "link", "set", "eth0", "down"])
        try:
            yield
        finally:
            cluster.on(node, ["ip", "link", "set", "eth0", "up"])


@pytest.mark.full
def test_a_node_that_is_cut_off_while_the_others_are_done(bench: Bench) -> None:
    """It ends no connection: without a look at it, srun would wait for it for minutes."""
    started = bench.start("run", *ALL, "1=sleep", "all=linger")
    bench.at_work(started, 3)
    with cut_off(bench.cluster, "node02"):
        said = bench.finish(started)
    assert (said.code, said.failure["node"]) == (3, "node02"), said.talk
    assert "node02 is lost: it can no longer be reached" in said.talk
    assert "ping node02" in said.talk
    codes = said.report["task_codes"]
    assert (codes["0"], codes["1"] != 0, codes["2"]) == (0, True, 0)
    bench.assert_clean(killed=True)


@pytest.mark.full
def test_a_slurmstepd_that_is_killed(bench: Bench) -> None:
    """srun does not notice, and the node answers: without a look the job would wait for good."""
    started = bench.start("run", *ALL, "1=sleep", "all=linger")
    bench.at_work(started, 3)
    for number, line in bench.processes("node02").items():
        if line.startswith("slurmstepd"):
            with suppress(ProcessLookupError):  # that of a step that has ended meanwhile
                os.kill(number, signal.SIGKILL)
    said = bench.finish(started)
    assert (said.code, said.failure["node"]) == (3, "node02"), said.talk
    assert "nothing of the job runs there any more" in said.talk
    bench.assert_clean(killed=True)


@pytest.mark.parametrize(
    ("dead", "least"),
    [
        ("node02", 2),
        *(pytest.param(*one, marks=pytest.mark.full) for one in (("node01", 2), ("node02", 3))),
    ],
)
def test_a_slurmd_that_dies_before_the_ranks_are_started(
    bench: Bench, dead: str, least: int
) -> None:
    """No rank has begun anywhere: they begin on the others, if these are enough."""
    gate = bench.gate("srun", "--job-name=stager-launch")
    started = bench.start("run", f"--min-nodes={least}", *ALL, "all=none")
    gate.reached(started)
    with dead_slurmd(bench.cluster, dead):
        gate.open()
        said = bench.finish(started)
    assert "launch gave no answer" in said.talk
    assert "Slurm cannot start anything there" in said.talk
    assert f"--exclude={dead}" in said.talk
    ranks = [line for line in bench.lines() if "[RANK" in line]
    if least == 3:
        assert (said.code, said.failure["node"], ranks) == (3, dead, []), said.talk
        assert said.talk.count("gave no answer") == 1
        return
    assert said.code == 0, said.talk
    assert (said.report["left_out"], said.report["world_size"]) == ([dead], 2)
    head = next(node for node in bench.cluster.nodes if node != dead)
    (address,) = {one["address"] for one in bench.events("preflight") if one["node"] == head}
    meeting = f"WORLD_SIZE=2 MASTER_ADDR={address}"
    assert ranks == [f"[RANK 0] {meeting}", f"[RANK 1] {meeting}"]
    bench.assert_clean()


@pytest.mark.full
def test_a_controller_that_is_restarted(bench: Bench) -> None:
    """While it is away no step can be made; it is waited for, which is said once."""
    gate = bench.gate("srun", "--job-name=stager-launch")
    started = bench.start("run", *ALL, "all=none")
    gate.reached(started)
    bench.cluster.stop_controller()
    gate.open()
    waits = "Slurm's controller does not answer"
    try:
        assert until(lambda: any(waits in one["text"] for one in bench.events("note")))
    finally:
        bench.cluster.start_controller()
    said = bench.finish(started)
    assert said.code == 0, said.talk
    assert said.talk.count(waits) == 1
    assert sum("[RANK" in line for line in bench.lines()) == 3
    bench.assert_clean()


def in_front(bench: Bench, command: str, shell: str) -> Path:
    """Put a script in the place of one of Slurm's commands, which becomes it; its folder."""
    folder = bench.logs.parent / f"own-{command}"
    folder.mkdir()
    program = folder / command
    program.write_text(shell.format(folder=folder, real=shutil.which(command)))
    program.chmod(0o755)
    bench.env["PATH"] = f"{folder}:{os.environ['PATH']}"
    return folder


COUNTING = '#!/bin/sh\necho "$*" >>{folder}/calls\nexec {real} "$@"\n'
"""A command that notes with a line that it was started."""


def tries(calls: Path) -> int:
    """How often it was started."""
    return len(calls.read_text().splitlines()) if calls.exists() else 0


def jobs_so_far(cluster: Cluster) -> int:
    """How many jobs Slurm has ever taken."""
    shown = cluster.run(["scontrol", "show", "config"]).stdout
    return int(re.findall(r"NEXT_JOB_ID\s*=\s*(\d+)", shown)[0])


@pytest.mark.full
@pytest.mark.parametrize(("command", "batch"), [("salloc", ()), ("sbatch", ("--batch", "--wait"))])
def test_a_controller_that_is_away_when_nodes_are_asked_for(
    bench: Bench, command: str, batch: tuple[str, ...]
) -> None:
    """They are asked for again until it is back, which is said once; and there is one job."""
    before = jobs_so_far(bench.cluster)
    calls = in_front(bench, command, COUNTING) / "calls"
    bench.cluster.stop_controller()
    try:
        started = bench.start("run", *batch, *ALL, "all=none")
        again = until(lambda: started.poll() is not None or tries(calls) > 1)
    finally:
        bench.cluster.start_controller()
    said = bench.finish(started)
    assert again
    assert said.code == 0, said.talk
    assert said.talk.count("Slurm's controller does not answer") == 1
    assert sum("[RANK" in line for line in bench.lines()) == 3
    assert jobs_so_far(bench.cluster) == before + 1
    bench.assert_clean()


@pytest.mark.full
def test_a_batch_job_that_may_have_been_taken_is_not_submitted_again(bench: Bench) -> None:
    """The controller has the request, and does not answer in time: it acts on it later."""
    calls = in_front(bench, "sbatch", COUNTING) / "calls"
    number = bench.cluster.controller()
    assert number is not None
    os.kill(number, signal.SIGSTOP)
    try:
        said = bench.stager("run", "--batch", *ALL, "all=none")
    finally:
        os.kill(number, signal.SIGCONT)
    assert said.code == 1, said.talk
    assert "Socket timed out" in said.error["message"]
    assert tries(calls) == 1


DAMAGING = """\
#!/bin/sh
# Sends another file than it was told to, as often as there are files once1, once2...
for word in "$@"; do
    case $word in --*|-F*) ;; *) if [ -z "$source" ]; then source=$word; fi ;; esac
done
for once in {folder}/once*; do
    if rm "$once" 2>/dev/null; then
        cp "$source" {folder}/copy
        middle=$(($(stat -c %s "$source") / 2))
        byte=$(od -An -tu1 -j $middle -N 1 "$source")
        printf "\\$(printf %03o $((byte ^ 255)))" |
            dd of={folder}/copy bs=1 seek=$middle conv=notrunc 2>/dev/null
        source={folder}/copy
        break
    fi
done
for word do
    shift
    case $word in --*|-F*) set -- "$@" "$word" ;; esac
    target=$word
done
exec {real} "$@" "$source" "$target"
"""
"""An ``sbcast`` on whose way one byte changes."""


@pytest.mark.full
@pytest.mark.parametrize("times", [1, 2])
def test_a_copy_that_is_damaged_on_its_way(bench: Bench, times: int) -> None:
    """It is sent once more, as the bundle itself is sound; then the way or the node is at fault."""
    folder = in_front(bench, "sbcast", DAMAGING)
    for number in range(times):
        (folder / f"once{number}").touch()
    said = bench.stager("verify", "--nodes", "2", "--transfer", "sbcast")
    assert "was damaged on its way to node01, node02; sending it again" in said.talk
    if times == 1:
        assert said.code == 0, said.talk
    else:
        assert said.code == 3, said.talk
        assert "damaged on its way, twice" in said.problems("node01")
        assert "check the network to node02" in said.problems("node02")
        assert "stager build" not in said.talk
    bench.assert_clean()


@pytest.mark.parametrize("batch", [(), ("--batch",)])
def test_nodes_that_there_never_will_be(bench: Bench, batch: tuple[str, ...]) -> None:
    """Slurm would let the job wait for ever."""
    said = bench.stager("run", *batch, "--nproc-per-node", "8", *ALL, "all=none")
    assert said.code == 1, said.talk
    assert "the job asks for 3 nodes with 8 CPUs each" in said.error["message"]
    assert "partition torch has nodes of up to 4" in said.error["message"]
    assert "--nproc-per-node" in said.error["hint"]
    assert bench.queued() == ""


# --- Ranks that are started again in the same allocation ------------------------------------------

SPARE = ("--nodes", "2", "--spares", "1", "--retries", "2", "--", "train.py")


@pytest.mark.parametrize(
    "how",
    [
        "a rank is killed",
        *(pytest.param(how, marks=pytest.mark.full) for how in ("cut", "dead")),
    ],
)
def test_a_spare_node_takes_the_place_of_another(bench: Bench, how: str) -> None:
    words = ("1=kill-once", "all=linger") if how == "a rank is killed" else ("all=sleep-once",)
    started = bench.start("run", *SPARE, *words)
    bench.at_work(started, 2)
    breaks = {"cut": cut_off, "dead": dead_slurmd}.get(how)
    with breaks(bench.cluster, "node02") if breaks else nullcontext():
        if how == "dead":
            for number in bench.processes("node02"):
                bench.cluster.run(["kill", "-KILL", str(number)], check=False)
        said = bench.finish(started)
    assert said.code == 0, said.talk
    assert (said.report["left_out"], said.report["world_size"]) == (["node02"], 2)
    first, again = bench.events("attempt")
    assert (first["nodes"], first["spares"]) == (["node01", "node02"], ["node03"])
    assert (again["nodes"], again["left_out"]) == (["node01", "node03"], ["node02"])
    expected = "killed" if breaks is None else "node-failure"
    assert again["failed"]["class"] == expected, again
    assert [one["failed"] for one in said.report["restarts"]] == [again["failed"]]
    assert "started again after" in said.talk
    bench.assert_clean(killed=True)
