"""Training that is hurt on a real cluster goes on from its last checkpoint, by itself."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.failing import an_urgent_partition
from tests.support.pictures import digits, nothing, things
from tests.support.processes import until
from tests.support.provoking import Bench
from tests.support.slurm_torch import SlurmTorch

pytestmark = [pytest.mark.slow, pytest.mark.network]

TRAINING = (
    "-m", "trainer", "mlp", "--subset", "12000", "--epochs", "1", "--batch-size", "8",
    "--save-every", "25", "--precision", "float32", "--out", "out",
)  # fmt: skip
"""About 500 short steps: long enough to be hurt in the middle."""
PICTURES = ("--data", "data", "--epochs", "1", "--out", "out")
HOLDING = """\
import pathlib, runpy, sys, time
from torch.optim import optimizer

done = 0

def hold(*_):
    global done
    done += 1
    while done == 120 and not pathlib.Path("hurt").exists():
        time.sleep(0.05)

optimizer.register_optimizer_step_post_hook(hold)
sys.argv = sys.argv[2:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""
"""Runs a module as ``-m`` does. In the middle of its training a rank waits until another one has
been hurt, so that a busy machine does not train to the end before that."""
AGAIN = "[environment]\nrequirements = []\n[launch]\nmax-restarts = 2\n"
RESUMED = re.compile(r"resuming from \S+, after (\d+) steps? \((\d+) steps? to do again\)")
SAVE_EVERY = 25
LATE = 3
"""Steps between what a rank has done and what rank 0 has heard of."""


def steps(work: Path) -> int:
    """How many steps are noted."""
    log = work / "out" / "metrics.jsonl"
    lines = log.read_text().splitlines() if log.exists() else []
    with_loss = [line for line in lines if '"loss"' in line and line.endswith("}")]
    return int(json.loads(with_loss[-1])["step"]) if with_loss else 0


def at_step(job: SlurmTorch, step: int, started: subprocess.Popen[str]) -> None:
    """Wait until the training is so far."""
    assert until(lambda: steps(job.work) >= step or started.poll() is not None, 600)
    assert started.poll() is None, started.communicate()


def bench_of(job: SlurmTorch) -> Bench:
    """What tests of failures look at."""
    return Bench(cluster=job.cluster, root=job.work, logs=job.work / "logs", env={})


def begin(job: SlurmTorch, *options: str) -> subprocess.Popen[str]:
    """Start a training that is started again where it fails, and waits in the middle."""
    (job.work / "stager.toml").write_text(AGAIN)
    (job.work / "holding.py").write_text(HOLDING)
    argv = ("run", *options, "--nproc-per-node", "1", "--", "holding.py", *TRAINING)
    return job.start(*argv)


def finished(job: SlurmTorch, started: subprocess.Popen[str]) -> dict[str, object]:
    """The report of a job that goes on to its end in spite of all."""
    out, said = started.communicate(timeout=900)
    assert started.returncode == 0, said
    metrics = json.loads((job.work / "out" / "metrics.json").read_text())
    assert metrics["accuracy"] > 0.9
    return {**json.loads(out), "metrics": metrics}


def resumed(lines: list[str]) -> tuple[int, int]:
    """After how many steps it went on, and how many were lost."""
    found = {match.groups() for line in lines if (match := RESUMED.search(line))}
    assert len(found) == 1, lines[-40:]
    ((after, lost),) = found
    return int(after), int(lost)


def ranks(bench: Bench, node: str) -> list[int]:
    """The processes of a node's ranks."""
    lines = bench.processes(node).items()
    return [pid for pid, line in lines if "run_wrapper.py" in line and "elastic" not in line
            and "torch.distributed" not in line]  # fmt: skip


def killed(pid: int) -> None:
    """End a rank without a word."""
    os.kill(pid, signal.SIGKILL)


def starved(pid: int) -> None:
    """Let a rank have no memory beyond what it has: what it asks for next, it does not get."""
    resource.prlimit(pid, resource.RLIMIT_AS, (1 << 20, 1 << 20))


@pytest.mark.full
@pytest.mark.parametrize(("hurt", "node"), [(killed, "node02"), (starved, "node01")])
def test_a_rank_that_dies(slurm_torch: SlurmTorch, hurt: Callable[[int], None], node: str) -> None:
    job = slurm_torch
    started = begin(job)
    at_step(job, 100, started)
    bench = bench_of(job)
    before = steps(job.work)
    (rank,) = ranks(bench, node)
    hurt(rank)
    (job.work / "hurt").touch()
    report = finished(job, started)
    assert report["metrics"]["world_size"] == 3
    after, lost = resumed(bench.lines())
    assert after >= before - SAVE_EVERY - LATE
    assert 0 <= lost <= SAVE_EVERY + LATE
    bench.assert_clean()


@pytest.mark.full
@pytest.mark.parametrize(
    ("command", "data", "least"),
    [
        (TRAINING, nothing, 0.9),
        (("-m", "trainer", "mnist", *PICTURES), digits, 0.0),
        (("-m", "trainer", "cifar10", "--width", "8", *PICTURES), things, 0.0),
    ],
)
def test_ranks_that_slurm_starts_train_too(
    slurm_torch: SlurmTorch, command: tuple[str, ...], data: Callable[[Path], None], least: float
) -> None:
    """One task a rank, no torchrun; and the end is clean on every node."""
    job = slurm_torch
    (job.work / "data").mkdir()
    data(job.work / "data")
    ran = job.job("run", "--launcher", "srun", "--nproc-per-node", "2", "--", *command)
    assert ran.code == 0, ran.stderr
    assert ran.report["task_codes"] == {str(rank): 0 for rank in range(6)}
    metrics = json.loads((job.work / "out" / "metrics.json").read_text())
    assert metrics["world_size"] == 6
    assert metrics["accuracy"] >= least
    bench_of(job).assert_clean()


@pytest.mark.full
def test_a_node_that_is_lost_leaves_the_others_at_work(slurm_torch: SlurmTorch) -> None:
    """Two or three nodes; the third goes in the middle, and two take over its rows."""
    job = slurm_torch
    started = begin(job, "--nodes", "2:3")
    at_step(job, 100, started)
    bench = bench_of(job)
    assert "[RANK 2] WORLD_SIZE=3" in bench.lines()
    bench.cluster.lose("node03")
    (job.work / "hurt").touch()
    report = finished(job, started)
    assert report["metrics"]["world_size"] == 2
    _, lost = resumed(bench.lines())
    assert lost <= SAVE_EVERY + LATE
    bench.assert_clean()


@contextlib.contextmanager
def in_the_queue(job: SlurmTorch) -> Iterator[tuple[str, Callable[[], str]]]:
    """A training that goes on and on, as a batch job that may start again.

    Yields its number, and what gives all that was written so far.
    """
    argv = [*job.argv("script", "--requeue", "--time", "10", "--nproc-per-node", "1")]
    argv.remove("--json")
    long = [*TRAINING, "--epochs", "400"]
    made = subprocess.run(
        [*argv, "--", *long], cwd=job.work, env=job.env, capture_output=True, text=True, check=True
    )
    submitted = subprocess.run(
        ["sbatch", "--parsable"], input=made.stdout, cwd=job.work, env=job.env,
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    number = submitted.stdout.strip()

    def said() -> str:
        return "".join(p.read_text() for p in (job.work / "logs").glob(f"*.{number}.*out"))

    try:
        assert until(lambda: steps(job.work) >= 100, 600), said()
        yield number, said
    finally:
        job.cluster.run(["scancel", number], check=False)
        assert until(lambda: job.cluster.ended(number))


def goes_on(job: SlurmTorch, number: str, said: Callable[[], str]) -> None:
    """It has been stopped and is queued again: it goes on where it was."""
    (stopped,) = set(re.findall(r"stopped after step (\d+)", said()))
    assert job.cluster.hurry(number, lambda: RESUMED.search(said()) is not None), said()
    assert resumed(said().splitlines()) == (int(stopped), 0)


@pytest.mark.full
def test_a_time_limit_that_comes_near(slurm_torch: SlurmTorch) -> None:
    """Slurm says so beforehand: all is saved, the job goes back into the queue and goes on."""
    job = slurm_torch
    with in_the_queue(job) as (number, said):
        # As Slurm does ahead of the limit, some time within a minute of when it was asked to.
        job.cluster.run(["scancel", "--batch", "--signal=USR1", number])
        assert until(lambda: "back into the queue (restart 1)" in said()), said()
        goes_on(job, number, said)


@pytest.mark.full
def test_a_job_whose_nodes_another_one_takes(slurm_torch: SlurmTorch) -> None:
    """It is told by SIGTERM alone, and it is Slurm that puts it back into the queue."""
    job = slurm_torch
    with an_urgent_partition(job.cluster, "REQUEUE") as partition, in_the_queue(job) as told:
        number, said = told
        job.cluster.run(["srun", f"--partition={partition}", "--exclusive", "--nodes=3", "true"])
        assert until(lambda: '"ended_by": "preempted"' in said()), said()
        goes_on(job, number, said)
