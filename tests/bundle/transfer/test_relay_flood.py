"""Strangers connect to all relays and their source, hundreds at a time, while a file travels."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import pytest

from bundle.driver.transports.relay_source import RelayDirectory, find_candidates
from bundle.transfer import relay, relay_peers
from bundle.transfer.relay import MOST_CHILDREN, MOST_STRANGERS
from bundle.transfer.relay_peers import RelayPlace, ask_source
from tests.support.processes import until
from tests.support.relay_nodes import MIB, Nodes

HELD = 150
"""Connections of strangers to each process at a time."""
ASKED_FOR = [RelayPlace(position, f"node{position}", "10.0.0.1", 9) for position in range(4)]
OWN_DESCRIPTORS = 40
"""More than a process opens besides the connections that others have made to it."""


def descriptors(process: int) -> int:
    """Return how many descriptors a process has open."""
    return len(os.listdir(f"/proc/{process}/fd"))


class Flood:
    """Strangers that connect to some places, say nothing, and are followed by others.

    Attributes:
        made: the connections so far.
        most: the largest number of descriptors that one of the processes had open.
    """

    def __init__(self, places: list[tuple[str, int]], processes: list[int]) -> None:
        self._places, self._processes = places, processes
        self._over = threading.Event()
        self._threads = [threading.Thread(target=work) for work in (self._connect, self._look)]
        self.made = self.most = 0

    def __enter__(self) -> Flood:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *details: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _connect(self) -> None:
        held: deque[socket.socket] = deque()
        while not self._over.is_set():
            for place in self._places:
                stranger = socket.socket()
                stranger.setblocking(False)
                stranger.connect_ex(place)
                held.append(stranger)
                self.made += 1
            while len(held) > HELD * len(self._places):
                held.popleft().close()
            time.sleep(0.001)  # as fast as other machines may connect, but for their CPU time
        for stranger in held:
            stranger.close()

    def _look(self) -> None:
        while not self._over.wait(0.05):
            for process in self._processes:
                self.most = max(self.most, descriptors(process))


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    """A source that nodes ask for their places, and three nodes."""
    with contextlib.closing(Nodes(tmp_path, 10 * MIB, RelayDirectory(ASKED_FOR))) as made:
        for _ in range(3):
            made.add()
        yield made


def test_a_flood_of_strangers_for_a_whole_transfer(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, limit in (  # on a busy machine it takes longer
        (relay, "GIVE_UP_SECONDS"),
        (relay, "_UNREACHED_SECONDS"),
        (relay_peers, "ASK_SECONDS"),
    ):
        monkeypatch.setattr(module, limit, 600.0)
    processes = [relay._child for relay in nodes.relays]
    inherited = max(map(descriptors, processes))  # of this process, and of tests before this one
    with Flood(nodes.places, processes) as flood:
        until(lambda: flood.made > 2 * HELD * len(nodes.places))
        before = flood.made
        answer = ask_source(nodes.places[0], nodes.token, "node2", threading.Event(), print)
        assert answer == find_candidates(2, ASKED_FOR)
        nodes.begin()
        for place in (1, 2, 3):
            nodes.assert_whole(place)
        assert until(lambda: flood.made > before)
    assert flood.most < inherited + MOST_STRANGERS + MOST_CHILDREN + OWN_DESCRIPTORS
