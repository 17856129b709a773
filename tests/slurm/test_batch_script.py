"""The batch script under a real Slurm: what sbatch reads in it, and how it ends."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stager.slurm.batch_script import (
    ScriptFacts,
    batch_script,
    make_submit_argv,
    make_submit_environment,
)
from tests.support.batch_scripts import EXAMPLES, FACTS, JOB, asking, driver
from tests.support.cluster import REPO, Cluster
from tests.support.processes import until


def facts(logs: Path, **changed: Any) -> ScriptFacts:
    """A job on one node whose driver stands in for the far side's."""
    job = replace(JOB, log_dir=str(logs), cpus_per_task=1, python_hints=())
    one = asking(FACTS, nodes=(1, 1), cpus_per_task=1)
    return replace(one, **{"job": job, "program": driver(), **changed})


def submit(
    made: ScriptFacts, *options: str, wait: bool = True, **variables: str
) -> tuple[str, int]:
    """The job's id, and sbatch's exit status, with which a job that was waited for ended."""
    done = subprocess.run(
        [*make_submit_argv(made), *(["--wait"] if wait else []), *options],
        input=batch_script(made),
        env=make_submit_environment({**os.environ, **variables}),
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert done.stdout, done.stderr
    return done.stdout.strip().partition(";")[0], done.returncode


def shown(cluster: Cluster, job: str) -> dict[str, str]:
    """What Slurm says of a job, field by field."""
    text = cluster.run(["scontrol", "show", "job", job]).stdout
    return dict(
        field.split("=", 1)
        for line in text.splitlines()
        for field in ([line.strip()] if "Comment=" in line else line.split())
        if "=" in field
    )


def log_of(logs: Path, job: str) -> str:
    path = logs / f"demo.{job}.batch.out"
    return path.read_text() if path.exists() else ""


def left_behind(cluster: Cluster) -> list[str]:
    """What batch scripts have left in the nodes' temporary directories."""
    found = [cluster.on(node, ["find", "/tmp", "/dev/shm", "-name", "stager-batch*"]).stdout
             for node in cluster.nodes]  # fmt: skip
    return "".join(found).split()


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_examples_are_accepted(cluster: Cluster, name: str) -> None:
    """This cluster has neither their GPUs nor their partition."""
    here = ["--partition=torch", "--nodes=3", "--cpus-per-task=1", "--gpus-per-node=0"]
    path = REPO / "docs" / "examples" / f"{name}.sbatch"
    done = cluster.run(["sbatch", "--test-only", *here, str(path)])
    assert " to start at " in done.stderr


def test_options_arrive_as_they_were_given(cluster: Cluster, shared: Path) -> None:
    comment = "a \"b\" \\c # d 'e' %j"
    made = asking(
        facts(shared),
        nodes=(1, 2),
        exclude="node[02-03]",
        salloc_args=("--comment", comment, "--hold"),
        partition="torch",
        time="00:07:00",
    )
    job, _ = submit(made, wait=False)
    said = shown(cluster, job)
    assert said["Comment"].rstrip() == comment
    assert (said["ExcNodeList"], said["Partition"]) == ("node[02-03]", "torch")
    assert (said["TimeLimit"], said["NumNodes"], said["Requeue"]) == ("00:07:00", "1-2", "0")


def test_the_driver_runs_and_its_status_is_the_jobs(cluster: Cluster, shared: Path) -> None:
    logs = shared / "not" / "there yet"
    for code in ("0", "3"):
        job, status = submit(facts(logs), DRIVER_CODE=code)
        assert status == int(code)
        assert f"stager: job {job} restart 0 on " in log_of(logs, job)
        assert "\ndriver /tmp/stager-batch." in log_of(logs, job)
    assert left_behind(cluster) == []


def test_a_log_directory_that_the_node_cannot_make(cluster: Cluster) -> None:
    job, status = submit(facts(Path("/proc/logs")))
    assert status == 3
    assert "cannot write /proc/logs/demo." in shown(cluster, job)["Comment"]
    assert "--log-dir" in shown(cluster, job)["Comment"]


def test_scancel_ends_the_driver(cluster: Cluster, shared: Path) -> None:
    job, _ = submit(facts(shared), wait=False, DRIVER_WAITS="1")
    assert until(lambda: "\ndriver " in log_of(shared, job))
    cluster.run(["scancel", job])
    assert until(lambda: shown(cluster, job)["JobState"] == "CANCELLED")
    assert until(lambda: "signal SIGTERM" in log_of(shared, job))
    assert until(lambda: left_behind(cluster) == [])


def test_a_job_near_its_time_limit_goes_back_into_the_queue(cluster: Cluster, shared: Path) -> None:
    """Slurm sends USR1 itself; the second run appends to the same log."""
    job, _ = submit(asking(facts(shared, requeue=True), time="2"), wait=False, DRIVER_WAITS="1")
    assert until(lambda: "back into the queue (restart 1)" in log_of(shared, job), 600)
    assert until(lambda: shown(cluster, job)["JobState"] == "PENDING")
    again = f"job {job} restart 1 on"
    assert cluster.hurry(job, lambda: again in log_of(shared, job)), shown(cluster, job)
    assert f"job {job} restart 0 on" in log_of(shared, job)
    assert "signal SIGTERM" in log_of(shared, job)


@pytest.mark.full
def test_a_lost_node_does_not_end_the_driver(cluster: Cluster, shared: Path) -> None:
    """It is the driver that says which node was lost, and brings home what there is."""
    made = asking(facts(shared), nodes=(2, 2))
    job, _ = submit(made, "--nodelist=node01,node02", wait=False, DRIVER_WAITS="1")
    assert until(lambda: "\ndriver " in log_of(shared, job))
    cluster.lose("node02")
    cluster.wait_state("node02", "down*", "down")
    assert shown(cluster, job)["JobState"] == "RUNNING"
    assert "signal" not in log_of(shared, job)


def test_secrets_are_not_in_the_job(cluster: Cluster, shared: Path) -> None:
    """It has the variables of the cleaned environment; a user's own SBATCH_EXPORT has no effect."""
    made = facts(shared)
    show = "env >" + str(shared / "env")
    text = batch_script(made).replace("\nmain\n", f"\n{show}\nmain\n")
    env = {**os.environ, "HF_TOKEN": "hf_secret", "SBATCH_EXPORT": "NONE", "MINE": "1"}
    for passed, expected in (((), False), (("HF_TOKEN",), True)):
        subprocess.run(
            [*make_submit_argv(made), "--wait"],
            input=text,
            env=make_submit_environment(env, passed),
            capture_output=True,
            text=True,
            check=True,
            timeout=900,
        )
        inside = (shared / "env").read_text().splitlines()
        assert "MINE=1" in inside
        assert ("HF_TOKEN=hf_secret" in inside) is expected
