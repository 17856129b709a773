"""What can be wrong with nodes and with Slurm: named, with a remedy, and nothing stays behind."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import time

import pytest

from tests.support.incidents import FULL, event_log
from tests.support.node_faults import only_python
from tests.support.provoking import ROOT, STAGER, Bench, Said

pytestmark = pytest.mark.slow


def test_no_slurm_commands(bench: Bench, tmp_path: Path) -> None:
    """No node is to blame, so it is a mistake in the call: exit status 1."""
    bench.env["PATH"] = str(tmp_path)
    said = bench.stager("verify", "--nodes", "3")
    assert said.code == 1
    assert "the job needs 3 nodes: Slurm is not available here" in said.error["message"]
    assert "not on PATH: salloc, sbatch, srun" in said.error["message"]
    assert "login node" in said.error["hint"]
    assert "--allocation local" in said.error["hint"]


@pytest.mark.full
def test_a_number_that_comes_again_after_slurm_was_set_up_anew(bench: Bench) -> None:
    """What the older job left is neither believed nor lost; two commands may share a number."""
    used = bench.cluster.run(["sbatch", "--parsable", "--output=/dev/null", "--wrap=true"]).stdout
    number = str(int(used) + 1)
    old = event_log(bench.logs, {"n2": [FULL]}, job_id=number, ended=time() - 3600)
    log = bench.logs / f"older.{number}.node01.0.out"
    log.write_text("RuntimeError: of the older job\n")
    said = bench.stager("run", "--batch", "--wait", "--nodes", "1", "--", "train.py")
    assert (said.code, said.report["job_id"]) == (0, number), said.talk
    (folder,) = bench.logs.glob(f"older-{number}-*")
    assert f"files of another job {number} have been moved to {folder}" in said.talk
    assert {path.name for path in folder.iterdir()} == {old.name, log.name}
    (begun,) = bench.events("job")
    config = bench.cluster.run(["scontrol", "show", "config"]).stdout
    assert f"= {begun['cluster']}\n" in config
    assert "of the older job" not in " ".join(bench.lines())

    argv = [STAGER, "verify", "--log-dir", str(bench.logs), "--nodes", "1"]
    twice = f"cd {shlex.quote(str(bench.root))} && {shlex.join(argv)} && {shlex.join(argv)}"
    variables = [f"{name}={value}" for name, value in bench.env.items()]
    bench.cluster.run(["env", *variables, "salloc", "--nodes=1", "sh", "-c", twice])
    assert len(bench.events("job")) == 3
    assert len(list(bench.logs.glob("older-*"))) == 1


@pytest.mark.full
def test_a_place_that_cannot_be_written(bench: Bench) -> None:
    place = f"/{ROOT}/incoming"
    with before_sbcast(bench) as (started, number):
        bench.cluster.on("node02", ["mount", "--bind", place, place])
        bench.cluster.on("node02", ["mount", "-o", "remount,ro,bind", place])
    try:
        said = bench.finish(started)
    finally:
        bench.cluster.on("node02", ["umount", "--lazy", place])
    (bench.place("node02") / "incoming" / f"job-{number}.0").rmdir()  # the agent could not
    assert_named(
        said, "node02", "Read-only file system", "the free space and the permissions there"
    )
    bench.assert_clean()


@pytest.mark.full
def test_a_file_that_is_there_already(bench: Bench) -> None:
    """It can only be this job's own, so it is replaced: the longer one leaves no end behind."""
    with before_sbcast(bench) as (started, number):
        file = bench.place("node02") / "incoming" / f"job-{number}.0" / "bundle.tar"
        file.write_bytes(b"x" * (20 << 20))
    said = bench.finish(started)
    assert said.code == 0, said.talk
    assert said.report["bytes_broadcast"] == said.report["plan"]["bytes"] > 0
    bench.assert_clean()


def test_a_node_without_python(bench: Bench) -> None:
    with only_python(bench.cluster, "node02", "exit 127", bench.logs.parent):
        said = bench.stager("verify", "--nodes", "3")
    assert_named(said, "node02", "no Python 3.9 or newer was found")
    bench.assert_clean()


def assert_named(said: Said, node: str, *words: str) -> None:
    """Exit status 3, that node and no other, the words, and how to go on without it."""
    assert said.code == 3, said.talk
    assert [one["node"] for one in said.report["nodes"] if one["problems"]] == [node], said.talk
    for word in words:
        assert word in said.problems(node)
    assert f"--exclude={node}" in said.talk


@contextmanager
def before_sbcast(bench: Bench) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A job of three nodes that is just about to send; its number. It goes on afterwards."""
    gate = bench.gate("sbcast")
    started = bench.start("verify", "--nodes", "3", "--transfer", "sbcast")
    yield started, gate.reached(started)
    gate.open()
