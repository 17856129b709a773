from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from time import time

import pytest

from bundle.protocol.events import JobBegins, Record
from stager.config.job_settings import JobOptions
from stager.config.template import default
from stager.core.store import Store
from stager.incidents.bad_nodes import avoiding, expect, failed_nodes, pointing_out, remember
from stager.jobs.job_description import settle
from stager.jobs.outcome import Outcome
from stager.jobs.preparation import Prepared
from stager.logs.job_record import records
from stager.slurm.request import PartitionNode, Source, read_nodes
from tests.support.incidents import FULL, event_log
from tests.support.outcomes import job, slurm_job

LISTED = read_nodes("torch* n1 4 idle\ntorch* n2 4 idle\ntorch* n3 4 idle\n")


class Heard:
    """What a person would read."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.warnings: list[str] = []

    def note(self, line: str) -> None:
        self.notes.append(line)

    def warn(self, line: str) -> None:
        self.warnings.append(line)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "offline")


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    return tmp_path / "logs"


def prepared(logs: Path, options: JobOptions, source: Source = "salloc") -> Prepared:
    config = settle(default(logs.parent), options)
    planned = slurm_job(log_dir=str(logs))
    return Prepared(config=config, bundle=Path("/b"), source=source, job=planned, notes=())


def a_job_failed(store: Store, logs: Path) -> None:
    """Let a batch job that nobody waits for find a full disk."""
    expect(store, prepared(logs, JobOptions()), "4711")
    event_log(logs, {"n2": [FULL]}, ended=time() - 60)


def listing() -> list[PartitionNode]:
    return LISTED


def excluded(asked: Prepared, store: Store, heard: Heard) -> str | None:
    return avoiding(asked, failed_nodes(store), heard, listing).config.cluster.exclude


def test_a_node_that_failed_is_excluded_beside_those_of_the_user(store: Store, logs: Path) -> None:
    a_job_failed(store, logs)
    heard = Heard()
    options = JobOptions(avoid_bad=True, nodes=(1, 1), exclude="n3")
    assert excluded(prepared(logs, options), store, heard) == "n3,n2"
    assert heard.notes == ["avoiding n2: disk full once in 7 days"]
    assert heard.warnings == []


@pytest.mark.parametrize(
    ("options", "source"),
    [
        (JobOptions(), "salloc"),
        (JobOptions(avoid_bad=False), "sbatch"),
        (JobOptions(avoid_bad=True), "inside"),
    ],
)
def test_nothing_is_excluded_unasked_or_in_an_allocation(
    store: Store, logs: Path, options: JobOptions, source: Source
) -> None:
    a_job_failed(store, logs)
    heard = Heard()
    assert excluded(prepared(logs, options, source), store, heard) is None
    assert heard.notes == heard.warnings == []


def test_another_partition_may_be_named_by_an_option(
    store: Store, logs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_job_failed(store, logs)
    monkeypatch.setenv("SALLOC_OPTS", "-p other")
    nodes = read_nodes("torch* n1 4 idle\nother n2 4 idle\nother n5 4 idle\n")
    asked = prepared(logs, JobOptions(avoid_bad=True))
    found = avoiding(asked, failed_nodes(store), Heard(), lambda: nodes)
    assert found.config.cluster.exclude == "n2"
    assert found.config.cluster.partition is None


@pytest.mark.parametrize("late", [True, False])
def test_nodes_of_the_job_that_failed_before_are_named(
    store: Store, logs: Path, late: bool
) -> None:
    a_job_failed(store, logs)
    heard, seen = Heard(), list[Record]()
    asked = prepared(logs, JobOptions(avoid_bad=late), "inside")
    listen = pointing_out(seen.append, failed_nodes(store), asked, heard)
    begins = [Record(JobBegins(("n1", "n2"))), Record(JobBegins(("n1",)))]
    for record in begins:
        listen(record)
    assert seen == begins
    assert heard.notes == ["n2: disk full once in 7 days"]
    cannot = ["n2 cannot be avoided: this allocation stands already"]
    assert heard.warnings == (cannot if late else [])


def test_a_job_that_was_followed_is_remembered_once(store: Store, logs: Path) -> None:
    a_job_failed(store, logs)
    followed = slurm_job(log_dir=str(logs))
    outcome = Outcome(job=replace(followed, id="4711"), bundle=Path("/b"))
    remember(store, outcome)  # it has no result yet
    assert list(store.pending_jobs.iterdir())
    for record in records(logs / "events.4711.jsonl"):
        outcome.take(record)
    remember(store, outcome)
    assert not list(store.pending_jobs.iterdir())
    (node,) = failed_nodes(store)
    assert node.times == 1


@pytest.mark.parametrize("dry_run", [True, False])
def test_local_jobs_and_dry_runs_tell_nothing_of_nodes(
    store: Store, logs: Path, dry_run: bool
) -> None:
    event_log(logs, {"n2": [FULL]}, ended=time())
    planned = slurm_job(dry_run=True) if dry_run else job()
    outcome = Outcome(job=replace(planned, id="4711", log_dir=str(logs)), bundle=Path("/b"))
    for record in records(logs / "events.4711.jsonl"):
        outcome.take(record)
    remember(store, outcome)
    assert failed_nodes(store) == ()
