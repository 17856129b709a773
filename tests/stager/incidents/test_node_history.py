from __future__ import annotations

from dataclasses import replace

from bundle.protocol.problem import Problem
from stager.incidents.node_history import (
    MAX_NAMED,
    Incident,
    histories,
    incidents_of,
    named,
    of_cluster,
)
from tests.support.incidents import ENDED, FULL, LOST, ended_job


def incidents(node: str, problem: Problem, times: int = 1, since: float = 0.0) -> list[Incident]:
    (incident,) = incidents_of(ended_job({"n2": [problem]}))
    return [
        replace(incident, node=node, time=ENDED - since - number, job_id=str(number))
        for number in range(times)
    ]


def test_a_history_in_words() -> None:
    found = histories([*incidents("n7", FULL, 3), *incidents("n7", LOST)])
    assert [node.summary(7) for node in found] == [
        "n7: disk full 3 times, node failure once in 7 days"
    ]
    (one,) = histories(incidents("n7", LOST))
    assert one.summary(1) == "n7: node failure once in 1 day"


def test_the_newest_failure_speaks_for_those_of_its_kind() -> None:
    (node,) = histories(reversed(incidents("n7", FULL, 3)))
    (fault,) = node.faults
    assert (fault.times, fault.last, fault.job_id, fault.code) == (3, ENDED, "0", "no-room")
    assert (node.times, node.last) == (3, ENDED)


def test_a_job_that_was_requeued_counts_once() -> None:
    """Each time that it begins it meets the same node, and may find the same fault."""
    (first,) = incidents("n7", FULL)
    again = replace(first, time=ENDED + 60, cause="still full")
    (node,) = histories([again, first, *incidents("n7", LOST)])
    assert node.times == 2
    assert [(fault.times, fault.last) for fault in node.faults if fault.fault == first.fault] == [
        (1, ENDED + 60)
    ]


def test_the_worst_node_comes_first() -> None:
    found = histories(
        [*incidents("a", FULL, since=50), *incidents("b", FULL), *incidents("c", LOST, 2)]
    )
    assert [node.node for node in found] == ["c", "b", "a"]
    assert histories([]) == ()


def test_nodes_of_two_clusters_are_told_apart() -> None:
    """Both count their jobs from 1, and each has an n7."""
    (incident,) = incidents("n7", FULL)
    both = histories([replace(incident, cluster=name) for name in ("alpha", "beta")])
    assert [(node.node, node.cluster, node.times) for node in both] == [
        ("n7", "alpha", 1), ("n7", "beta", 1),
    ]  # fmt: skip
    assert [node.cluster for node in of_cluster(both, "beta")] == ["beta"]
    assert of_cluster(both, "") == both
    older = histories([incident])  # of a version that did not keep it
    assert of_cluster(older, "beta") == older


def test_few_nodes_are_named() -> None:
    few, many = ["x"] * MAX_NAMED, ["x"] * (MAX_NAMED + 2)
    assert named(few) == few
    assert named(many) == [*few, "and 2 more nodes: stager nodes"]
