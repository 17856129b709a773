"""Faults of a real cluster during a job: the job ends in time, told right, and leaves nothing.

What happened is said or healed; no allocation, process or file is left, and the same job succeeds
once the cluster is sound. A job that is put back into the queue runs again, and only where that was
asked for.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from pathlib import Path

from _pytest import outcomes

from tests.support.cluster import STATES, Cluster, make_cluster, nodes_of, remove_cluster
from tests.support.processes import living, until

from ..cluster_faults import FAULTS, Target, take_turns
from ..deadline import Deadline
from ..product import Done, Running, finish, sound, stager, start, succeeded
from ..registry import Area
from ..rounds import HEALED, REFUSED, SAME, NotHere, Round, require
from ..world import World

_NODES = 3
_SECONDS = 150.0  # for a job with a fault; Slurm notices node failures by time limits of its own
_RANK = """\
import os, sys, time
print("[RANK", os.environ.get("RANK"), "]", flush=True)
time.sleep(float(sys.argv[1]))
"""
_PENDING = 10  # seconds after which a job waits for nodes that the fault has taken away
_LONG = "300"  # seconds that ranks sleep where something else ends them
_RANKS = ("--nproc-per-node", "1", "--launcher", "srun")
_TIME = ("--time", "00:05:00")
# How a job is begun, and seconds within which something happens to it.
_FORMS = {("verify",): 2, ("run", *_RANKS): 4, ("run", *_RANKS, "--batch", "--wait"): 6}
_LIMIT, _REQUEUE, _KILLED = "the time limit", "requeue", "stager killed"


def begin(world: World) -> None:
    """Start the cluster that all rounds share."""
    if (STATES / _name(world)).exists():  # made for the other area that needs it
        return
    try:
        make_cluster(_name(world), "--nodes", str(_NODES))
    except (outcomes.Skipped, outcomes.Failed) as exc:
        raise NotHere(str(exc.msg)) from exc


def end(world: World) -> None:
    if (STATES / _name(world)).exists():
        remove_cluster(_name(world))


def _name(world: World) -> str:
    return f"test-{world.owner}-torture"


def cluster_of(world: World) -> Cluster:
    name = _name(world)
    return Cluster(name=name, nodes=nodes_of(name), shared=Path("/var/tmp") / f"stager-{name}")


def variables(cluster: Cluster) -> dict[str, str]:
    return {**cluster.env, "STAGER_NODE_ROOT": "/tmp"}


def play(round_: Round) -> str:
    cluster = cluster_of(round_.world)
    round_.use("project", "offline", "home")
    (round_.project / "train.py").write_text(_RANK)
    kind = take_turns(round_, {**FAULTS, _REQUEUE: None})
    if kind != _REQUEUE:
        return _hurt(round_, cluster, kind)
    try:
        outcome = (_refused if round_.rng.random() < 0.3 else _again)(round_, cluster)
    finally:
        cluster.settle()
    nothing_left(round_, cluster)
    return outcome


def _hurt(round_: Round, cluster: Cluster, kind: str) -> str:
    rng, env = round_.rng, variables(cluster)
    form = rng.choice([form for form in _FORMS if kind != _LIMIT or form[0] != "verify"])
    node = rng.choice(cluster.nodes)
    seconds = _LONG if kind == _LIMIT else rng.choice(("0", "2"))
    argv = _argv(form, seconds)
    round_.did(f"stager {' '.join(argv)}")
    process = start(round_, argv, env=env)
    target = Target(cluster=cluster, node=node, process=process, rng=rng)
    try:
        target.pause(0.2, _FORMS[form])
        running = process.poll() is None
        round_.did(f"{kind}, {node}{'' if running else ', after its end'}")
        with target.undo:
            FAULTS[kind](target)
            _wait(process, cluster)
        for job in cluster.jobs("--states=PENDING"):  # else it would begin again in two minutes
            cluster.run(["scontrol", "update", f"JobId={job}", "StartTime=now"], check=False)
        done = finish(process, _SECONDS)
    finally:
        if kind != _KILLED or "--batch" not in argv:  # else the job goes on, rightly
            cluster.settle()
    if kind != _KILLED:
        _told(done, kind)
    nothing_left(round_, cluster)
    same_again(round_, _argv(form, "0"), env, _SECONDS)
    if not running:
        return SAME
    return HEALED if done.code == 0 else REFUSED


def _argv(form: tuple[str, ...], seconds: str) -> tuple[str, ...]:
    command = ("--", "train.py", seconds) if form[0] != "verify" else ()
    return (*form, "--nodes", str(_NODES), *_TIME, *command)


def _told(done: Done, kind: str) -> None:
    sound(done)
    require(done.code in (0, 1, 3), "the exit code is 0, 1 or 3", done)
    if done.code:
        require(len(done.err.strip()) > 20, "it says what happened", done)
    if kind == _LIMIT:
        require(done.code == 3, "a job that its time limit has ended has failed", done)
        require("time limit" in done.err, "it says that it was the time limit", done)


def _wait(process: Running, cluster: Cluster) -> None:
    """Wait for the end, or until the job waits for nodes: it does so as long as the fault lasts."""
    pending, deadline = 0, Deadline(_SECONDS)
    while process.poll() is None and pending < _PENDING and not deadline.passed():
        time.sleep(1)
        pending = pending + 1 if cluster.jobs("--states=PENDING") else 0


def same_again(
    round_: Round, argv: tuple[str, ...], env: Mapping[str, str], seconds: float
) -> None:
    again = sound(stager(round_, *argv, env=env, process=True, seconds=seconds))
    require(again.code == 0, "the same job succeeds once the cluster is sound", again)


def nothing_left(round_: Round, cluster: Cluster) -> None:
    """Hold that no allocation and no process of the job is left, anywhere."""
    require(until(lambda: not cluster.jobs()), "no allocation is left", cluster.jobs())
    place = str(round_.folder)
    require(until(lambda: not living(place)), "no process is left", living(place))
    half = [path for path in round_.logs.rglob("*") if path.name.endswith((".partial", ".tmp"))]
    require(not half, "no half-written file is left", half)


# --- jobs that are put back into the queue -------------------------------------------------------

_TWO = ("--nodes", "2", *_TIME, *_RANKS)
_PROGRAM = ("--", "train.py", "3")


def _refused(round_: Round, cluster: Cluster) -> str:
    """Hold that a job of ``run --batch`` goes on as if nobody had asked: it has no checkpoint."""
    argv = ("run", *_TWO, "--batch", "--wait", *_PROGRAM)
    round_.did("stager run --batch --wait on 2 nodes")
    process = start(round_, argv, env=variables(cluster))
    time.sleep(round_.rng.uniform(1, 8))
    jobs = cluster.jobs()
    round_.did(f"scontrol requeue {' '.join(jobs)}")
    asked = [cluster.run(["scontrol", "requeue", job], check=False) for job in jobs]
    succeeded(finish(process, _SECONDS))
    require(all(one.returncode for one in asked), "the job cannot be put into the queue", asked)
    return REFUSED if asked else SAME


def _again(round_: Round, cluster: Cluster) -> str:
    """Hold that a job of ``script --requeue`` runs again, to a good end, and says both."""
    env = variables(cluster)
    made = succeeded(stager(round_, "script", "--requeue", *_TWO, *_PROGRAM, env=env))
    script = round_.project / "job.sbatch"
    script.write_text(made.out)
    own = [f"HOME={round_.folder / 'home'}", *(f"{name}={value}" for name, value in env.items())]
    submit = ["env", *own, "sbatch", "--parsable", f"--chdir={round_.project}", str(script)]
    job = cluster.run(submit).stdout.strip()
    round_.did(f"sbatch, of stager script --requeue on 2 nodes: job {job}")
    time.sleep(round_.rng.uniform(0.2, 8))
    done = cluster.run(["scontrol", "requeue", job], check=False)
    times = 0 if done.returncode else 1
    round_.did(f"scontrol requeue: {done.stderr.strip() or 'done'}")
    ended = until(lambda: _ended(cluster, job), 600)
    facts = _facts(cluster, job)
    logs = round_.logs.glob(f"*.{job}.batch.out")
    log = "".join(path.read_text(errors="replace") for path in logs)
    told = f"{json.dumps(facts, indent=1)}\n{log}"
    require(ended, "a job that is put back into the queue ends", told)
    require(facts["JobState"] == "COMPLETED", "it runs to a good end", told)
    require(facts.get("Restarts") == str(times), "it has been run again as often", told)
    require(f"job {job} restart {times} on" in log, "its log has the last run", told)
    sound(stager(round_, "logs", job, env=env))
    after = stager(round_, "diagnose", job, env=env)
    require(sound(after).code == 0, "`stager diagnose` finds a job that ended well", after)
    return HEALED if times else SAME


def _ended(cluster: Cluster, job: str) -> bool:
    """Return whether a job has ended for good; one that waits for its second run is hurried."""
    states = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
    if _facts(cluster, job).get("JobState") == "PENDING":
        cluster.hurry(job, lambda: _facts(cluster, job).get("JobState") != "PENDING")
    return _facts(cluster, job).get("JobState") in states


def _facts(cluster: Cluster, job: str) -> dict[str, str]:
    text = cluster.run(["scontrol", "--oneliner", "show", "job", job], check=False).stdout
    return dict(re.findall(r"(\w+)=(\S*)", text))


AREA = Area(play, rounds=45, sample=1, seconds=500, root=True, apart=True, begin=begin, end=end)
