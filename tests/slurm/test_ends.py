"""How jobs end on a real cluster: every way is answered for, in bounded time, and nothing stays."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.support.processes import until
from tests.support.provoking import PROGRAM, Bench, Said, empty_nodes
from tests.support.slurm_torch import SlurmTorch

pytestmark = pytest.mark.slow

BOUND = 300.0
"""Seconds in which everything must have ended: the ranks would sleep many times as long."""
TRIES = 20
"""How often a moment is looked for that may be over before it is seen."""
SLEEP = ("run", "--nodes", "3", "--", "train.py", "all=sleep")


def sending(bench: Bench) -> bool:
    """Whether a part of the file has arrived."""
    parts = (bench.place("node02") / "incoming").glob("job-*/bundle.tar")
    return any(part.stat().st_size for part in parts)


def test_ctrl_c_while_it_is_sent(large_bench: Bench) -> None:
    said = interrupted_while_sending(large_bench)
    assert said.code == 130, said.talk
    assert "interrupted; nothing is left running" in said.talk


@pytest.mark.full
def test_ranks_that_do_not_listen_are_killed(bench: Bench) -> None:
    started = bench.start("run", "--nodes", "3", "--", "train.py", "1=deaf", "all=sleep")
    bench.at_work(started, 3)
    cancel = ["scancel", bench.job_id()]
    said = ended(bench, started, lambda: bench.cluster.run(cancel), killed=True)
    assert (said.code, said.report["ended_by"]) == (3, "cancelled"), said.talk


@pytest.mark.parametrize("sender", ["stager", pytest.param("scancel", marks=pytest.mark.full)])
def test_signals_for_the_ranks_reach_them(bench: Bench, sender: str) -> None:
    """From here, and from Slurm, as ``--signal=USR1@60`` has it: the job goes on, and ends well."""
    started = bench.start("run", "--nodes", "3", "--", "train.py", "all=save")

    def logs() -> list[str]:
        return [log.read_text() for log in bench.logs.glob("*.node0*.out")]

    assert until(lambda: sum("[RANK " in log for log in logs()) == 3)
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        if sender == "stager":
            started.send_signal(number)
        else:
            bench.cluster.run(["scancel", f"--signal={number.name[3:]}", bench.job_id()])
    said = bench.finish(started, BOUND)
    assert said.code == 0, said.talk
    passed_on = sum("stager: SIGUSR1 was passed on to rank " in log for log in logs())
    assert passed_on == (3 if sender == "stager" else 0)  # here Slurm itself reaches the ranks
    bench.assert_clean(BOUND)


@pytest.mark.parametrize(
    ("whose", "cause"),
    [
        ("drive", ""),
        ("agent launch", "Killed"),
        pytest.param("--job-name=stager-launch", "ended by SIGKILL", marks=pytest.mark.full),
    ],
)
def test_a_process_of_ours_that_is_killed(bench: Bench, whose: str, cause: str) -> None:
    started = bench.start(*SLEEP)
    bench.at_work(started, 3)
    agent = bench.program("node02", whose) if whose.startswith("agent") else 0
    end_it = partial(os.kill, agent, signal.SIGKILL) if agent else partial(kill, bench, whose)
    said = ended(bench, started, end_it, killed=True)
    assert said.code == 3, said.talk
    if whose == "drive":
        assert f"job {bench.job_id()} ended without a result" in said.error["message"]
        assert str(bench.logs) in said.error["hint"]
        return
    assert cause in said.failure["cause"]
    if agent:
        assert (said.failure["node"], said.report["task_codes"]["1"]) == ("node02", -9)


@pytest.mark.full
@pytest.mark.network
def test_an_agent_that_is_killed_over_torchrun(slurm_torch: SlurmTorch) -> None:
    """The ranks are torchrun's children, each in a session of its own: they end all the same."""
    work = slurm_torch.work
    (work / "idle.py").write_text(PROGRAM)
    bench = Bench(cluster=slurm_torch.cluster, root=work, logs=work / "logs", env={})
    launch = ("--nproc-per-node", "2", "--backend", "gloo", "--", "idle.py", "all=sleep")
    started = slurm_torch.start("run", *launch)
    bench.at_work(started, 6)
    agent = bench.program("node02", "agent session")
    said = ended(bench, started, lambda: os.kill(agent, signal.SIGKILL), killed=True)
    assert (said.code, said.failure["node"]) == (3, "node02"), said.talk


@pytest.mark.full
def test_ranks_that_hang_at_their_end(bench: Bench) -> None:
    """A thread and an exit handler; the first node has ended, and nobody will ever wake them."""
    bench.env["SLURM_WAIT"] = "3"
    said = bench.stager("run", "--nodes", "3", "--", "train.py", "1=hang", "2=atexit")
    assert said.code == 3, said.talk
    assert (said.failure["node"], said.failure["rank"]) == ("node02", 1)
    assert said.failure["class"] == "hang"
    assert "the ranks did not end: other nodes had ended 3 s before" in said.failure["cause"]
    assert "SLURM_WAIT" in said.failure["hint"]
    codes = said.report["task_codes"]
    assert (codes["0"], codes["1"], codes["2"]) == (0, 143, 143)
    bench.assert_clean()


def interrupted_while_sending(bench: Bench) -> Said:
    """Interrupt a job before its environments are there; what it says then.

    A busy machine may show the moment only when it is over: another job is begun from nothing then.
    """
    logs = bench.logs

    def attempt(number: int) -> Said:
        empty_nodes(bench.cluster)
        bench.logs = logs / str(number)
        bench.logs.mkdir()
        started = bench.start("verify", "--nodes", "3", "--stage", "always")
        assert until(lambda: sending(bench) or started.poll() is not None, pause=0.01)
        interrupt = partial(os.killpg, started.pid, signal.SIGINT)
        return ended(bench, started, lambda: started.poll() is None and interrupt())

    for number in range(TRIES):
        said = attempt(number)
        done = [node for node in bench.cluster.nodes if any(bench.place(node).glob("envs/*"))]
        if said.code and not done:
            return said
    pytest.fail(f"the moment did not come: {said}")


def ended(
    bench: Bench,
    started: subprocess.Popen[str],
    end_it: Callable[[], object],
    *,
    killed: bool = False,
) -> Said:
    """End it; all must be gone in time. See :meth:`Bench.left` for ``killed``."""
    end_it()
    said = bench.finish(started, BOUND)
    bench.assert_clean(BOUND, killed=killed)
    return said


def kill(bench: Bench, word: str) -> None:
    """Kill a process of the login side by SIGKILL: the driver, or one of its steps."""
    number = bench.job_id()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            line = (entry / "cmdline").read_bytes().decode()
            env = (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        words = line.split("\0")
        ours = f"SLURM_JOB_ID={number}".encode() in env
        config = f"SLURM_CONF={bench.cluster.env['SLURM_CONF']}".encode() in env
        of_login_side = "agent" not in words or words[0].endswith("srun")
        if ours and config and word in words and of_login_side:
            os.kill(int(entry.name), signal.SIGKILL)
            return
    pytest.fail(f"no process with {word}")
