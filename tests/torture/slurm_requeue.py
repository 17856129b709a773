"""Batch jobs that are put back into the queue at any moment, as the area ``slurm`` plays them."""

from __future__ import annotations

import json
import re
import time

from tests.support.cluster import Cluster
from tests.support.processes import until

from .product import finish, sound, stager, start, succeeded
from .rounds import HEALED, REFUSED, SAME, Round, require

_NODES = ("--nodes", "2", "--time", "00:05:00")
_RANKS = ("--nproc-per-node", "1", "--launcher", "srun")
_PROGRAM = ("--", "train.py", "3")


def play(round_: Round, cluster: Cluster) -> str:
    """Put a batch job back into the queue, one that may be, or one that may not."""
    env = {**cluster.env, "STAGER_NODE_ROOT": "/tmp"}
    if round_.rng.random() < 0.3:
        return _refused(round_, cluster, env)
    return _again(round_, cluster, env)


def _refused(round_: Round, cluster: Cluster, env: dict[str, str]) -> str:
    """Hold that a job of ``run --batch`` goes on as if nobody had asked: it has no checkpoint."""
    argv = ("run", *_NODES, *_RANKS, "--batch", "--wait", *_PROGRAM)
    out = round_.folder / "said" / "batch"
    out.parent.mkdir()
    round_.did("stager run --batch --wait on 2 nodes")
    process = start(round_, argv, out=out, env=env)
    time.sleep(round_.rng.uniform(1, 8))
    jobs = cluster.run(["squeue", "--noheader", "--format=%A"]).stdout.split()
    round_.did(f"scontrol requeue {' '.join(jobs)}")
    asked = [cluster.run(["scontrol", "requeue", job], check=False) for job in jobs]
    done = succeeded(finish(process, argv, out, 150))
    require(all(one.returncode for one in asked), "the job cannot be put into the queue", asked)
    return REFUSED if asked else SAME if done.code == 0 else HEALED


def _again(round_: Round, cluster: Cluster, env: dict[str, str]) -> str:
    """Hold that a job of ``script --requeue`` runs again, to a good end, and says both."""
    script = round_.project / "job.sbatch"
    made = succeeded(stager(round_, "script", "--requeue", *_NODES, *_RANKS, *_PROGRAM, env=env))
    script.write_text(made.out)
    submit = ["sbatch", "--parsable", f"--chdir={round_.project}", str(script)]
    own = [f"HOME={round_.folder / 'home'}", *(f"{name}={value}" for name, value in env.items())]
    job = cluster.run(["env", *own, *submit]).stdout.strip()
    round_.did(f"sbatch, of stager script --requeue on 2 nodes: job {job}")
    time.sleep(round_.rng.uniform(0.2, 8))
    done = cluster.run(["scontrol", "requeue", job], check=False)
    times = 0 if done.returncode else 1
    round_.did(f"scontrol requeue: {done.stderr.strip() or 'done'}")
    ended = until(lambda: _ended(cluster, job), 600)
    facts = _facts(cluster, job)
    log = _log(round_, job)
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
    """Return whether a job has ended for good; one that waits for its second run is hurried.

    Slurm waits two minutes before it starts a job again. Not within the seconds of its end, though:
    slurmd would take the new run's credential for one that was revoked, and Slurm hold the job.
    """
    facts = _facts(cluster, job)
    if facts.get("JobState") == "PENDING":
        time.sleep(3)
        cluster.run(["scontrol", "update", f"JobId={job}", "StartTime=now"], check=False)
        time.sleep(3)
    return facts.get("JobState") in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


def _facts(cluster: Cluster, job: str) -> dict[str, str]:
    text = cluster.run(["scontrol", "--oneliner", "show", "job", job], check=False).stdout
    return dict(re.findall(r"(\w+)=(\S*)", text))


def _log(round_: Round, job: str) -> str:
    found = list(round_.logs.glob(f"*.{job}.batch.out"))
    return found[0].read_text(errors="replace") if found else ""
