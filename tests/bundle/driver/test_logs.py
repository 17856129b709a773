"""The files of a job: full disks, many files, and those of an older job of its number."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from bundle.driver.logs import Logs, move_older_files
from bundle.driver.output import OutputLogs
from bundle.protocol.enumerations import Allocation
from bundle.protocol.events import RankOutput
from bundle.protocol.job import Job
from tests.support.jobs import PLAIN


@contextlib.contextmanager
def limited(what: int, most: int) -> Iterator[None]:
    """Lower a limit of this process."""
    before = resource.getrlimit(what)
    resource.setrlimit(what, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(what, before)


def test_more_ranks_have_their_logs_than_there_may_be_open_files(tmp_path: Path) -> None:
    ranks = [(f"n{rank // 64:04}", rank) for rank in range(1024)]
    with limited(resource.RLIMIT_NOFILE, 256):
        logs = Logs(replace(PLAIN, log_dir=str(tmp_path / "logs")))
        output = OutputLogs(logs)
        for node, rank in ranks:
            logs.begin(node, rank)
        for line in range(2):
            for node, rank in ranks:
                text = b"rank %d line %d\n" % (rank, line)
                output.write(RankOutput(node, rank, text, of_ranks=True), rank)
            assert 8 < len(os.listdir("/proc/self/fd")) < 256
    assert (logs.fault, output.losses()) == ("", [])
    for node, rank in ranks:
        log = tmp_path / "logs" / f"demo.4711.{node}.{rank}.out"
        assert log.read_text() == f"rank {rank} line 0\nrank {rank} line 1\n"
    order = (tmp_path / "logs" / "order.4711.tsv").read_text().splitlines()
    assert len(order) == 2 * len(ranks)


def test_what_follows_a_line_that_a_full_disk_cut_is_a_line_of_its_own(tmp_path: Path) -> None:
    """Here it is the limit of a file's size: 10 bytes of the line fit."""
    logs = Logs(replace(PLAIN, log_dir=str(tmp_path / "logs")))
    output = OutputLogs(logs)

    def write(*texts: bytes) -> None:
        for text in texts:
            output.write(RankOutput("n0", 0, text, of_ranks=True), 0)

    write(b"x" * 199 + b"\n")
    with limited(resource.RLIMIT_FSIZE, 210):
        write(b"the first half of a line", b", and the second\n")
    write(b"a line\n", b"another\n")
    assert logs.fault.startswith("demo.4711.n0.0.out: ")
    log = (tmp_path / "logs" / "demo.4711.n0.0.out").read_text()
    assert log == f"{'x' * 199}\nthe first \na line\nanother\n"
    (loss,) = output.losses()
    assert loss.bytes == len("half of a line, and the second\n")


FILES = ("events.4711.jsonl", "job.4711.json", "demo.4711.n1.0.out", "a.4711.batch.out")
OTHERS = ("events.471.jsonl", "demo.4711.txt", "demo.14711.n1.0.out")


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    folder = tmp_path / "logs"
    folder.mkdir()
    return folder


@pytest.fixture
def job(logs: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    """A job whose log directory has files of its number; there is no scontrol."""
    begun = {"event": "job", "time": time.time() - 3600, "nodes": [], "cluster": "alpha"}
    for name in (*FILES, *OTHERS):
        (logs / name).write_text("old\n")
    (logs / FILES[0]).write_text(json.dumps(begun) + "\n")
    monkeypatch.setenv("PATH", str(logs))
    return replace(PLAIN, log_dir=str(logs))


def test_those_of_another_cluster_are_moved_as_a_whole(
    job: Job, logs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "beta")
    folder = Path(move_older_files(job))
    assert folder.parent == logs
    assert folder.name.startswith("older-4711-2")
    assert {path.name for path in folder.iterdir()} == {*FILES}
    assert {path.name for path in logs.iterdir()} == {*OTHERS, folder.name}
    assert move_older_files(job) == ""


def test_those_of_an_earlier_attempt_and_of_the_same_allocation_stay(
    job: Job, logs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a word from Slurm, its cluster's are taken for those of the same allocation."""
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "beta")
    assert move_older_files(replace(job, attempt=1)) == ""
    assert move_older_files(replace(job, allocation=Allocation.LOCAL)) == ""
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "alpha")
    assert move_older_files(job) == ""
    assert {path.name for path in logs.iterdir()} == {*FILES, *OTHERS}
