"""Faults of a real cluster during a job: the job ends in time, told right, and leaves nothing."""

from __future__ import annotations

import contextlib
import random
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from _pytest import outcomes

from tests.support.cluster import STATES, Cluster, make_cluster, remove_cluster
from tests.support.processes import living, until

from .. import product, slurm_requeue
from ..deadline import Deadline
from ..product import Done, finish, said, sound, start
from ..registry import Area
from ..rounds import HEALED, REFUSED, SAME, NotHere, Round, require
from ..slurm_faults import FAULTS, Target, nothing
from ..world import World

_NODES = 3
_SECONDS = 150.0
"""In which a job with a fault must end; node failures are noticed by time limits of Slurm's own."""
_RANK = """\
import os, sys, time
print("[RANK", os.environ.get("RANK"), "]", flush=True)
time.sleep(float(sys.argv[1]))
"""
_PENDING = 10
"""Seconds after which a job that waits for nodes waits for those that the fault has taken away."""
_LONG = "300"
"""Seconds that ranks sleep where something else ends them."""
_RUN = ("--nproc-per-node", "1", "--launcher", "srun")


@dataclass(frozen=True)
class _Form:
    """How a job is begun: through salloc, or by sbatch."""

    argv: tuple[str, ...]
    seconds: float
    """Within which something happens to it."""


_FORMS = {
    "verify": _Form(("verify",), 2),
    "run": _Form(("run", *_RUN), 4),
    "run --batch --wait": _Form(("run", *_RUN, "--batch", "--wait"), 6),
}
_LIMIT = "the time limit"
_REQUEUE = "requeue"
_KINDS = (*sorted(FAULTS), _REQUEUE)


def begin(world: World) -> None:
    """Start the cluster that all rounds share.

    Raises:
        NotHere: there is no Slurm here, or no right to make a cluster.
    """
    try:
        make_cluster(_name(world), "--nodes", str(_NODES))
    except (outcomes.Skipped, outcomes.Failed) as exc:
        raise NotHere(str(exc.msg)) from exc


def end(world: World) -> None:
    """Remove it, or what there is of it."""
    if (STATES / _name(world)).exists():
        remove_cluster(_name(world))


def cluster_of(world: World) -> Cluster:
    """Return the cluster that all rounds share."""
    name = _name(world)
    nodes = tuple((STATES / name / "nodes").read_text().split())
    return Cluster(name=name, nodes=nodes, shared=Path("/var/tmp") / f"stager-{name}")


def play(round_: Round) -> str:
    """Start a job, hurt the cluster while it runs, and look at what is said and left."""
    cluster = cluster_of(round_.world)
    round_.use("project", "offline", "home")
    (round_.project / "train.py").write_text(_RANK)
    kind = _kind(round_)
    if kind == _REQUEUE:
        try:
            outcome = slurm_requeue.play(round_, cluster)
        finally:
            cluster.settle()
        nothing_left(round_, cluster)
        return outcome
    return _hurt(round_, cluster, kind)


def _kind(round_: Round) -> str:
    """Choose a fault: in as many rounds as there are kinds, each has its turn."""
    turn, place = divmod(round_.number, len(_KINDS))
    kinds = random.Random(f"{round_.seed}:{turn}").sample(_KINDS, len(_KINDS))
    return kinds[place]


def _hurt(round_: Round, cluster: Cluster, kind: str) -> str:
    rng, env = round_.rng, {**cluster.env, "STAGER_NODE_ROOT": "/tmp"}
    form = rng.choice(sorted(set(_FORMS) - ({"verify"} if kind == _LIMIT else set())))
    node = rng.choice(cluster.nodes)
    seconds = _LONG if kind == _LIMIT else rng.choice(("0", "2"))
    argv = _argv(form, seconds)
    round_.did(f"stager {form} on {_NODES} nodes, ranks sleep {seconds} s")
    out = round_.folder / "said" / "hurt"
    out.parent.mkdir()
    process = start(round_, argv, out=out, env=env)
    target = Target(cluster=cluster, node=node, process=process, rng=rng)
    undo = nothing
    try:
        target.pause(0.2, _FORMS[form].seconds)
        running = process.poll() is None
        round_.did(f"{kind}, {node}{'' if running else ', after its end'}")
        undo = FAULTS[kind](target)
        _wait(process, cluster)
        undo()
        undo = nothing
        _hurry(cluster)
        done = ended(process, argv, out)
    finally:
        undo()
        if kind != "stager killed" or "--batch" not in argv:  # else the job goes on, rightly
            cluster.settle()
    if kind != "stager killed":
        _told(done, kind)
    nothing_left(round_, cluster)
    argv = _argv(form, "0")
    again = sound(product.stager(round_, *argv, env=env, process=True, seconds=_SECONDS))
    require(again.code == 0, "the same job succeeds once the cluster is sound", again)
    if not running:
        return SAME
    return HEALED if done.code == 0 else REFUSED


def _argv(form: str, seconds: str) -> tuple[str, ...]:
    command = ("--", "train.py", seconds) if form != "verify" else ()
    return (*_FORMS[form].argv, "--nodes", str(_NODES), "--time", "00:05:00", *command)


def _name(world: World) -> str:
    return f"test-{world.owner}-torture"


def ended(
    process: subprocess.Popen[bytes], argv: Sequence[str], out: Path, seconds: float = _SECONDS
) -> Done:
    """Wait for the end of a command, also of one that was killed."""
    with contextlib.suppress(ProcessLookupError):
        return finish(process, argv, out, seconds)
    return said(argv, -9, out)


def _told(done: Done, kind: str) -> None:
    sound(done)
    require(done.code in (0, 1, 3), "the exit code is 0, 1 or 3", done)
    if done.code:
        require(len(done.err.strip()) > 20, "it says what happened", done)
    if kind == _LIMIT:
        require(done.code == 3, "a job that its time limit has ended has failed", done)
        require("time limit" in done.err, "it says that it was the time limit", done)


def _wait(process: subprocess.Popen[bytes], cluster: Cluster) -> None:
    """Wait for the end, or until the job waits for nodes: it does so as long as the fault lasts."""
    pending, deadline = 0, Deadline(_SECONDS)
    while process.poll() is None and pending < _PENDING and not deadline.passed():
        time.sleep(1)
        pending = pending + 1 if _jobs(cluster, "--states=PENDING") else 0


def _hurry(cluster: Cluster) -> None:
    """Let Slurm begin at once what it would not begin again for two minutes."""
    for job in _jobs(cluster, "--states=PENDING"):
        cluster.run(["scontrol", "update", f"JobId={job}", "StartTime=now"], check=False)


def _jobs(cluster: Cluster, *options: str) -> list[str]:
    return cluster.run(["squeue", "--noheader", "--format=%A", *options]).stdout.split()


def nothing_left(round_: Round, cluster: Cluster) -> None:
    """Hold that no allocation and no process of the job is left, anywhere."""
    require(until(lambda: not _jobs(cluster)), "no allocation is left", _jobs(cluster))
    place = str(round_.folder)
    require(until(lambda: not living(place)), "no process is left", living(place))
    half = [path for path in round_.logs.rglob("*") if path.name.endswith((".partial", ".tmp"))]
    require(not half, "no half-written file is left", half)


AREA = Area(
    name="slurm",
    promise="a job on a hurt cluster ends in time, with what happened said or healed; no "
    "allocation, process or file is left, and the same job succeeds once the cluster is sound; "
    "a job that is put back into the queue runs again, and only where that was asked for",
    play=play,
    rounds=42,
    sample=3,
    seconds=500,
    root=True,
    apart=True,
    begin=begin,
    end=end,
)
