"""What the tool promises on a cluster, shown on real Slurm with the real stack and real data."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.starting import rank_calls
from tests.support.cluster import REPO, Cluster
from tests.support.processes import until
from tests.support.slurm_torch import PATIENCE, SlurmRan, SlurmTorch
from tests.support.torch_project import STAGER, TorchProject

pytestmark = [pytest.mark.slow, pytest.mark.network]

SHORT = ("--subset", "600", "--held-out", "200", "--epochs", "1")
"""A training of a few steps, where it is not the learning that is looked at."""


def training(data: Path) -> list[str]:
    """The command that learns AG News."""
    options = ["--data", str(data / "ag_news.csv"), "--held-out", "1000", "--epochs", "3"]
    options += ["--vocab", str(data / "bert_uncased_vocab.txt"), "--out", "out"]
    return ["-m", "trainer", "tiny-bert", *options]


def unpacked(logs: Path) -> bool:
    """Whether every node has its environment."""
    wanted = '"event": "end", "phase": "unpack"'
    return any(wanted in path.read_text() for path in logs.glob("events.*.jsonl"))


def assert_trained(ran: SlurmRan, work: Path, each: int) -> None:
    """Ranks on three nodes have trained, and everything is where it belongs."""
    ranks = 3 * each
    metrics = json.loads((work / "out" / "metrics.json").read_text())
    assert metrics["world_size"] == ranks
    assert ran.ranks() == [f"[RANK {rank}] WORLD_SIZE={ranks}" for rank in range(ranks)]
    names = {path.name.split(".", 2)[2] for path in ran.files()}
    assert names == {f"node0{rank // each + 1}.{rank}.out" for rank in range(ranks)}
    lines = (ran.logs / f"preflight.{ran.id}.txt").read_text().splitlines()
    assert [line.split()[:3] for line in lines] == [
        [f"node0{number}", "proj=ok", "pkgs=ok"] for number in (1, 2, 3)
    ]


def test_training_from_the_nodes_own_disks(slurm_torch: SlurmTorch, data_dir: Path) -> None:
    """Once it is staged, no node can see the offline root any more."""
    slurm_torch.clean()
    cluster, logs = slurm_torch.cluster, slurm_torch.work / "logs"
    offline = slurm_torch.env["OFFLINE_ROOT"]
    launch = ("run", "--nproc-per-node", "1", "--")
    started = slurm_torch.start(*launch, *training(data_dir), *SHORT)
    hidden = []
    try:
        assert until(lambda: started.poll() is not None or unpacked(logs), 600)
        for node in cluster.nodes:
            cluster.on(node, ["mount", "-t", "tmpfs", "-o", "mode=0", "none", offline])
            hidden.append(node)
            assert cluster.on(node, ["ls", offline]).stdout == ""
        out, err = started.communicate(timeout=PATIENCE)
    finally:
        started.kill()
        for node in hidden:
            cluster.on(node, ["umount", "--lazy", offline])
    report = json.loads(out)
    ran = SlurmRan(code=started.returncode, report=report, stderr=err, logs=logs)
    assert (ran.code, ran.report["ok"]) == (0, True), err
    assert_trained(ran, slurm_torch.work, each=1)
    answers = ran.events("unpack")
    assert [answer["reused"] for answer in answers] == [False] * 3
    for answer in answers:
        place = Path(answer["path"])
        assert place.parts[1:3] == ("tmp", "stager-0")
        assert not place.exists()  # it is in the node's own /tmp, which is not ours
        assert cluster.on(answer["node"], ["test", "-x", f"{place}/bin/python"])


@pytest.mark.full
def test_the_printed_script_does_the_same(
    veiled: Cluster, torch_project: TorchProject, data_dir: Path
) -> None:
    """Submitted by hand; the nodes have neither the tool nor its source. A few steps tell."""
    for node in veiled.nodes:
        assert veiled.on(node, ["ls", str(REPO)]).stdout == ""
        assert veiled.on(node, [STAGER, "--version"], check=False).returncode == 127
    work = veiled.shared / "sbatch"
    work.mkdir()
    here = SlurmTorch(project=torch_project, cluster=veiled, work=work)
    options = here.argv("script", "--nproc-per-node", "2", "--", *training(data_dir), *SHORT)
    options.remove("--json")
    printed = subprocess.run(
        options, cwd=work, env=here.env, capture_output=True, text=True, timeout=900, check=False
    )
    assert printed.returncode == 0, printed.stderr
    (work / "job.sbatch").write_text(printed.stdout)
    done = subprocess.run(
        ["sbatch", "--parsable", "--wait", "job.sbatch"],
        cwd=work,
        env=here.env,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    number = done.stdout.strip()
    log = next((work / "logs").glob(f"*.{number}.batch.out"), None)
    assert done.returncode == 0, log.read_text() if log else done.stderr
    ran = SlurmRan(code=0, report={"job_id": number}, stderr="", logs=work / "logs")
    assert_trained(ran, work, each=2)
    here.clean()  # gigabytes of memory, which other tests need


@pytest.mark.full
def test_a_rank_touches_nothing_that_is_shared(
    slurm_torch: SlurmTorch, tmp_path: Path, data_dir: Path
) -> None:
    """From its first moment: the tool's offline root, the home and the project are shared.

    The run directory is one that only the login side has, and the data lie on the nodes: the files
    that a program names are its own business. ``slurmd`` and all that it starts on one node is
    traced; what counts begins where a process becomes the rank.
    """
    data = Path("/tmp/data")
    for node in slurm_torch.cluster.nodes:
        slurm_torch.cluster.on(node, ["cp", "-r", str(data_dir), str(data)])
    command = [*training(data), *SHORT]
    here = replace(slurm_torch, work=tmp_path)
    assert here.job("verify").code == 0  # so that no unpacking is traced
    trace = slurm_torch.work / "trace"
    slurmd = slurm_torch.cluster.slurmd("node02")
    calls = "trace=%file,%process"
    with subprocess.Popen(
        ["strace", "-f", "-y", "-q", "-s", "4096", "-e", calls, "-o", trace, "-p", str(slurmd)],
        stderr=subprocess.DEVNULL,
    ) as tracing:
        try:
            assert until(lambda: traced(slurmd))
            ran = here.job("run", "--stage", "never", "--", *command)
        finally:
            tracing.send_signal(signal.SIGINT)
            for node in slurm_torch.cluster.nodes:
                slurm_torch.cluster.on(node, ["rm", "-rf", str(data)])
    assert ran.code == 0, ran.stderr
    touched = list(rank_calls(trace.read_text(errors="replace").splitlines()))
    assert len(touched) > 5000
    places = (slurm_torch.project.root.parent, slurm_torch.work, REPO)
    shared = re.compile("|".join(rf'["<]{re.escape(str(place))}[/">]' for place in places))
    assert [line for line in touched if shared.search(line)] == []


def traced(process: int | None) -> bool:
    """Whether every thread of a process has a tracer, so that nothing it starts is missed."""
    threads = Path(f"/proc/{process}/task").glob("*/status")
    return not any("\nTracerPid:\t0\n" in status.read_text() for status in threads)
