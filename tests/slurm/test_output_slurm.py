"""All that ranks write reaches their logs byte by byte, or is said to be lost; on real Slurm."""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.output import RANK, choked, count
from tests.support.building import Project
from tests.support.cluster import Cluster, make_cluster, remove_cluster
from tests.support.events import event_keys
from tests.support.golden import check_golden
from tests.support.needs import needs
from tests.support.provoking import empty_nodes

NODES, LINES, WIDTH = 8, 8000, 1500

BINARY = """\
import os
data = bytes(range(256)) * 300 + b"\\r\\n\\xff\\x1e no end"
while data:
    data = data[os.write(1, data):]
"""
PROXY = """\
#!{python}
import os, subprocess, sys
argv = ["{srun}", *sys.argv[1:]]
if "--job-name=stager-launch" not in argv:
    os.execv(argv[0], argv)
running = subprocess.Popen(argv, stdout=subprocess.PIPE)
seen = 0
for line in running.stdout:
    if line.startswith(b"\\x1enode02:1 ") and line.split(b" ")[1] in (b"3", b"4"):
        seen += 1
        if seen <= 2:
            line = line[:50] + b"slurmstepd: something else\\n" + line[50:]
    sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()
sys.exit(running.wait())
"""


@pytest.fixture
def large() -> Iterator[Cluster]:
    """A cluster of more nodes than the others'."""
    needs("slurm")
    name = f"test-{os.getpid()}-output"
    try:
        yield make_cluster(name, "--nodes", str(NODES))
    finally:
        remove_cluster(name)


def run(
    project: Project, logs: Path, nodes: int, *words: str, **env: str
) -> tuple[int, dict[str, object], str]:
    """Exit code, report and talk of a job."""
    options = ["--allocation", "slurm", "--nodes", str(nodes), "--log-dir", str(logs)]
    ran = project.stager("run", "--json", *options, "--", *words, env=env)
    return ran.returncode, json.loads(ran.stdout or "{}"), ran.stderr


@pytest.mark.full
def test_a_backlog_when_tasks_end_costs_nothing(large: Cluster, slurm_project: Project) -> None:
    """The driver is stopped most of the time, so Slurm still has much to pass on then."""
    (slurm_project.root / "train.py").write_text(RANK)
    logs = slurm_project.root / "logs"
    with choked(slurm_project.root.parent):
        words = ("train.py", str(LINES), str(WIDTH))
        code, report, said = run(slurm_project, logs, NODES, *words, **large.env)
    assert (code, report["ok"], report["logs_lost"]) == (0, True, []), said
    assert count(logs, WIDTH) == (NODES * LINES, 0)


def test_binary_output_is_kept_byte_by_byte(cluster: Cluster, slurm_project: Project) -> None:
    """And the job's events are those of a golden file."""
    empty_nodes(cluster)  # what they have of earlier tests is in the events
    (slurm_project.root / "train.py").write_text(BINARY)
    logs = slurm_project.root / "logs"
    read = {"STAGER_CLUSTER_STAGE": "never"}  # whatever the speed of this machine's disk
    code, report, said = run(slurm_project, logs, 2, "train.py", **cluster.env, **read)
    assert (code, report["logs_lost"]) == (0, []), said
    check_golden("slurm.events.txt", event_keys(logs / f"events.{report['job_id']}.jsonl"))
    (log,) = logs.glob("*.node02.1.out")
    expected = bytes(range(256)) * 300 + b"\r\n\xff\x1e no end"
    assert log.read_bytes().endswith(expected)
    mine = log.read_bytes().removesuffix(expected)
    assert all(line.startswith(b"NODE ") or b" -> " in line for line in mine.splitlines())


def test_frames_that_are_damaged_are_sent_again(
    cluster: Cluster, slurm_project: Project, tmp_path: Path
) -> None:
    """Something else lands inside two frames of a rank.

    So much is printed that these are frames of output, also compressed, and not of the answer.
    """
    places = [*os.environ["PATH"].split(os.pathsep), "/usr/bin"]
    srun = next(path for place in places if (path := Path(place, "srun")).exists())
    proxy = tmp_path / "bin" / "srun"
    proxy.parent.mkdir()
    proxy.write_text(PROXY.format(python=sys.executable, srun=srun))
    proxy.chmod(proxy.stat().st_mode | stat.S_IXUSR)
    (slurm_project.root / "train.py").write_text(RANK)
    logs = slurm_project.root / "logs"
    path = os.pathsep.join([str(proxy.parent), os.environ["PATH"]])
    code, report, said = run(
        slurm_project, logs, 2, "train.py", "2000", "97", **cluster.env, PATH=path
    )
    assert (code, report["ok"], report["logs_lost"]) == (0, True, []), said
    assert count(logs, 97) == (4000, 0)
