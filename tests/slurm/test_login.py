"""The command line with a real Slurm behind it: asking for nodes, following, ending, cleaning."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from stager.pack.bundle_file import read_manifest
from tests.support.building import Project
from tests.support.cluster import Cluster
from tests.support.processes import living, until

pytestmark = pytest.mark.slow

STAGER = str(Path(sys.executable).with_name("stager"))


def job(
    project: Project, action: str, *arguments: str, env: Mapping[str, str] | None = None
) -> tuple[int, dict[str, Any], str]:
    """Exit code, JSON and talk of a job; its logs are beside the project."""
    options = ["--json", "--log-dir", str(logs(project))]
    done = project.stager(action, *options, *arguments, env=env)
    assert "Traceback" not in done.stderr.replace("  | Traceback", ""), done.stderr
    return done.returncode, json.loads(done.stdout), done.stderr


def logs(project: Project) -> Path:
    return project.root.parent / "logs"


def output(project: Project, report: Mapping[str, Any]) -> list[str]:
    """The lines of all ranks."""
    found = sorted(logs(project).glob(f"project.{report['job_id']}.node*.out"))
    return [line for path in found for line in path.read_text().splitlines()]


def queued(cluster: Cluster) -> str:
    return cluster.run(["squeue", "--noheader"]).stdout


def nothing_left(cluster: Cluster) -> bool:
    ranks = [
        line
        for node in cluster.nodes
        for line in cluster.on(node, ["ps", "-eo", "args"]).stdout.splitlines()
        if "train.py" in line or "run_wrapper" in line or " agent " in line
    ]
    return not ranks and not queued(cluster)


def test_verify_asks_for_nodes(cluster: Cluster, slurm_project: Project) -> None:
    code, report, said = job(slurm_project, "verify", "--nodes", "3")
    assert (code, report["ok"]) == (0, True), said
    assert [node["node"] for node in report["nodes"]] == list(cluster.nodes)
    assert {node["packages"]["alpha"] for node in report["nodes"]} == {"1.0"}
    assert f"job {report['job_id']}: 3 nodes (node01,node02,node03)" in said
    assert (report["left_out"], report["ended_by"]) == ([], "")
    assert not list(logs(slurm_project).glob(".job*"))
    kept = json.loads((logs(slurm_project) / f"job.{report['job_id']}.json").read_text())
    assert kept["nodes"] == list(cluster.nodes)
    assert queued(cluster) == ""

    _, again, said = job(slurm_project, "verify", "--nodes", "3")
    assert (again["ok"], again["bytes_broadcast"], again["plan"]["bytes"]) == (True, 0, 0), said


def test_people_get_a_line_a_node(cluster: Cluster, slurm_project: Project) -> None:
    done = slurm_project.stager("verify", "--nodes", "2", "--log-dir", str(logs(slurm_project)))
    assert done.returncode == 0, done.stderr
    assert sorted(line[:14] for line in done.stdout.splitlines()) == [
        "NODE node01 OK",
        "NODE node02 OK",
    ]
    assert ": nodes allocated" in done.stderr


def test_run_starts_every_rank(cluster: Cluster, slurm_project: Project) -> None:
    code, report, said = job(
        slurm_project, "run", "--nodes", "3", "--nproc-per-node", "2", "--", "train.py"
    )
    assert (code, report["world_size"]) == (0, 6), said
    assert report["nodes"] == list(cluster.nodes)
    ranks = sorted(line for line in output(slurm_project, report) if line.startswith("[RANK"))
    assert ranks == [f"[RANK {rank}] WORLD_SIZE=6" for rank in range(6)]
    assert report["exit_codes"] == dict.fromkeys(cluster.nodes, 0)


def test_an_allocation_that_stands_is_used(cluster: Cluster, slurm_project: Project) -> None:
    inner = ["stager", "verify", "--json", "--log-dir", str(logs(slurm_project))]
    done = subprocess.run(
        ["salloc", "--nodes=2", STAGER, *inner[1:]],
        cwd=slurm_project.root,
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert f"Granted job allocation {report['job_id']}" in done.stderr
    assert [node["node"] for node in report["nodes"]] == ["node01", "node02"]
    assert done.stderr.count("Granted job allocation") == 1


def test_the_users_own_options(cluster: Cluster, slurm_project: Project) -> None:
    """Those of ``$SALLOC_OPTS``, and Slurm's own, short and long, on the command line."""
    env = {"SALLOC_OPTS": "--exclude=node01 --comment='two words'"}
    options = ("-N", "1", "-p", "torch", "-t", "00:07:00", "-A", "anybody", "-w", "node03")
    more = ("-x", "node02", "--mem", "64M", "--salloc-arg=--nice=5")
    code, report, said = job(slurm_project, "verify", *options, *more, env=env)
    assert code == 0, said
    assert [node["node"] for node in report["nodes"]] == ["node03"]
    shown = cluster.run(["scontrol", "show", "job", report["job_id"]]).stdout
    fields = dict(word.partition("=")[::2] for word in shown.split())
    assert (fields["Partition"], fields["Account"]) == ("torch", "anybody")
    assert (fields["TimeLimit"], fields["MinMemoryNode"], fields["Nice"]) == (
        "00:07:00",
        "64M",
        "5",
    )
    assert (fields["ReqNodeList"], fields["ExcNodeList"]) == ("node03", "node[01-02]")
    assert "Comment=two words" in shown


def test_a_batch_job_that_is_followed(cluster: Cluster, slurm_project: Project) -> None:
    argv = ("--batch", "--wait", "--nodes", "2", "--nproc-per-node", "2", "--", "train.py")
    code, report, said = job(slurm_project, "run", *argv)
    assert (code, report["ok"], report["world_size"]) == (0, True, 4), said
    assert f"submitted batch job {report['job_id']}" in said
    assert "  node01 proj=ok pkgs=ok" in said.splitlines()
    shown = [line for line in said.splitlines() if line.startswith("[RANK")]
    assert sorted(shown) == [f"[RANK {rank}] WORLD_SIZE=4" for rank in (0, 1)], "the first node's"
    assert sum(line.startswith("[RANK") for line in output(slurm_project, report)) == 4


@pytest.mark.full
def test_the_verdict_of_a_batch_job_that_fails(cluster: Cluster, slurm_project: Project) -> None:
    argv = ("--batch", "--wait", "--nodes", "2", "--", "train.py", "fail")
    code, report, said = job(slurm_project, "run", *argv)
    assert (code, report["ok"]) == (3, False)
    failure = report["first_failure"]
    assert (failure["node"], failure["rank"]) == ("node02", 1), said
    assert failure["cause"] == "ValueError: rank one is unhappy"


def test_a_batch_job_that_is_not_followed(cluster: Cluster, slurm_project: Project) -> None:
    code, report, said = job(slurm_project, "verify", "--batch", "--nodes", "1")
    assert (code, report["submitted"]) == (0, True)
    assert f"scancel {report['job_id']}" in said
    events = Path(report["events"])
    assert until(lambda: events.exists() and '"result"' in events.read_text())
    assert Path(report["log"]).exists()


def test_a_printed_script_runs_by_itself(cluster: Cluster, slurm_project: Project) -> None:
    """And a command for one machine becomes one for several."""
    command = ["torchrun", "--standalone", "--nproc_per_node=2", "train.py"]
    done = slurm_project.stager(
        "script", "--nodes", "2", "--log-dir", str(logs(slurm_project)), "--", *command
    )
    assert done.returncode == 0, done.stderr
    assert "--standalone" in done.stderr
    assert done.stdout.startswith("#!/bin/bash\n#SBATCH ")
    file = slurm_project.root.parent / "job.sbatch"
    file.write_text(done.stdout)
    number = cluster.run(["sbatch", "--parsable", "--wait", str(file)]).stdout.strip()
    ranks = [line for line in output(slurm_project, {"job_id": number}) if line.startswith("[RANK")]
    assert sorted(ranks) == [f"[RANK {rank}] WORLD_SIZE=4" for rank in range(4)]


@pytest.mark.parametrize("batch", [(), ("--batch",)], ids=["salloc", "sbatch"])
def test_what_slurm_refuses(
    cluster: Cluster, slurm_project: Project, batch: tuple[str, ...]
) -> None:
    refused = {
        ("--partition", "nope"): ("invalid partition specified: nope", "sinfo"),
        ("--exclude", "node99"): ("Invalid node name specified", "--exclude"),
        ("--reservation", "nope"): (
            "Requested reservation is invalid",
            "scontrol show reservation",
        ),
        ("--constraint", "nope"): ("Invalid feature specification", "--constraint"),
    }
    for options, (said, hint) in refused.items():
        code, report, _ = job(slurm_project, "verify", "--nodes", "2", *batch, *options)
        assert (code, report["ok"]) == (1, False)
        assert said in report["error"]["message"]
        assert hint in report["error"]["hint"]
    assert queued(cluster) == ""


def test_a_dry_run_asks_for_nothing(cluster: Cluster, slurm_project: Project) -> None:
    for more in ((), ("--batch",)):
        code, report, _ = job(
            slurm_project, "run", "--nodes", "3", "--dry-run", *more, "--", "/of/the/nodes/a.py"
        )
        assert (code, report["dry_run"]) == (0, True)
        assert report["argv"][0] == ("sbatch" if more else "salloc")
        assert report["bytes_at_most"] == read_manifest(Path(report["bundle"])).size
    assert queued(cluster) == ""
    assert not list(logs(slurm_project).glob("events.*"))


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        signal.SIGKILL,
        *(pytest.param(one, marks=pytest.mark.full) for one in (signal.SIGINT, signal.SIGHUP)),
    ],
)
def test_an_ending_from_outside(
    cluster: Cluster, slurm_project: Project, number: signal.Signals
) -> None:
    """A second Ctrl-C changes nothing; the nodes are given back, and nothing is left running."""
    started = begin(slurm_project, "run", "--nodes", "3", "--", "train.py", "sleep")
    for _ in range(2 if number == signal.SIGINT else 1):
        if number == signal.SIGKILL:
            started.kill()
        else:
            os.killpg(started.pid, number)
        time.sleep(0.3)
    out, err = started.communicate(timeout=900)
    answered = number != signal.SIGKILL
    assert started.returncode == (130 if answered else -number), err
    if answered:
        assert json.loads(out)["first_failure"] is None
        assert "interrupted; nothing is left running" in err
    assert until(lambda: nothing_left(cluster))
    # Where stager was killed, salloc hears of its job's end a moment after the nodes do.
    place = slurm_project.root.parent
    assert until(lambda: not living(place)), living(place)


def test_giving_up_while_the_job_waits(cluster: Cluster, slurm_project: Project) -> None:
    # `cat` ends with its standard input, and salloc, which would outlive a signal, with it.
    argv = ["salloc", "--nodes=3", "--exclusive", "cat"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE):
        assert until(lambda: " R " in queued(cluster))
        started = start(slurm_project, "verify", "--nodes", "1")
        assert until(lambda: " PD " in queued(cluster))
        os.killpg(started.pid, signal.SIGINT)
        _, err = started.communicate(timeout=900)
        assert started.returncode == 130
        assert "interrupted; nothing is left running" in err
        assert " PD " not in queued(cluster)


def test_scancel_is_a_failure_with_a_cause(cluster: Cluster, slurm_project: Project) -> None:
    started = begin(slurm_project, "run", "--nodes", "2", "--", "train.py", "sleep")
    number = queued(cluster).split()[0]
    cluster.run(["scancel", number])
    out, err = started.communicate(timeout=900)
    report = json.loads(out)
    assert (started.returncode, report["ended_by"]) == (3, "cancelled"), err
    assert "was cancelled from outside" in report["first_failure"]["cause"]
    assert err.count("cancelled") <= 2
    assert until(lambda: nothing_left(cluster))


def test_an_interrupted_wait_leaves_the_batch_job(cluster: Cluster, slurm_project: Project) -> None:
    started = begin(slurm_project, "run", "--batch", "--wait", "--", "train.py", "sleep")
    number = queued(cluster).split()[0]
    os.killpg(started.pid, signal.SIGINT)
    _, err = started.communicate(timeout=900)
    assert started.returncode == 130
    assert f"job {number} keeps running; scancel {number} ends it" in err
    assert queued(cluster).split()[0] == number
    cluster.run(["scancel", number])
    assert until(lambda: nothing_left(cluster))


def test_clean(cluster: Cluster, slurm_project: Project) -> None:
    for node in cluster.nodes:  # what killed jobs of earlier tests have left is kept for an hour
        cluster.on(node, ["sh", "-c", "rm -rf /tmp/stager-*"])
    code, _, said = job(slurm_project, "verify", "--nodes", "3")
    assert code == 0, said
    for _ in range(2):  # what earlier tests have left, too
        code, report, said = job(slurm_project, "clean", "--nodes", "3", "--nodes-only")
        assert code == 0, said
    assert report["items"] == []  # the project's newest stays
    code, report, said = job(slurm_project, "clean", "--nodes", "3", "--nodes-only", "--all")
    assert code == 0, said
    assert {item["place"] for item in report["items"]} == set(cluster.nodes)
    assert report["bytes"] > 0
    for node in cluster.nodes:
        assert cluster.on(node, ["find", "/tmp", "-path", "*stager-*"]).stdout == ""


def start(project: Project, action: str, *arguments: str) -> subprocess.Popen[str]:
    """The command line as a shell starts it, in a process group of its own."""
    return subprocess.Popen(
        [STAGER, action, "--json", "--log-dir", str(logs(project)), *arguments],
        cwd=project.root,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def begin(project: Project, action: str, *arguments: str) -> subprocess.Popen[str]:
    """The same, once its ranks are at work."""
    started = start(project, action, *arguments)

    def at_work() -> bool:
        return any("[RANK" in path.read_text() for path in logs(project).glob("*.node*.out"))

    if not until(at_work):
        started.terminate()
        pytest.fail(f"the ranks did not begin: {started.communicate(timeout=900)}")
    return started
