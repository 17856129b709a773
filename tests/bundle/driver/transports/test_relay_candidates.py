"""Which places each node of a relay must know, and how many bytes they are."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence

import pytest

from bundle.driver.transports.agent_program import packed
from bundle.driver.transports.relay_source import (
    RelayDirectory,
    candidates_of,
    in_order_of_preference,
)
from bundle.protocol.codec import decode
from bundle.protocol.messages import RelayStart
from bundle.transfer.relay_chunks import SOURCE, TREES, ancestors
from bundle.transfer.relay_peers import RelayCandidates, RelayPlace, key_of


def places_of(nodes: int) -> list[RelayPlace]:
    """So many nodes whose addresses and ports follow no rule, and their source."""
    places = [RelayPlace(SOURCE, "the source", "", 40_000)]
    for position in range(1, nodes + 1):
        scattered = position * 2_654_435_761
        address = f"10.{scattered >> 8 & 255}.{scattered >> 16 & 255}.{scattered & 255}"
        name = f"gpu-{position:05}.cluster.example"
        places.append(RelayPlace(position, name, address, 32_768 + scattered % 28_000))
    return places


def answer_to(places: Sequence[RelayPlace], position: int) -> bytes:
    """What the source sends to a node."""
    answer = RelayDirectory(places)(key_of(places[position].name))
    assert answer is not None
    return answer


@pytest.mark.parametrize("nodes", [1, 2, 7, 100])
def test_a_node_knows_those_above_it_and_the_source_alone(nodes: int) -> None:
    places = places_of(nodes)
    for position in range(1, nodes + 1):
        told = decode(RelayCandidates, json.loads(zlib.decompress(answer_to(places, position))))
        assert told == candidates_of(position, places)
        for tree in range(TREES):
            assert sorted(told.by_tree[tree]) == sorted(ancestors(position, nodes, tree))
        wanted = {candidate for chain in told.by_tree for candidate in chain}
        assert [place.position for place in told.places] == sorted(wanted)
        assert all(places[place.position] == place for place in told.places)


def test_the_source_is_tried_before_those_far_above() -> None:
    """A firewall that drops what is sent costs time for each one that is tried."""
    *above, source = ancestors(1, 1000, 0)
    assert len(above) > 4
    assert in_order_of_preference(1, 1000, 0) == (*above[:3], source, *above[3:])


def test_who_takes_no_part_gets_no_answer() -> None:
    assert RelayDirectory(places_of(3))(key_of("node99")) is None


def test_the_bytes_of_a_node_hardly_grow_with_the_number_of_nodes() -> None:
    """Twice as many nodes are one more place in each tree; before, they were twice as many."""
    sizes = {}
    for nodes in (64, 512, 4096):
        places = places_of(nodes)
        directory = RelayDirectory(places)
        answers = [directory(key_of(place.name)) or b"" for place in places[1 :: nodes // 64]]
        start = packed(RelayStart(port=40_000, nodes=nodes))
        sizes[nodes] = max(map(len, answers)) + len(start)
    assert sizes[4096] < 1500
    assert sizes[4096] - sizes[512] < 2 * (sizes[512] - sizes[64])
    total = 4096 * sizes[4096]
    assert total < 6_000_000  # all names, addresses and ports to each one: 160,000,000
