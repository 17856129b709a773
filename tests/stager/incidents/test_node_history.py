"""Failures of nodes: which count, how they are kept, and their history in words."""

from __future__ import annotations

import json
import multiprocessing
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bundle.protocol.enumerations import FailureClass, NodeFault
from bundle.protocol.problem import Problem, ProblemCode
from stager.core.errors import StagerError
from stager.core.store import Store
from stager.incidents import node_history
from stager.incidents.node_history import (
    DAY,
    KEPT_DAYS,
    MAX_BYTES,
    MAX_NAMED,
    Incident,
    forget_nodes,
    keep_incidents,
    list_histories,
    name_first,
    read_incidents,
    select_cluster,
)
from tests.support.incidents import (
    ENDED,
    FULL,
    LOST,
    UNREACHED,
    incidents_of,
    problem,
    rank_failure,
)

# --- which failures are a node's -----------------------------------------------------------------


FULL_TOO = problem(ProblemCode.ENVIRONMENT_DISK_FULL)


def found(*arguments: object, **changed: object) -> list[tuple[str, str]]:
    incidents = incidents_of(*arguments, **changed)  # type: ignore[arg-type]
    return [(incident.node, incident.fault.value) for incident in incidents]


def test_a_full_disk_is_the_nodes() -> None:
    (incident,) = incidents_of({"n2": [FULL]})
    assert (incident.node, incident.fault, incident.code) == ("n2", "disk-full", "no-room")
    assert incident.cause == "the environment does not fit; needs 1.4 GB, 0.2 GB are free"
    assert (incident.job_id, incident.project) == ("4711", "demo")


@pytest.mark.parametrize(
    ("problems", "more", "expected"),
    [
        # A node that was left out counts even where the job went well.
        ({}, {"left_out": {"n3": [FULL]}}, [("n3", "disk-full")]),
        # One job counts once for each kind of failure,
        ({"n2": [FULL, FULL_TOO, LOST]}, {}, [("n2", "disk-full"), ("n2", "node-failure")]),
        # and what nodes share is counted by its kind, over all phases.
        ({"n1": [FULL_TOO]}, {"left_out": {"n2": [FULL]}}, []),
        # The loss of a node counts also where there is no other,
        ({"n2": [LOST]}, {"nodes": ["n2"]}, [("n2", "node-failure")]),
        # but between two nodes nobody knows whose fault it is.
        ({"n2": [UNREACHED]}, {"nodes": ["n1", "n2"]}, []),
        ({"n2": [UNREACHED]}, {}, [("n2", "network")]),
        # A problem of the driver's own is no node's.
        ({"n1": [problem(ProblemCode.NAME_UNRESOLVED)]}, {"of_driver": True}, []),
        ({"elsewhere": [FULL]}, {}, []),
        # What follows from the end of the job does not count, but the node that ended it does.
        ({"n2": [LOST]}, {"interrupted": True}, []),
        *(
            (
                {"n2": [LOST]},
                {"ended_by": ending, "left_out": {"n3": [FULL]}},
                [("n3", "disk-full")],
            )
            for ending in ("time-limit", "cancelled", "preempted")
        ),
        (
            {"n1": [problem(ProblemCode.JOB_NODE_FAILURE)], "n2": [LOST]},
            {"ended_by": "node-failure"},
            [("n2", "node-failure")],
        ),
    ],
)
def test_whose_fault_it_is(
    problems: Mapping[str, Sequence[Problem]],
    more: dict[str, Any],
    expected: list[tuple[str, str]],
) -> None:
    assert found(problems, **more) == expected


@pytest.mark.parametrize(
    ("nodes", "full", "counts"),
    [
        (("n1",), ("n1",), False),  # it may be too large for any node
        (("n1", "n2"), ("n1",), True),
        (("n1", "n2"), ("n1", "n2"), False),
        (("n1", "n2", "n3"), ("n1", "n2"), False),
        (("n1", "n2", "n3", "n4"), ("n1", "n2"), True),
    ],
)
def test_what_more_than_half_of_the_nodes_share_is_the_jobs(
    nodes: tuple[str, ...], full: tuple[str, ...], counts: bool
) -> None:
    problems = dict.fromkeys(full, (FULL,))
    assert found(problems, nodes=nodes) == [(node, "disk-full") for node in full if counts]


@pytest.mark.parametrize("kind", list(FailureClass))
def test_a_rank_tells_of_its_node_only_what_no_program_can_cause(kind: FailureClass) -> None:
    incidents = incidents_of(first=rank_failure(kind))
    assert bool(incidents) is (kind is FailureClass.NODE_FAILURE)
    assert "geheim" not in str(incidents)


def test_the_table_knows_only_problems_that_are_a_nodes() -> None:
    rows = [code.row for code in ProblemCode if code.row.fault is not None]
    for row in rows:
        assert not row.follows
        assert row.failure_class not in (
            *(FailureClass.PYTHON_ERROR, FailureClass.OUT_OF_MEMORY, FailureClass.KILLED),
            *(FailureClass.TIME_LIMIT, FailureClass.PREEMPTION, FailureClass.HANG),
            *(FailureClass.MISSING_MODULE, FailureClass.MISSING_ASSET),
        )
    assert {row.fault for row in rows} == set(NodeFault)


# --- how they are kept ---------------------------------------------------------------------------


def keep(store: Store, problems: Mapping[str, Sequence[Problem]], **job: Any) -> bool:
    return keep_incidents(store, incidents_of(problems, **job), ENDED)


def names(store: Store, days: int = 7) -> list[str]:
    return [incident.node for incident in read_incidents(store, days, ENDED)]


def test_a_job_is_kept_once_however_often_it_is_seen(store: Store) -> None:
    for _ in range(3):
        assert keep(store, {"n2": [FULL, LOST]})
    faults = [incident.fault for incident in read_incidents(store, 7, ENDED)]
    assert faults == ["disk-full", "node-failure"]
    keep(store, {"n2": [FULL]}, ended=ENDED + 60)  # it was put into the queue again
    assert names(store) == ["n2"] * 3


def test_only_the_last_days_count(store: Store) -> None:
    for day in (0, 3, 10, KEPT_DAYS + 1, -2):
        keep(store, {f"n{day % 3 + 1}": [FULL]}, ended=ENDED - day * DAY, job_id=str(abs(day)))
    assert names(store, days=1) == ["n1"]
    assert names(store) == ["n1", "n1"]
    assert names(store, days=30) == ["n2", "n1", "n1"]
    assert len((store.incidents / "history.jsonl").read_text().splitlines()) == 4


def test_of_too_many_the_oldest_go(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_history, "MAX_INCIDENTS", 2)
    for number in range(4):
        keep(store, {"n2": [FULL]}, ended=ENDED - 100 + number, job_id=str(number))
    assert [incident.job_id for incident in read_incidents(store, 7, ENDED)] == ["2", "3"]


def test_a_store_that_cannot_be_written_is_no_failure(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert not keep(Store(tmp_path / "file"), {"n2": [FULL]})


def test_what_is_damaged_or_cannot_be_true_is_skipped(store: Store) -> None:
    keep(store, {"n2": [FULL]})
    path = store.incidents / "history.jsonl"
    good = json.loads(path.read_text())
    lies = [
        {"node": "n1,n[2-9]"},
        {"node": "--nodelist=n1"},
        {"node": "n 1"},
        {"node": "\u001b[31mn1"},
        {"node": ""},
        {"fault": "sorcery"},
        {"time": ENDED + 30 * DAY},
        {"time": None},
        {"job_id": "\u001b[31m"},
        {"cause": 7, "node": 8},
    ]
    lines = [json.dumps({**good, **lie}).encode() for lie in lies]
    lines += [b"", b"{", b"null", b"[]", b"\xff\xfe\0", b"[" * 100_000, b'{"node": "n1"}']
    path.write_bytes(b"\n".join([*lines, json.dumps({**good, "newer": 1}).encode()]) + b"\n")
    assert names(store) == ["n2"]


@pytest.mark.parametrize("what", ["folder", "pipe", "/dev/zero", "nowhere", "large"])
def test_a_file_that_is_none_of_ours_is_not_read(store: Store, what: str) -> None:
    path = store.incidents / "history.jsonl"
    if what == "folder":
        path.mkdir()
    elif what == "pipe":
        os.mkfifo(path)
    elif what == "large":
        path.touch()
        os.truncate(path, MAX_BYTES + 1)
    else:
        path.symlink_to(what)
    assert names(store) == []
    assert keep(store, {"n2": [FULL]}) == (what != "folder")
    assert names(store) == ["n2"] * (what != "folder")


def test_a_node_is_forgotten(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(store, {"n2": [FULL]})
    keep(store, {"n1": [FULL], "n2": [LOST]}, job_id="5")
    assert forget_nodes(store, {"n2", "n9"}, ENDED) == 2
    assert names(store) == ["n1"]
    assert forget_nodes(store, {"n2"}, ENDED) == 0

    def refuse(store: Store, path: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Store, "open_up", refuse)
    with pytest.raises(StagerError, match="cannot write"):
        forget_nodes(store, {"n1"}, ENDED)
    assert names(store) == ["n1"]


@pytest.mark.parametrize("mode", [0o700, 0o2770])
def test_the_root_decides_who_may_read_and_write(store: Store, mode: int) -> None:
    store.root.mkdir()
    store.root.chmod(mode)
    before = os.umask(0o077)
    try:
        keep(store, {"n2": [FULL]})
    finally:
        os.umask(before)
    path = store.incidents / "history.jsonl"
    assert stat.S_IMODE(path.stat().st_mode) == mode & 0o666
    assert stat.S_IMODE(path.parent.stat().st_mode) == mode


def _keep_many(root: Path, first: int) -> None:
    for number in range(first, first + 20):
        assert keep(Store(root), {"n2": [FULL]}, job_id=str(number))
        assert keep(Store(root), {"n3": [FULL]}, job_id="1")


def test_several_jobs_may_end_at_once(store: Store) -> None:
    context = multiprocessing.get_context("fork")
    writers = [
        context.Process(target=_keep_many, args=(store.root, 100 * number)) for number in (1, 2, 3)
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0, 0, 0]
    assert names(store).count("n2") == 60
    assert names(store).count("n3") == 1


# --- the history of each node --------------------------------------------------------------------


def several(node: str, problem: Problem, times: int = 1, since: float = 0.0) -> list[Incident]:
    (incident,) = incidents_of({"n2": [problem]})
    return [
        replace(incident, node=node, time=ENDED - since - number, job_id=str(number))
        for number in range(times)
    ]


def test_a_history_in_words() -> None:
    (node,) = list_histories([*several("n7", FULL, 3), *several("n7", LOST)])
    assert node.summary(7) == "n7: disk full 3 times, node failure once in 7 days"
    (one,) = list_histories(several("n7", LOST))
    assert one.summary(1) == "n7: node failure once in 1 day"


def test_a_job_that_was_requeued_counts_once() -> None:
    """Each time that it begins it meets the same node, and may find the same fault."""
    (first,) = several("n7", FULL)
    again = replace(first, time=ENDED + 60, cause="still full")
    (node,) = list_histories([again, first, *several("n7", LOST)])
    assert node.times == 2
    assert [(fault.times, fault.last) for fault in node.faults if fault.fault == first.fault] == [
        (1, ENDED + 60)
    ]


def test_the_worst_node_comes_first() -> None:
    failed = [*several("a", FULL, since=50), *several("b", FULL), *several("c", LOST, 2)]
    assert [node.node for node in list_histories(failed)] == ["c", "b", "a"]
    few, many = ["x"] * MAX_NAMED, ["x"] * (MAX_NAMED + 2)
    assert name_first(few) == few
    assert name_first(many) == [*few, "and 2 more nodes: stager nodes"]


def test_nodes_of_two_clusters_are_told_apart() -> None:
    """Both count their jobs from 1, and each has an n7."""
    (incident,) = several("n7", FULL)
    both = list_histories([replace(incident, cluster=name) for name in ("alpha", "beta")])
    assert [(node.node, node.cluster, node.times) for node in both] == [
        ("n7", "alpha", 1), ("n7", "beta", 1),
    ]  # fmt: skip
    assert [node.cluster for node in select_cluster(both, "beta")] == ["beta"]
    assert select_cluster(both, "") == both
    older = list_histories([incident])  # of a version that did not keep it
    assert select_cluster(older, "beta") == older
