"""How ranks are started and started again, on real Slurm with the real stack."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.support.slurm_torch import SlurmRan, SlurmTorch

pytestmark = [pytest.mark.slow, pytest.mark.network]

REDUCE = """\
import os, pathlib, sys, time
import torch, torch.distributed as dist

failed = pathlib.Path("failed")
first = sys.argv[1:] == ["once"] and not failed.exists()
dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
total = torch.tensor(float(rank))
dist.all_reduce(total)
assert total.item() == size * (size - 1) / 2
names = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "GLOO_SOCKET_IFNAME")
print("SEEN", *(os.environ.get(name) for name in names), flush=True)
print("TOKEN", os.environ.get("HF_TOKEN"), flush=True)
if first and rank == 3:
    failed.touch()
    raise ValueError("the first time is hard")
if first:
    time.sleep(3600)  # in a collective these would fail as well, and use up their nodes' restarts
print(f"[RANK {rank}] WORLD_SIZE={size}", flush=True)
dist.barrier()
dist.destroy_process_group()
"""
SECRET = "hf_" + "notforanybody" * 2
NOTING_SRUN = """\
#!/bin/bash
name=$(printf '%s\\n' "$@" | sed -n 's/^--job-name=stager-//p')
[ -n "$name" ] || exec {srun} "$@"
exec {srun} "$@" < <(exec tee "$SENT/$name.$$")
"""
LIMIT = 24 << 10
"""Bytes that ``srun`` may be given on standard input: it sends them to each task, one by one."""


@pytest.fixture
def job(slurm_torch: SlurmTorch) -> SlurmTorch:
    """The project, with a script that lets the ranks talk in the directory of its jobs."""
    (slurm_torch.work / "script.py").write_text(REDUCE)
    return slurm_torch


def seen(ran: SlurmRan) -> list[list[str]]:
    """Rank, local rank, head and interface as the ranks have them, in the order of the ranks."""
    lines = (line.split()[1:] for line in ran.lines() if line.startswith("SEEN "))
    return sorted(lines)


@pytest.fixture
def sent(job: SlurmTorch, tmp_path: Path) -> dict[str, str]:
    """Variables with which ``srun`` notes what it is told from the begin of a step to its end."""
    programs = tmp_path / "programs"
    for folder in (programs, tmp_path / "sent"):
        folder.mkdir()
    (programs / "srun").write_text(NOTING_SRUN.format(srun=shutil.which("srun")))
    (programs / "srun").chmod(0o755)
    path = f"{programs}{os.pathsep}{job.env['PATH']}"
    return {"PATH": path, "SENT": str(tmp_path / "sent")}


def assert_little(sent: dict[str, str], *steps: str) -> None:
    """These steps were made, and each was told little."""
    sizes = {file.stem: file.stat().st_size for file in Path(sent["SENT"]).iterdir()}
    assert sizes.keys() >= {*steps}
    assert {name: size for name, size in sizes.items() if size > LIMIT} == {}


def settings(job: SlurmTorch, text: str) -> None:
    (job.work / "stager.toml").write_text(f"[environment]\nrequirements = []\n{text}")


def test_slurm_starts_the_ranks(job: SlurmTorch, sent: dict[str, str]) -> None:
    """PyTorch finds its group by the variables that are made of Slurm's."""
    options = ("--launcher", "srun", "--nproc-per-node", "2")
    ran = job.job("run", *options, "--", "script.py", env=sent)
    assert (ran.code, ran.report["launcher"]) == (0, "srun"), ran.stderr
    assert ran.ranks() == [f"[RANK {rank}] WORLD_SIZE=6" for rank in range(6)]
    head = job.cluster.address("node01")
    assert [fields[:3] for fields in seen(ran)] == [
        [str(rank), str(rank % 2), head] for rank in range(6)
    ]
    assert ran.report["task_codes"] == {str(rank): 0 for rank in range(6)}
    assert_little(sent, "preflight", "launch")


@pytest.mark.full
def test_a_rank_that_fails_once_is_started_again(job: SlurmTorch) -> None:
    """All ranks on all nodes, which then meet anew; with an interface chosen by the node's name."""
    settings(
        job, '[launch]\nmax-restarts = 1\ninterface = { "node0[1-2]" = "eth0", "node03" = "auto" }'
    )
    ran = job.job("run", "--nproc-per-node", "2", "--", "script.py", "once")
    assert ran.code == 0, ran.stderr
    assert [fields[0] for fields in seen(ran)] == [str(rank) for rank in range(6) for _ in "12"]
    assert {fields[3] for fields in seen(ran)} == {"eth0"}
    assert ran.ranks() == [f"[RANK {rank}] WORLD_SIZE=6" for rank in range(6)]
    assert "the first time is hard" in "".join(ran.lines())


@pytest.mark.full
def test_as_many_nodes_as_there_are(job: SlurmTorch) -> None:
    """Asked for two or three, with one of the three left out."""
    ran = job.job("run", "--nodes", "2:3", "--exclude", "node02", "--", "script.py")
    assert ran.code == 0, ran.stderr
    assert ran.report["nodes"] == ["node01", "node03"]
    assert ran.ranks() == [f"[RANK {rank}] WORLD_SIZE=2" for rank in range(2)]


@pytest.mark.full
def test_a_secret_is_nowhere_but_in_the_ranks(job: SlurmTorch, sent: dict[str, str]) -> None:
    """Those that torchrun starts; what is not asked for, and other launches: test_secrets_slurm.

    All phases are one step then, and requests of later ones are part of what it is told.
    """
    secret, asked = {"HF_TOKEN": SECRET}, ("--pass-env", "HF_TOKEN")
    quiet = REDUCE.replace('print("TOKEN", ', 'print("TOKEN", "notforanybody" in str(')
    quiet = quiet.replace('os.environ.get("HF_TOKEN"), flush', 'os.environ.get("HF_TOKEN")), flush')
    (job.work / "script.py").write_text(quiet)
    dry = job.job("run", "--dry-run", *asked, "--", "script.py", env=secret)
    assert SECRET not in f"{dry.report}{dry.stderr}"
    launch = ("-v", "--stage", "always", "--launcher", "torchrun", *asked)
    ran = job.job("run", *launch, "--", "script.py", env=secret | sent)
    assert ran.code == 0, ran.stderr
    assert_little(sent, "preflight")
    assert ran.lines().count("TOKEN True") == 3
    assert SECRET not in f"{ran.report}{ran.stderr}"
    files = [path for path in job.work.rglob("*") if path.is_file()]
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []
    for node in job.cluster.nodes:
        grep = ["grep", "-rlsI", "--exclude-dir=envs", SECRET, "/tmp"]
        assert job.cluster.on(node, grep, check=False).stdout == ""


AGAIN = """\
import os, signal
import torch.distributed as dist

dist.init_process_group()
print("ATTEMPT", os.environ["STAGER_ATTEMPT"], os.environ["STAGER_NODE"], flush=True)
dist.barrier()
if os.environ["STAGER_ATTEMPT"] == "0" and dist.get_rank() == 3:
    os.kill(os.getpid(), signal.SIGKILL)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.full
def test_torchrun_starts_again_with_a_spare_node(slurm_torch: SlurmTorch) -> None:
    (slurm_torch.work / "script.py").write_text(AGAIN)
    asked = ("--nodes", "2", "--spares", "1", "--retries", "1", "--nproc-per-node", "2")
    ran = slurm_torch.job("run", *asked, "--", "script.py")
    assert ran.code == 0, ran.stderr
    lines = [line for line in ran.lines() if line.startswith("ATTEMPT")]
    assert sorted(lines) == [
        *["ATTEMPT 0 node01"] * 2,
        *["ATTEMPT 0 node02"] * 2,
        *["ATTEMPT 1 node01"] * 2,
        *["ATTEMPT 1 node03"] * 2,
    ]
    [again] = ran.report["restarts"][-1:]
    assert (again["failed"]["class"], again["left_out"]) == ("killed", ["node02"])
