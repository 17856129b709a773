"""The files of a job: full disks, many files, and those of an older job of its number."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bundle.driver.logs import move_older_files
from bundle.protocol.enumerations import Allocation
from bundle.protocol.job import Job
from tests.support.jobs import PLAIN

REPO = Path(__file__).resolve().parents[3]
NODES, EACH = 128, 64
PROGRAM = """
import json, os, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
from bundle.driver.logs import Logs
from bundle.driver.output import OutputLogs
from bundle.protocol.events import RankOutput
from bundle.protocol.job import Job
job = Job.from_json(json.loads(sys.stdin.read()))
logs = Logs(job)
output = OutputLogs(logs)
nodes, each = int(sys.argv[1]), int(sys.argv[2])
ranks = [(f"n{rank // each:04}", rank) for rank in range(nodes * each)]
for node, rank in ranks:
    logs.begin(node, rank)
most = 0
for line in range(2):
    for node, rank in ranks:
        output.write(RankOutput(node, rank, b"rank %d line %d\\n" % (rank, line), True), rank)
    most = max(most, len(os.listdir("/proc/self/fd")))
print(json.dumps({"open": most, "fault": logs.fault, "lost": len(output.losses())}))
"""


def run(program: str, logs: Path, *arguments: str) -> Any:
    """Run a program with a job whose logs are in a folder; return what it prints."""
    job = replace(PLAIN, log_dir=str(logs))
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        input=json.dumps(job.to_json()),
        capture_output=True,
        text=True,
        check=True,
        cwd=REPO,
    )
    return json.loads(done.stdout)


def test_8192_ranks_have_their_logs_with_1024_open_files(tmp_path: Path) -> None:
    said = run(PROGRAM, tmp_path / "logs", str(NODES), str(EACH))
    assert (said["fault"], said["lost"]) == ("", 0)
    assert 8 < said["open"] < 1024
    for rank in range(NODES * EACH):
        log = tmp_path / "logs" / f"demo.4711.n{rank // EACH:04}.{rank}.out"
        assert log.read_text() == f"rank {rank} line 0\nrank {rank} line 1\n"
    order = (tmp_path / "logs" / "order.4711.tsv").read_text().splitlines()
    assert len(order) == 2 * NODES * EACH


CUT = """
import json, resource, signal, sys
from bundle.driver.logs import Logs
from bundle.driver.output import OutputLogs
from bundle.protocol.events import RankOutput
from bundle.protocol.job import Job
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
logs = Logs(Job.from_json(json.loads(sys.stdin.read())))
output = OutputLogs(logs)
most = resource.getrlimit(resource.RLIMIT_FSIZE)
def write(data):
    output.write(RankOutput("n0", 0, data, True), 0)
write(b"x" * 199 + b"\\n")
resource.setrlimit(resource.RLIMIT_FSIZE, (210, most[1]))
write(b"the first half of a line")
write(b", and the second\\n")
resource.setrlimit(resource.RLIMIT_FSIZE, most)
write(b"a line\\n")
write(b"another\\n")
print(json.dumps([logs.fault, *(loss.bytes for loss in output.losses())]))
"""


def test_what_follows_a_line_that_a_full_disk_cut_is_a_line_of_its_own(tmp_path: Path) -> None:
    """Here it is the limit of a file's size: 10 bytes of the line fit."""
    fault, lost = run(CUT, tmp_path / "logs")
    assert fault.startswith("demo.4711.n0.0.out: ")
    log = (tmp_path / "logs" / "demo.4711.n0.0.out").read_text()
    assert log == f"{'x' * 199}\nthe first \na line\nanother\n"
    assert lost == len("half of a line, and the second\n")


# --- The files of another job of the same number, which a new one must not write to --------------


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
