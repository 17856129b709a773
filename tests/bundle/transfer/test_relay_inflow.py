"""Who a node takes the chunks of one tree from, and when it turns to another."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from bundle.transfer import relay
from bundle.transfer.relay import Inflow
from bundle.transfer.relay_chunks import MOST_CHUNK_BYTES, ChunkFile
from bundle.transfer.relay_peers import (
    ConnectionOver,
    CorruptChunk,
    ParentBusy,
    ParentSilent,
    RelayParent,
)

TOTAL = 500
"""The chunks of each tree."""
CHAIN = [5, 7, 9, 0]
"""The positions above the node, the source at the end."""
TICK = 0.1


class Link(RelayParent):
    """A connection that does what a test says, and needs no network."""

    def __init__(self, position: int, have: int) -> None:
        self.position, self.have, self.accepted = position, have, False
        self.is_connecting = False
        self.fault: Exception | None = None
        """What ends it, the next time that it is read."""

    def receive(self, file: ChunkFile, now: float) -> None:
        if self.fault is not None:
            raise self.fault
        self.accepted = True

    def tick(self, now: float) -> None:
        pass


class Node:
    """A node's first tree, whose other tree comes at a steady rate, in a time of its own.

    Attributes:
        dead: the positions that cannot be connected to.
        slow: those that send a fifth of what they should.
        have: the chunks that a position has; all of them where it is not named.
        tried: the positions that the node has tried to connect to, in order.
    """

    def __init__(self, handle: int, chain: Sequence[int] = CHAIN) -> None:
        self.file = ChunkFile(handle, 2 * TOTAL * MOST_CHUNK_BYTES)
        self.now = 0.0
        self.dead: set[int] = set()
        self.slow: set[int] = set()
        self.have: dict[int, int] = {}
        self.tried: list[int] = []
        self.open: list[Link] = []
        self.inflow = Inflow(self.file, 0, list(chain), self, self.now)

    def connect(self, position: int, inflow: Inflow) -> RelayParent:
        self.tried.append(position)
        if position in self.dead:
            raise ConnectionRefusedError(111, "Connection refused")
        self.open.append(Link(position, self.have.get(position, TOTAL)))
        return self.open[-1]

    def disconnect(self, link: RelayParent) -> None:
        self.open.remove(link)  # type: ignore[arg-type]

    @property
    def parent(self) -> int | None:
        return None if self.inflow.parent is None else self.inflow.parent.position

    def run(self, seconds: float, *, mine: float = 0.0, other: float = 0.0) -> None:
        """Let time pass, while chunks come at these rates, the first one from a parent.

        Whoever is connected to answers at once.
        """
        have: list[float] = list(self.file.have)
        for _ in range(round(seconds / TICK)):
            self.now += TICK
            share = 0.0 if self.parent is None else 0.2 if self.parent in self.slow else 1.0
            for tree, rate in enumerate((mine * share, other)):
                have[tree] = min(have[tree] + rate * TICK, self.file.totals[tree])
                self.file.have[tree] = int(have[tree])
            self.inflow.tick(self.now)
            if self.inflow.candidate is not None:
                self.inflow.receive(self.inflow.candidate, self.now)

    def end_parent(self, fault: Exception) -> None:
        """Let the parent's connection end."""
        link = self.inflow.parent
        assert isinstance(link, Link)
        link.fault = fault
        self.inflow.receive(link, self.now)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT))


def test_the_nearest_one_that_can_be_connected_to_is_the_parent(node: Node) -> None:
    node.dead = {5, 7}
    node.run(2, mine=20, other=20)
    assert node.parent == 9
    assert node.tried == [5, 7, 9]
    assert (node.inflow.first, node.inflow.contact) == (5, "connection refused")


@pytest.mark.parametrize(
    "fault",
    [
        ConnectionOver("it fell silent"),
        ConnectionResetError(104, "Connection reset by peer"),
        ParentBusy("it serves as many as it can"),
        CorruptChunk("its bytes did not come as they were sent"),
    ],
)
def test_a_parent_that_fails_is_left_for_the_next_one(node: Node, fault: Exception) -> None:
    node.run(1, mine=20, other=20)
    node.end_parent(fault)
    node.run(1, mine=20, other=20)
    assert node.parent == 7
    assert node.tried == [5, 7]
    assert [link.position for link in node.open] == [7]


@pytest.mark.parametrize("dead", [set(), {5, 7, 9}])
@pytest.mark.parametrize(
    "fault", [ConnectionOver("it closed the connection"), CorruptChunk("damaged")]
)
def test_parents_that_serve_and_send_nothing_are_not_asked_for_ever(
    node: Node, dead: set[int], fault: Exception
) -> None:
    """As where the file has become shorter, or the source damages the same chunk each time."""
    node.dead = dead
    while not node.inflow.has_given_up(node.now) and node.now < 100:
        node.run(TICK, other=20)
        if node.parent is not None:
            node.end_parent(fault)
    assert node.now < 2 * relay.GIVE_UP_SECONDS
    assert 0 in node.inflow.refusals


@pytest.mark.parametrize(
    ("fault", "seconds"),
    [
        pytest.param(ParentSilent("it fell silent"), 45, id="it stands, and its disk may hang"),
        pytest.param(ConnectionOver("it closed the connection"), 0, id="it has ended"),
    ],
)
def test_a_source_that_stands_is_waited_for(node: Node, fault: Exception, seconds: float) -> None:
    node.run(1, mine=20, other=20)
    node.dead = {5, 7, 9}
    node.end_parent(fault)
    began = node.now
    while not node.inflow.has_given_up(node.now) and node.now < 100:
        node.run(TICK, other=20)
        if node.parent is not None:
            node.end_parent(fault)
    assert seconds < node.now - began < seconds + 2 * relay.GIVE_UP_SECONDS


def test_who_sent_damaged_chunks_is_not_used_again_except_the_source(node: Node) -> None:
    damaged = CorruptChunk("its bytes did not come as they were sent")
    node.run(1, mine=20, other=20)
    node.end_parent(damaged)
    node.dead = {7, 9, 0}
    node.run(3, mine=20, other=20)
    node.dead = {7, 9}
    node.run(1, mine=20, other=20)
    assert (node.inflow.corrupt, node.parent) == ([5], 0)
    assert node.tried[:7] == [5, 7, 9, 0, 7, 9, 0]
    node.end_parent(damaged)
    node.run(2, mine=20, other=20)
    assert (node.inflow.corrupt, node.parent) == ([5, 0], 0)


def test_one_that_is_slow_at_the_end_is_left_although_the_other_half_is_there(node: Node) -> None:
    node.run(26, mine=15, other=20)  # the other half is there after 25 s
    assert node.parent == 5
    node.slow = {7}
    node.end_parent(ConnectionOver("it closed the connection"))
    node.run(4, mine=15, other=20)
    assert node.parent == 9


@pytest.mark.parametrize(("have", "taken"), [({}, 7), ({7: 0}, 9)])
def test_a_slow_parent_is_left_for_the_next_one_above_that_is_further(
    node: Node, have: dict[int, int], taken: int
) -> None:
    node.slow, node.have = {5}, have
    node.run(10, mine=20, other=20)
    assert node.parent == taken
    assert node.tried == CHAIN[: CHAIN.index(taken) + 1]
    assert [link.position for link in node.open] == [taken]


def test_where_nobody_above_is_of_use_all_are_tried_again(node: Node) -> None:
    node.slow, node.dead = {5}, {7, 9, 0}
    node.run(18, mine=20, other=20)
    assert node.parent == 5
    assert node.tried.count(7) > 1
    node.dead = set()
    node.run(6, mine=20, other=20)
    assert node.parent in {7, 9, 0}
    assert node.tried.count(5) == 1


def test_a_parent_is_not_slow_for_what_another_has_missed(node: Node) -> None:
    """The first parent sends nothing for ten seconds; the next one serves as fast as it should."""
    node.run(1, mine=20, other=20)
    node.dead = {7, 9, 0}
    node.run(10, other=20)
    node.dead = {9}
    node.end_parent(ConnectionOver("it fell silent"))
    node.run(1, mine=20, other=20)
    assert node.parent == 7
    tried = len(node.tried)
    node.run(12, mine=20, other=20)
    assert node.parent == 7
    assert len(node.tried) == tried


def test_the_search_begins_anew_when_a_parent_is_lost(node: Node) -> None:
    """It sent nothing for long, and lived; that leaves all the time to find another one."""
    node.run(2, mine=20, other=20)
    node.run(relay.GIVE_UP_SECONDS + 5)
    node.dead = set(CHAIN)
    node.end_parent(ConnectionOver("it closed the connection"))
    node.run(2)
    assert not node.inflow.has_given_up(node.now)
    node.run(4)
    assert node.inflow.has_given_up(node.now)
    assert node.inflow.refusals == dict.fromkeys(CHAIN, "connection refused")
