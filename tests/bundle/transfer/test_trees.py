"""The two trees of a relay: every node passes on no more than it takes in."""

from __future__ import annotations

import math
from collections import Counter

import pytest

from bundle.transfer.relay_chunks import SOURCE, TREES, ancestors, parent

COUNTS = (*range(1, 70), 127, 128, 129, 511, 512, 1000, 4095, 4096, 4097)


def children(nodes: int, tree: int) -> Counter[int]:
    """The number of children of each position."""
    return Counter(parent(position, nodes, tree) for position in range(1, nodes + 1))


@pytest.mark.parametrize("nodes", COUNTS)
def test_the_source_feeds_one_node_of_each_tree_and_a_node_two_at_most(nodes: int) -> None:
    for tree in range(TREES):
        served = children(nodes, tree)
        assert served.pop(SOURCE) == 1
        assert all(count <= 2 for count in served.values())
        assert served.keys() <= set(range(1, nodes + 1))


@pytest.mark.parametrize("nodes", COUNTS)
def test_who_serves_others_in_one_tree_is_a_leaf_of_the_other(nodes: int) -> None:
    inner = [children(nodes, tree).keys() - {SOURCE} for tree in range(TREES)]
    assert inner[0].isdisjoint(inner[1])


@pytest.mark.parametrize("nodes", COUNTS)
def test_every_node_is_near_the_source(nodes: int) -> None:
    deepest = math.ceil(math.log2(nodes + 1)) + 1
    for tree in range(TREES):
        for position in range(1, nodes + 1):
            chain = ancestors(position, nodes, tree)
            assert chain[-1] == SOURCE
            assert len(chain) <= deepest
            assert position not in chain
