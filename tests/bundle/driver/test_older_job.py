"""The files of another job of the same number, which a new one must not write to."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from bundle.driver.logs import move_older_files
from bundle.protocol.enumerations import Allocation
from bundle.protocol.job import Job
from tests.support.jobs import PLAIN

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
