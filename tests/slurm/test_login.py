"""The command line with a real Slurm behind it: asking for nodes, following, ending."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time

import pytest

from tests.support.processes import living, until
from tests.support.provoking import STAGER, Bench

pytestmark = pytest.mark.slow


def ranks(bench: Bench) -> list[str]:
    """How all ranks have named themselves, sorted."""
    named = (line.partition(" MASTER_ADDR")[0] for line in bench.lines() if "[RANK" in line)
    return sorted(named)


def test_verify_and_run_ask_for_nodes(bench: Bench) -> None:
    said = bench.stager("verify", "--nodes", "3")
    assert (said.code, said.report["ok"]) == (0, True), said.talk
    nodes, job = list(bench.cluster.nodes), said.report["job_id"]
    assert [node["node"] for node in said.report["nodes"]] == nodes
    assert {node["packages"]["alpha"] for node in said.report["nodes"]} == {"1.0"}
    assert f"job {job}: 3 nodes (node01,node02,node03)" in said.talk
    assert (said.report["left_out"], said.report["ended_by"]) == ([], "")
    assert not list(bench.logs.glob(".job*"))
    assert json.loads((bench.logs / f"job.{job}.json").read_text())["nodes"] == nodes
    assert bench.queued() == ""

    said = bench.stager("run", "--nodes", "3", "--nproc-per-node", "2", "--", "train.py")
    assert (said.code, said.report["world_size"]) == (0, 6), said.talk
    assert (said.report["bytes_broadcast"], said.report["plan"]["bytes"]) == (0, 0), said.talk
    assert ranks(bench) == [f"[RANK {rank}] WORLD_SIZE=6" for rank in range(6)]
    assert said.report["exit_codes"] == dict.fromkeys(nodes, 0)


def test_an_allocation_that_stands_is_used(bench: Bench) -> None:
    done = subprocess.run(
        ["salloc", "--nodes=2", STAGER, "verify", "--json", "--log-dir", str(bench.logs)],
        cwd=bench.root,
        env={**os.environ, **bench.env},
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


def test_the_users_own_options(bench: Bench) -> None:
    """Those of ``$SALLOC_OPTS``, and Slurm's own, short and long, on the command line."""
    bench.env["SALLOC_OPTS"] = "--exclude=node01 --comment='two words'"
    options = ("-N", "1", "-p", "torch", "-t", "00:07:00", "-A", "anybody", "-w", "node03")
    more = ("-x", "node02", "--mem", "64M", "--salloc-arg=--nice=5")
    said = bench.stager("verify", *options, *more)
    assert said.code == 0, said.talk
    assert [node["node"] for node in said.report["nodes"]] == ["node03"]
    shown = bench.cluster.run(["scontrol", "show", "job", said.report["job_id"]]).stdout
    fields = {
        "Partition": "torch",
        "Account": "anybody",
        "TimeLimit": "00:07:00",
        "MinMemoryNode": "64M",
        "Nice": "5",
        "ReqNodeList": "node03",
        "ExcNodeList": "node[01-02]",
    }
    assert dict(word.partition("=")[::2] for word in shown.split()).items() >= fields.items()
    assert "Comment=two words" in shown


def test_a_batch_job_that_is_followed(bench: Bench) -> None:
    argv = ("--batch", "--wait", "--nodes", "2", "--nproc-per-node", "2", "--", "train.py")
    said = bench.stager("run", *argv)
    assert (said.code, said.report["ok"], said.report["world_size"]) == (0, True, 4), said.talk
    assert f"submitted batch job {said.report['job_id']}" in said.talk
    assert "  node01 proj=ok pkgs=ok" in said.talk.splitlines()
    assert ranks(bench) == [f"[RANK {rank}] WORLD_SIZE=4" for rank in range(4)]
    for rank in range(4):  # the first node's are shown
        assert (f"[RANK {rank}]" in said.talk) is (rank < 2), said.talk
    said = bench.stager("run", *argv, "3=raise", "all=sleep")
    assert (said.code, said.failure["node"], said.failure["rank"]) == (3, "node02", 3), said.talk
    assert said.failure["cause"] == "ValueError: this rank is unhappy"


def test_what_slurm_refuses(bench: Bench) -> None:
    for option, value, message, hint in (
        ("--partition", "nope", "invalid partition specified: nope", "sinfo"),
        ("--exclude", "node99", "Invalid node name specified", "--exclude"),
    ):
        batch = ["--batch"] if option == "--exclude" else []
        said = bench.stager("verify", "--nodes", "2", *batch, option, value)
        assert (said.code, said.report["ok"]) == (1, False)
        assert message in said.error["message"]
        assert hint in said.error["hint"]
    assert bench.queued() == ""


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        signal.SIGKILL,
        *(pytest.param(one, marks=pytest.mark.full) for one in (signal.SIGINT, signal.SIGHUP)),
    ],
)
def test_an_ending_from_outside(bench: Bench, number: signal.Signals) -> None:
    """A second Ctrl-C changes nothing; the nodes are given back, and nothing is left running."""
    started = bench.start("run", "--nodes", "3", "--", "train.py", "all=sleep")
    bench.at_work(started, 3)
    killed = number == signal.SIGKILL
    for _ in range(2 if number == signal.SIGINT else 1):
        if killed:
            started.kill()
        else:
            os.killpg(started.pid, number)
        time.sleep(0.3)
    said = bench.finish(started)
    assert said.code == (-number if killed else 130), said.talk
    if not killed:
        assert said.report["first_failure"] is None
        assert "interrupted; nothing is left running" in said.talk
    bench.assert_clean(killed=killed)
    # Where stager was killed, salloc hears of its job's end a moment after the nodes do.
    assert until(lambda: not living(bench.logs)), living(bench.logs)


def test_giving_up_while_the_job_waits(bench: Bench) -> None:
    # `cat` ends with its standard input, and salloc, which would outlive a signal, with it.
    argv = ["salloc", "--nodes=3", "--exclusive", "cat"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE):
        assert until(lambda: " R " in bench.queued())
        started = bench.start("verify", "--nodes", "1")
        assert until(lambda: " PD " in bench.queued())
        os.killpg(started.pid, signal.SIGINT)
        said = bench.finish(started)
        assert said.code == 130
        assert "interrupted; nothing is left running" in said.talk
        assert " PD " not in bench.queued()


def test_scancel_is_a_failure_with_a_cause(bench: Bench) -> None:
    started = bench.start("run", "--nodes", "2", "--", "train.py", "all=sleep")
    bench.at_work(started, 2)
    bench.cluster.run(["scancel", bench.job_id()])
    said = bench.finish(started)
    assert (said.code, said.report["ended_by"]) == (3, "cancelled"), said.talk
    assert "was cancelled from outside" in said.failure["cause"]
    assert said.talk.count("cancelled") <= 2
    bench.assert_clean(killed=True)


def test_an_interrupted_wait_leaves_the_batch_job(bench: Bench) -> None:
    started = bench.start("run", "--batch", "--wait", "--", "train.py", "all=sleep")
    bench.at_work(started, 1)
    number = bench.job_id()
    os.killpg(started.pid, signal.SIGINT)
    said = bench.finish(started)
    assert said.code == 130
    assert f"job {number} keeps running; scancel {number} ends it" in said.talk
    assert bench.queued().split()[0] == number
    bench.cluster.run(["scancel", number])
    bench.assert_clean(killed=True)
