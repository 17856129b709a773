"""Twenty failures provoked on a real cluster: of each the first node, the rank and the class.

Every job is diagnosed twice: by ``stager run`` when it ends, and later from its files alone. What
``stager`` does not let happen, somebody else's launcher does.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from bundle.format.archive import BundleFile
from bundle.system.network import choose_port
from tests.support.bundles import rot
from tests.support.cluster import Cluster, make_cluster, remove_cluster
from tests.support.failing import (
    LOGS,
    Scene,
    Told,
    an_urgent_partition,
    little_memory,
    make_scene,
    mounted,
    remounted,
    told,
)
from tests.support.interpreters import other_pythons
from tests.support.node_faults import listening, only_python
from tests.support.provoking import empty_nodes, instead

pytestmark = pytest.mark.slow

PORT = 29500
TORCHRUN = (
    f"srun --ntasks-per-node=1 --kill-on-bad-exit=1 --output=$1/{LOGS} bash -c 'exec "
    f"{sys.executable} -m torch.distributed.run --nnodes=3 --nproc-per-node=2 "
    f"--node-rank=$SLURM_NODEID --master-addr=node01 --master-port={PORT} failing.py WORDS'\n"
)
"""One torchrun a node, as many a batch script starts them; logs are named by node."""
SRUN = (
    f"srun --ntasks-per-node=1 --kill-on-bad-exit=1 --output=$1/{LOGS} bash -c '"
    f"RANK=$SLURM_PROCID WORLD_SIZE=3 MASTER_ADDR=node01 MASTER_PORT={PORT} "
    f"exec {sys.executable} failing.py WORDS'\n"
)
"""One rank a task, with the variables set by hand."""


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """Two jobs that Slurm ends by itself, which takes it half a minute and more."""

    limited: Scene
    limited_job: subprocess.Popen[str]
    bereft: Scene
    bereft_job: subprocess.Popen[str]


@pytest.fixture(scope="module", autouse=True)
def waiting(small_project: Path, cluster: Cluster) -> Iterator[Waiting]:
    """Both are begun before all other tests, on a cluster of their own, and looked at last."""
    name = f"{cluster.name}-waiting"
    try:
        own = make_cluster(name)
        env = {**own.env, "HOME": str(own.shared), "STAGER_NODE_ROOT": "/tmp"}
        scenes = [make_scene(own, small_project, own.shared / one, **env) for one in ("1", "2")]
        limited = scenes[0].start(
            "all=sleeps", options=("--nodes", "1", "--exclude", "node02,node03", "--time", "5")
        )
        bereft = scenes[1].start("all=sleeps", options=("--nodes", "2", "--exclude", "node01"))
        scenes[0].bench.at_work(limited, 2)
        update = f"JobId={scenes[0].bench.job_id()}"
        own.run(["scontrol", "update", update, "EndTime=now+1"])
        scenes[1].bench.at_work(bereft, 4)
        own.lose("node03")
        yield Waiting(limited=scenes[0], limited_job=limited, bereft=scenes[1], bereft_job=bereft)
    finally:
        remove_cluster(name)


@pytest.fixture
def scene(
    cluster: Cluster, small_project: Path, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> Scene:
    """A directory of this test's own; what earlier ones have staged stays on the nodes."""
    monkeypatch.delenv("STAGER_NODE_ROOT", raising=False)  # a directory that only we have
    return make_scene(cluster, small_project, shared)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("1=fetches_data", Told("node01", 1, "missing-asset")),
        *(
            pytest.param(*row, marks=pytest.mark.full)
            for row in (
                ("4=is_killed", Told("node03", 4, "killed")),
                ("3=raises", Told("node02", 3, "python-error")),
                ("2=asks_for_too_much", Told("node02", 2, "out-of-memory")),
                ("5=lacks_a_module", Told("node03", 5, "missing-module")),
                ("2=does_not_copy", Told("node02", 2, "environment")),
            )
        ),
    ],
)
def test_a_rank(scene: Scene, words: str, expected: Told) -> None:
    """It fails by itself; the others would sleep on, and are ended because of it."""
    said = scene.run(words, "all=sleeps")
    found = scene.assert_told(said, expected)
    assert said.report["consequences"] == found["consequences"]
    assert expected.rank not in found["consequences"]


def test_a_rank_that_the_kernel_kills_for_memory(scene: Scene) -> None:
    with little_memory() as group:
        scene.bench.env["GROUP"] = str(group)
        said = scene.run("4=uses_too_much", "all=sleeps")
    found = scene.assert_told(said, Told("node03", 4, "out-of-memory"))
    assert found["first_failure"]["exit_code"] == -9


@pytest.mark.full
@pytest.mark.parametrize(
    ("options", "words", "expected"),
    [
        ("ro", "0=saves", Told("node01", 0, "environment")),
        ("size=4M", "2=fills_the_disk", Told("node02", 2, "disk-full")),
    ],
)
def test_a_rank_that_cannot_write(scene: Scene, options: str, words: str, expected: Told) -> None:
    """A checkpoint to a file system that is read-only, or predictions until it is full."""
    with mounted(scene.cluster, expected.node, options):
        said = scene.run(words, "all=sleeps", options=("--nodes", "2"))
    scene.assert_told(said, expected)


def test_a_disk_that_is_full_when_the_bundle_comes(scene: Scene) -> None:
    empty_nodes(scene.cluster)
    gate = scene.bench.gate("sbcast")
    started = scene.start("all=sleeps", options=("--transfer", "sbcast"))
    gate.reached(started)
    with remounted(scene.cluster, "node02", "size=1M", "size=100%"):
        gate.open()
        said = scene.finish(started)
    scene.assert_told(said, Told("node02", None, "disk-full"))


@pytest.mark.full
def test_a_rank_that_hangs(scene: Scene) -> None:
    """The others time out in a collective that it does not come to."""
    said = scene.run("1=does_not_come", "all=meets", options=("--nproc-per-node", "1"))
    found = scene.assert_told(said, Told("node02", 1, "hang"))
    assert (found["missing_ranks"], found["consequences"]) == ([1], [0, 2])


@pytest.mark.full
def test_an_interface_that_is_not_there(scene: Scene) -> None:
    with (scene.bench.root / "stager.toml").open("a") as settings:
        settings.write('interface = { "node0[2-3]" = "ib7" }\n')
    scene.assert_told(scene.run("all=sleeps"), Told("node02", None, "interface"))


@pytest.mark.full
def test_ports_that_are_taken(scene: Scene) -> None:
    gate = scene.bench.gate("srun", "--job-name=stager-preflight")
    started = scene.start("all=sleeps")
    port = choose_port(gate.reached(started))
    with listening(scene.cluster, "node01", port, port + 64):
        gate.open()
        said = scene.finish(started)
    scene.assert_told(said, Told("node01", None, "port"))


@pytest.mark.full
def test_another_python(scene: Scene) -> None:
    shell = "exit 127"
    for other in other_pythons(range(9, 20))[:1]:
        # A copy: where the node's own is of that version, the script would start itself for ever.
        copy = shutil.copy2(other, scene.bench.logs.parent / "another-python")
        shell = f'exec {copy} "$@"'
    with only_python(scene.cluster, "node02", shell, scene.bench.logs.parent):
        said = scene.run("all=sleeps")
    scene.assert_told(said, Told("node02", None, "environment"))


@pytest.mark.full
def test_a_place_where_nothing_can_be_executed(scene: Scene) -> None:
    empty_nodes(scene.cluster)
    scene.bench.env["STAGER_NODE_ROOT"] = "/tmp"  # no other place will do
    with remounted(scene.cluster, "node03", "noexec", "exec"):
        said = scene.run("all=sleeps")
    scene.assert_told(said, Told("node03", None, "environment"))


@pytest.mark.full
def test_a_damaged_layer(scene: Scene) -> None:
    """One node sees other bytes of the last layer than the rest."""
    empty_nodes(scene.cluster)
    with BundleFile(str(scene.bundle)) as bundle:
        layer = scene.bundle.parents[1] / bundle.manifest.layers[-1].member
    copy = scene.bench.root / "damaged.tar"
    copy.write_bytes(layer.read_bytes())
    rot(copy)
    with instead(scene.cluster, "node03", {str(layer): copy}):
        said = scene.run("all=sleeps")
    scene.assert_told(said, Told("node03", None, "damaged-copy"))


def test_preemption(scene: Scene) -> None:
    with an_urgent_partition(scene.cluster) as partition:
        started = scene.start("all=sleeps")
        scene.bench.at_work(started, 6)
        scene.cluster.run(["srun", f"--partition={partition}", "--exclusive", "true"])
        said = scene.finish(started)
    assert said.report["ended_by"] == "preempted"
    scene.assert_told(said, Told("", None, "preemption"))


@pytest.mark.full
@pytest.mark.parametrize(
    ("words", "expected", "others"),
    [
        ("3=raises all=sleeps", Told("node02", 3, "python-error"), None),
        ("3=does_not_come all=meets", Told("node02", 3, "hang"), [0, 1, 2, 4, 5]),
        ("all=meets", Told("node01", None, "port"), None),
    ],
)
def test_somebody_elses_torchrun(
    scene: Scene, words: str, expected: Told, others: list[int] | None
) -> None:
    """Two ranks in each, and so in each log; no name says which is which.

    In the last one it is torchrun that fails, before it has ranks: its port is taken.
    """
    with ExitStack() as taken:
        if expected.kind == "port":
            taken.enter_context(listening(scene.cluster, "node01", PORT, PORT + 1))
        found = scene.theirs(TORCHRUN.replace("WORDS", words))
    assert told(found["first_failure"]) == expected, found
    assert others in (None, found["consequences"])


@pytest.mark.full
def test_somebody_elses_head_that_cannot_be_resolved(scene: Scene) -> None:
    hosts = scene.bench.root / "hosts"
    hosts.write_text("127.0.0.1 localhost\n")
    with instead(scene.cluster, "node02", {"/etc/hosts": hosts}):
        # The others wait for it however late it begins, and are ended when it has failed.
        patient = "PATIENCE=$((SLURM_PROCID == 1 ? 4 : 60)) MASTER_ADDR=node01"
        script = SRUN.replace("MASTER_ADDR=node01", patient).replace("WORDS", "all=meets")
        found = scene.theirs(script)
    assert told(found["first_failure"]) == Told("node02", 1, "name-resolution")


@pytest.mark.full
@pytest.mark.parametrize(
    ("size", "expected"),
    [(4, Told("node01", 0, "rendezvous")), (2, Told("node03", 2, "rendezvous"))],
)
def test_somebody_elses_world_size(scene: Scene, size: int, expected: Told) -> None:
    """Three ranks: the head waits for one more, or the last one is one too many."""
    # Ranks that have met stay: one that ends would be aborted now and then, with its group open.
    words = "2=meets all=does_not_come" if size < 3 else "all=meets"
    meeting = f"WORLD_SIZE={size} RANKS=3 PATIENCE=10"
    script = SRUN.replace("WORLD_SIZE=3", meeting).replace("WORDS", words)
    if size > 3:  # the others give up a second earlier, and it would be ended before it said why
        script = script.replace("--kill-on-bad-exit=1", "--kill-on-bad-exit=0")
    assert told(scene.theirs(script)["first_failure"]) == expected


@pytest.mark.full
def test_somebody_elses_exec_bit(scene: Scene) -> None:
    program, copy = scene.bench.root / "train.sh", scene.bench.root / "copy.sh"
    for path, mode in ((program, 0o755), (copy, 0o644)):
        path.write_text("#!/bin/bash\nexec sleep 15\n")
        path.chmod(mode)
    with instead(scene.cluster, "node02", {str(program): copy}):
        found = scene.theirs(f"srun --kill-on-bad-exit=1 --output=$1/{LOGS} ./train.sh")
    assert told(found["first_failure"]) == Told("node02", 1, "environment")


@pytest.mark.full
def test_somebody_elses_step_that_is_blocked(scene: Scene) -> None:
    """An earlier step of theirs holds all CPUs, and is ended when the next one cannot begin."""
    script = f"""
        srun --ntasks-per-node=4 sleep 3600 &
        until squeue --steps --noheader --format=%i --jobs=$SLURM_JOB_ID | grep -q '\\.0$'; do
            sleep 0.2
        done
        srun --immediate=1 --ntasks-per-node=1 --output=$1/{LOGS} hostname
        kill %1
    """
    found = scene.theirs(script, "--exclusive")
    assert told(found["first_failure"]) == Told("", None, "environment")
    assert "another step of the same job" in found["first_failure"]["cause"]


def test_a_time_limit(waiting: Waiting) -> None:
    said = waiting.limited.finish(waiting.limited_job)
    assert said.report["ended_by"] == "time-limit"
    waiting.limited.assert_told(said, Told("", None, "time-limit"))


def test_a_node_that_is_lost(waiting: Waiting) -> None:
    said = waiting.bereft.finish(waiting.bereft_job)
    waiting.bereft.assert_told(said, Told("node03", None, "node-failure"))
