"""Nodes that failed before: left out of a request, named, and remembered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from time import time
from typing import Any

import pytest

from stager.config.job_settings import JobOptions
from stager.config.template import make_default_config
from stager.core.store import Store
from stager.incidents.bad_nodes import (
    choose_avoided,
    exclude_bad_nodes,
    expect_job,
    find_failed_nodes,
    remember_bad_nodes,
)
from stager.incidents.node_history import NodeHistory, list_histories
from stager.jobs.job_description import apply_options
from stager.jobs.outcome import Outcome
from stager.jobs.preparation import Prepared
from stager.logs.job_record import read_records
from stager.slurm.request import PartitionNode, Request, Source, read_nodes
from tests.support.incidents import FULL, event_log, incidents_of
from tests.support.outcomes import job, slurm_job

NODES = read_nodes(
    "torch* n1 4 idle\ntorch* n2 4 allocated\ntorch* n3 4 idle\ntorch* n4 4 down*\n"
    "small n9 1 idle\n"
)
ASKED = Request(name="demo", nodes=(2, 2), cpus_per_task=2)


def failed(*names: str) -> tuple[NodeHistory, ...]:
    """Nodes that failed, the first of them most often."""
    (incident,) = incidents_of({"n2": [FULL]})
    return list_histories(
        replace(incident, node=name, job_id=str(job))
        for number, name in enumerate(names)
        for job in range(len(names) - number)
    )


def avoided(
    nodes: tuple[NodeHistory, ...],
    asked: Request = ASKED,
    listing: Sequence[PartitionNode] | None = NODES,
) -> list[str]:
    names, _, _ = choose_avoided(nodes, asked, listing)
    return names


def test_the_worst_are_avoided_while_enough_others_are_up() -> None:
    once = "avoiding n2: disk full once in 7 days"
    assert choose_avoided(failed("n2"), ASKED, NODES) == (["n2"], [once], [])
    names, notes, warnings = choose_avoided(failed("n3", "n1", "n2"), ASKED, NODES)
    assert (names, notes) == (["n3"], ["avoiding n3: disk full 3 times in 7 days"])
    assert warnings == [
        "not avoiding n[1-2], which failed lately: the job needs 2 nodes, and too few others are up"
    ]
    # A node that is down costs nothing, and the fewest nodes are enough.
    assert avoided(failed("n4"), replace(ASKED, nodes=(3, 3))) == ["n4"]
    assert avoided(failed("n3"), replace(ASKED, nodes=(2, 4))) == ["n3"]
    # What Slurm does not have is named and not excluded.
    names, notes, _ = choose_avoided(failed("gone", "n2"), ASKED, NODES)
    assert (names, notes[-1]) == (["n2"], "not avoiding gone: Slurm has no such node")


@pytest.mark.parametrize("name", ["n9", "n1"])
def test_only_nodes_that_the_request_could_get_matter(name: str) -> None:
    """One is in another partition and too small, the other is in the partition that is named."""
    nodes = [*NODES, *read_nodes("other n1 4 idle\nother n5 4 idle\n")]
    asked = replace(ASKED, partition="other", nodes=(1, 1))
    assert avoided(failed(name), asked, nodes) == (["n1"] if name == "n1" else [])


@pytest.mark.parametrize(
    ("listing", "changed", "words"),
    [
        (None, {}, "sinfo lists no nodes here"),
        ([], {}, "sinfo lists no nodes here"),
        (NODES, {"exclude": "n[1,4]"}, "not avoiding n3, which failed lately"),
        *(
            (NODES, {"salloc_args": (arg,)}, "the request names its nodes")
            for arg in ("-wn2", "--nodelist=n2", "--nodefile=x", "-F")
        ),
    ],
)
def test_what_keeps_nodes_from_being_avoided_is_said(
    listing: Sequence[PartitionNode] | None, changed: dict[str, Any], words: str
) -> None:
    asked = replace(ASKED, **changed)
    names, _, warnings = choose_avoided(failed("n1", "n3"), asked, listing)
    assert names == []
    assert words in warnings[0]


# --- in one job ---

LISTED = read_nodes("torch* n1 4 idle\ntorch* n2 4 idle\ntorch* n3 4 idle\n")


class Heard:
    """What a person would read."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.warnings: list[str] = []
        self.note, self.warn = self.notes.append, self.warnings.append


def prepared(logs: Path, options: JobOptions, source: Source = "salloc") -> Prepared:
    config = apply_options(make_default_config(logs.parent), options)
    planned = slurm_job(log_dir=str(logs))
    return Prepared(config=config, bundle=Path("/b"), source=source, job=planned, notes=())


def a_job_failed(store: Store, logs: Path) -> None:
    """Let a batch job that nobody waits for find a full disk."""
    expect_job(store, prepared(logs, JobOptions()), "4711")
    event_log(logs, {"n2": [FULL]}, ended=time() - 60)


def listing() -> list[PartitionNode]:
    return LISTED


def excluded(asked: Prepared, store: Store, heard: Heard) -> str | None:
    return exclude_bad_nodes(asked, find_failed_nodes(store), heard, listing).config.cluster.exclude


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


def test_a_job_that_was_followed_is_remembered_once(store: Store, logs: Path) -> None:
    a_job_failed(store, logs)
    followed = slurm_job(log_dir=str(logs))
    outcome = Outcome(job=replace(followed, id="4711"), bundle=Path("/b"))
    remember_bad_nodes(store, outcome)  # it has no result yet
    assert list(store.pending_jobs.iterdir())
    for record in read_records(logs / "events.4711.jsonl"):
        outcome.take(record)
    remember_bad_nodes(store, outcome)
    assert not list(store.pending_jobs.iterdir())
    (node,) = find_failed_nodes(store)
    assert node.times == 1


@pytest.mark.parametrize("dry_run", [True, False])
def test_local_jobs_and_dry_runs_tell_nothing_of_nodes(
    store: Store, logs: Path, dry_run: bool
) -> None:
    event_log(logs, {"n2": [FULL]}, ended=time())
    planned = slurm_job(dry_run=True) if dry_run else job()
    outcome = Outcome(job=replace(planned, id="4711", log_dir=str(logs)), bundle=Path("/b"))
    for record in read_records(logs / "events.4711.jsonl"):
        outcome.take(record)
    remember_bad_nodes(store, outcome)
    assert find_failed_nodes(store) == ()
