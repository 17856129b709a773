"""A node's part in a relay, as its agent plays it: real relays, and a driver that is this test."""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from bundle.channel.agent_channel import GO, RELAY, AgentChannel
from bundle.driver.transports.agent_program import pack_message
from bundle.driver.transports.relay_source import RelayDirectory
from bundle.protocol.messages import (
    RELAY_SOURCE,
    AgentEvent,
    Incoming,
    OutOfReach,
    Relayed,
    RelayStart,
    RelayTask,
)
from bundle.transfer import relay_peers
from bundle.transfer.relay import listen
from bundle.transfer.relay_chunks import ChunkFile
from bundle.transfer.relay_peers import RelayPlace
from bundle.transfer.relay_process import RelayProcess
from bundle.transfer.relay_receiver import RelayReceiver

NODE = "node01"
CONTENT = os.urandom(300_000)
TOKEN = secrets.token_bytes(32)


class Driver:
    """What the driver says to one agent, and what it hears from it."""

    def __init__(self) -> None:
        self.node = NODE
        self.said: queue.Queue[str] = queue.Queue()
        self.heard: queue.Queue[AgentEvent] = queue.Queue()
        self.command = self.said.get
        self.emit = self.heard.put

    def begin(self, port: int, left_out: tuple[str, ...] = ()) -> None:
        """Tell the agent where the source is."""
        self.said.put(RELAY + pack_message(RelayStart(port, 1, left_out)))


@pytest.fixture(autouse=True)
def driver_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_LAUNCH_NODE_IPADDR", "127.0.0.1")


@pytest.fixture
def receiver(tmp_path: Path) -> Iterator[RelayReceiver]:
    """The agent's part."""
    task = RelayTask(TOKEN.hex(), "127.0.0.1")
    incoming = Incoming(str(tmp_path / "arrived"), None, (), len(CONTENT), task)
    with contextlib.closing(RelayReceiver(incoming, task)) as made:
        yield made


@contextlib.contextmanager
def source(folder: Path, receiver: RelayReceiver, *others: RelayPlace) -> Iterator[int]:
    """Serve the file to that node, the first of all; the port."""
    (folder / "sent").write_bytes(CONTENT)
    handle = os.open(folder / "sent", os.O_RDONLY)
    listener = listen("127.0.0.1")
    port = listener.getsockname()[1]
    ready = receiver.ready()
    places = [
        RelayPlace(0, RELAY_SOURCE, "", port),
        RelayPlace(1, NODE, ready.address, ready.port),
        *others,
    ]
    file = ChunkFile(handle, len(CONTENT), complete=True)
    with contextlib.closing(RelayProcess(file, TOKEN, listener, RelayDirectory(places))) as serving:
        serving.begin(None)
        yield port
    os.close(handle)


@contextlib.contextmanager
def following(receiver: RelayReceiver, driver: Driver) -> Iterator[None]:
    """Follow the driver while the block runs; then it says the end."""
    channel = cast("AgentChannel", driver)
    thread = threading.Thread(target=receiver.follow, args=(channel,))
    thread.start()
    try:
        yield
    finally:
        driver.said.put(GO)
        thread.join()


def test_a_node_asks_for_its_places_and_gets_the_file(
    tmp_path: Path, receiver: RelayReceiver
) -> None:
    driver = Driver()
    with source(tmp_path, receiver) as port, following(receiver, driver):
        driver.begin(port)
        event = driver.heard.get(timeout=300)
    assert isinstance(event, Relayed)
    assert event.failure == ""
    assert (tmp_path / "arrived").read_bytes() == CONTENT
    assert not receiver.arrival.has_failed


def test_a_node_that_cannot_reach_the_source_says_so_twice(
    receiver: RelayReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, as another way may be better for all; and in the end, for itself."""
    monkeypatch.setattr(relay_peers, "_PAUSE_SECONDS", 0.05)
    driver = Driver()
    with socket.socket() as closed, following(receiver, driver):
        closed.bind(("127.0.0.1", 0))  # and does not listen
        driver.begin(closed.getsockname()[1])
        first, last = driver.heard.get(timeout=300), driver.heard.get(timeout=300)
    assert isinstance(first, OutOfReach)
    assert first.nodes == ((RELAY_SOURCE, "connection refused"),)
    assert isinstance(last, Relayed)
    assert last.failure == "no other node can be reached: the source: connection refused"
    assert receiver.arrival.has_failed


def test_a_node_above_that_cannot_be_reached_is_named_and_done_without(
    tmp_path: Path, receiver: RelayReceiver
) -> None:
    driver = Driver()
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # and does not listen
        above = RelayPlace(2, "node02", *closed.getsockname())
        with source(tmp_path, receiver, above) as port, following(receiver, driver):
            driver.begin(port)
            first, last = driver.heard.get(timeout=300), driver.heard.get(timeout=300)
    assert isinstance(first, OutOfReach)
    assert first.nodes == (("node02", "connection refused"),)
    assert isinstance(last, Relayed)
    assert last.failure == ""


def test_a_node_that_is_left_out_takes_nothing(receiver: RelayReceiver) -> None:
    driver = Driver()
    with following(receiver, driver):
        driver.begin(9, left_out=(NODE,))
    assert driver.heard.empty()
    assert receiver.arrival.has_failed


def test_where_no_thread_can_begin_the_driver_hears_of_it(
    receiver: RelayReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit on processes of a user counts threads, too."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    driver = Driver()
    driver.begin(9)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    receiver.follow(cast("AgentChannel", driver))
    event = driver.heard.get_nowait()
    assert isinstance(event, Relayed)
    assert event.failure == "can't start new thread"
    assert receiver.arrival.has_failed
