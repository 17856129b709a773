"""Whether the nodes of a relay reach each other, and how many of them the source can send to."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from bundle.driver.transports.relay_source import SPARE_NODES, Reachability
from bundle.transfer.relay import listen
from bundle.transfer.relay_chunks import ChunkFile
from bundle.transfer.relay_process import RelayProcess
from tests.support.relay_places import at_addresses

HERE = "the source"


def why_hopeless(nodes: Sequence[str], apart: Mapping[str, Mapping[str, str]]) -> str:
    """What is found out once these nodes have told whom they cannot reach."""
    reachability = Reachability(len(nodes))
    for node, others in apart.items():
        reachability.add(node, others)
        reachability.add(node, others)  # it may say so once more
    return reachability.why


NODES = tuple(f"node{number:02}" for number in range(1, 41))


def test_where_all_reach_each_other_there_is_hope() -> None:
    assert why_hopeless(NODES, {}) == ""


@pytest.mark.parametrize(("count", "most"), [(50, 31), (100, 50)])
def test_where_most_nodes_reach_no_other_there_is_none(count: int, most: int) -> None:
    nodes = [f"node{number:02}" for number in range(1, count + 1)]
    apart = {name: {"node33": "connection refused"} for name in nodes[:most]}
    assert why_hopeless(nodes, apart) == ""
    apart["node60"] = {"node33": "connection refused"}
    assert why_hopeless(nodes, apart) == (
        "most nodes cannot connect to others, for example node60 to node33: connection refused"
    )


def test_a_few_nodes_that_reach_no_other_are_sent_to_from_here() -> None:
    apart = {name: {"node07": "no answer"} for name in NODES[:SPARE_NODES]}
    assert why_hopeless(NODES[:SPARE_NODES], apart) == ""


def test_where_most_do_not_reach_this_host_there_is_none() -> None:
    apart = {name: {HERE: "no answer within 1.5 s"} for name in NODES[:20]}
    assert why_hopeless(NODES, apart) == ""
    apart[NODES[20]] = {HERE: "no answer within 1.5 s"}
    assert why_hopeless(NODES, apart) == (
        "nodes cannot connect to this host, for example node21: no answer within 1.5 s"
    )


def test_a_node_that_reaches_this_host_after_all_does_not_count() -> None:
    reachability = Reachability(2)
    for name in NODES[:2]:
        reachability.add(name, {HERE: "no answer within 1.5 s"})
        reachability.add(name, {})
    assert reachability.why == ""


def test_the_source_sends_to_as_many_nodes_that_reach_no_other(tmp_path: Path) -> None:
    """At once: those that had to wait for a place would give up."""
    content = os.urandom(300_000)
    (tmp_path / "0").write_bytes(content)
    token = secrets.token_bytes(32)
    with contextlib.ExitStack() as resources:
        closed = resources.enter_context(socket.socket())
        closed.bind(("127.0.0.1", 0))  # nobody listens there
        relays = []
        for place in range(SPARE_NODES + 1):
            handle = os.open(tmp_path / str(place), os.O_RDWR | os.O_CREAT)
            listener = listen("127.0.0.1")
            if not place:
                source = listener.getsockname()[:2]
            file = ChunkFile(handle, len(content), complete=not place)
            relays.append(RelayProcess(file, token, listener))
            resources.callback(relays[-1].close)
            os.close(handle)
        places = (source, *[closed.getsockname()[:2]] * SPARE_NODES)
        for place, relay in enumerate(relays):
            relay.begin(at_addresses(places, place) if place else None)
        assert {relay.outcome().failure for relay in relays[1:]} == {""}
    for place in range(1, SPARE_NODES + 1):
        assert (tmp_path / str(place)).read_bytes() == content
