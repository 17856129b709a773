from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from stager.incidents.bad_nodes import Avoidance, avoid, remarks
from stager.incidents.node_history import NodeHistory, histories, incidents_of
from stager.slurm.request import PartitionNode, Request, read_nodes
from tests.support.incidents import FULL, ended_job

NODES = read_nodes(
    "torch* n1 4 idle\ntorch* n2 4 allocated\ntorch* n3 4 idle\ntorch* n4 4 down*\n"
    "small n9 1 idle\n"
)
ASKED = Request(
    name="demo",
    nodes=(2, 2),
    partition=None,
    account=None,
    time=None,
    exclude=None,
    cpus_per_task=2,
    gpus_per_node=None,
    args=(),
)


def failed(*names: str) -> tuple[NodeHistory, ...]:
    """Nodes that failed, the first of them most often."""
    (incident,) = incidents_of(ended_job({"n2": [FULL]}))
    nodes = [
        replace(incident, node=name, job_id=str(job))
        for number, name in enumerate(names)
        for job in range(len(names) - number)
    ]
    return histories(nodes)


def avoided(found: Avoidance) -> list[str]:
    return [node.node for node in found.avoided]


def test_a_node_that_failed_is_avoided() -> None:
    found = avoid(failed("n2"), ASKED, NODES)
    assert avoided(found) == ["n2"]
    assert remarks(found, ASKED, 7) == (["avoiding n2: disk full once in 7 days"], [])


def test_the_worst_are_avoided_while_enough_others_are_up() -> None:
    found = avoid(failed("n3", "n1", "n2"), ASKED, NODES)
    assert avoided(found) == ["n3"]
    notes, warnings = remarks(found, ASKED, 7)
    assert notes == ["avoiding n3: disk full 3 times in 7 days"]
    assert warnings == [
        "not avoiding n[1-2], which failed lately: the job needs 2 nodes, and too few others are up"
    ]


def test_avoiding_a_node_that_is_down_costs_nothing() -> None:
    assert avoided(avoid(failed("n4"), replace(ASKED, nodes=(3, 3)), NODES)) == ["n4"]


def test_the_fewest_nodes_are_enough() -> None:
    assert avoided(avoid(failed("n3"), replace(ASKED, nodes=(2, 4)), NODES)) == ["n3"]


def test_nodes_that_the_user_excludes_are_not_there_any_more() -> None:
    found = avoid(failed("n1", "n3"), replace(ASKED, exclude="n[1,4]"), NODES)
    assert avoided(found) == []
    assert [node.node for node in found.kept] == ["n3"]


@pytest.mark.parametrize("name", ["n9", "n1"])
def test_only_nodes_that_the_request_could_get_matter(name: str) -> None:
    """One is in another partition and too small, the other is in the partition that is named."""
    nodes = [*NODES, *read_nodes("other n1 4 idle\nother n5 4 idle\n")]
    found = avoid(failed(name), replace(ASKED, partition="other", nodes=(1, 1)), nodes)
    assert avoided(found) == (["n1"] if name == "n1" else [])


def test_nodes_that_slurm_does_not_have_are_named_and_not_excluded() -> None:
    found = avoid(failed("gone", "n2"), ASKED, NODES)
    assert avoided(found) == ["n2"]
    notes, _ = remarks(found, ASKED, 7)
    assert notes[-1] == "not avoiding gone: Slurm has no such node"


@pytest.mark.parametrize(
    ("listing", "expected", "words"),
    [(None, [], "sinfo is missing here"), ([], [], "sinfo does not list any nodes")],
)
def test_what_cannot_be_checked_is_said(
    listing: Sequence[PartitionNode] | None, expected: list[str], words: str
) -> None:
    found = avoid(failed("n2"), ASKED, listing)
    assert avoided(found) == expected
    assert words in remarks(found, ASKED, 7)[1][0]
    assert avoid((), ASKED, listing) == Avoidance()


@pytest.mark.parametrize("arg", ["-wn2", "--nodelist=n2", "--nodefile=x", "-F"])
def test_a_request_that_names_its_nodes_is_left_as_it_is(arg: str) -> None:
    found = avoid(failed("n2"), replace(ASKED, args=(arg,)), NODES)
    assert avoided(found) == []
    assert "the request names its nodes" in found.remark
