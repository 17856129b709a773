"""A relay between processes of this machine: nodes that fail, lie, stall, and strangers."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bundle.transfer import relay, relay_peers, relay_process
from bundle.transfer.relay import MOST_CHILDREN, MOST_STRANGERS, RelayOutcome, listen
from bundle.transfer.relay_chunks import TREES, ChunkFile, find_parent
from bundle.transfer.relay_peers import HELLO_BYTES, NONCE_BYTES, RelayChild, RelayParent
from bundle.transfer.relay_process import RelayProcess
from tests.support.processes import until
from tests.support.relay_nodes import MIB, Nodes

Make = Callable[..., Nodes]
LARGE = 20 * MIB
"""Bytes of a file with some hundred chunks."""


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a node that gets no processor for a while count as alive, where a test is not of that."""
    for limit in ("CONNECT_SECONDS", "HANDSHAKE_SECONDS", "SILENT_SECONDS"):
        monkeypatch.setattr(relay_peers, limit, 60.0)
    monkeypatch.setattr(relay_peers, "_STUCK_SECONDS", 60.0)


@pytest.fixture
def signalled(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Let the node at a place get a signal once it has some of the file, and not all of it.

    From itself: from outside the moment would be too early, or too late. To be called before the
    nodes are started.
    """
    add, forked, over = ChunkFile.add, os.getpid(), []

    def signalled_at(place: int, number: int) -> None:
        def add_or_be_signalled(file: ChunkFile, tree: int, data: memoryview, crc: int) -> None:
            add(file, tree, data, crc)
            mine = os.getpid() != forked and place_of(file) == place
            if mine and not over and min(file.have) >= 60:
                over.append(True)
                os.kill(os.getpid(), number)

        monkeypatch.setattr(ChunkFile, "add", add_or_be_signalled)

    return signalled_at


def place_of(file: ChunkFile) -> int:
    """The place of the node whose file it is."""
    return int(os.readlink(f"/proc/self/fd/{file.handle}").rpartition("/")[2])


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Make a source with some nodes."""
    with contextlib.ExitStack() as made:

        def nodes(count: int, size: int = 3 * MIB + 17) -> Nodes:
            source = made.enter_context(contextlib.closing(Nodes(tmp_path, size)))
            for _ in range(count):
                source.add()
            return source

        yield nodes


@pytest.mark.parametrize(
    ("count", "size", "address"),
    [
        (12, 3 * MIB + 17, "127.0.0.1"),
        (3, 1, "127.0.0.1"),
        (2, 65_536, "127.0.0.1"),
        (1, 65_537, "::1"),
    ],
)
def test_every_node_gets_the_file(make: Make, count: int, size: int, address: str) -> None:
    nodes = make(0, size)
    for _ in range(count):
        nodes.add(address=address)
    nodes.begin()
    for place in range(1, count + 1):
        assert nodes.assert_whole(place).corrupt == ()


def test_a_node_that_dies_costs_the_others_nothing_but_a_connection(
    make: Make, signalled: Callable[[int, int], None]
) -> None:
    dying = find_parent(1, 7, 0)
    signalled(dying, signal.SIGKILL)
    nodes = make(7, LARGE)
    nodes.begin()
    for place in set(range(1, 8)) - {dying}:
        nodes.assert_whole(place)
    assert nodes.relays[dying].outcome().failure == "its relay was ended by SIGKILL"


def test_a_node_that_stands_still_is_left(
    make: Make, monkeypatch: pytest.MonkeyPatch, signalled: Callable[[int, int], None]
) -> None:
    for limit in ("SILENT_SECONDS", "HANDSHAKE_SECONDS"):
        monkeypatch.setattr(relay_peers, limit, 1.5)
    monkeypatch.setattr(relay, "GIVE_UP_SECONDS", 600.0)
    still = find_parent(1, 7, 0)
    signalled(still, signal.SIGSTOP)
    nodes = make(7, LARGE)
    nodes.begin()
    for place in set(range(1, 8)) - {still}:  # those below it among them
        nodes.assert_whole(place)
    nodes.kill(still, signal.SIGCONT)
    nodes.assert_whole(still)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nodes give up soon."""
    monkeypatch.setattr(relay, "GIVE_UP_SECONDS", 1.0)
    monkeypatch.setattr(relay, "_SEARCH_SECONDS", 0.5)


@pytest.mark.usefixtures("soon")
def test_a_file_that_becomes_shorter_ends_the_relay(make: Make) -> None:
    nodes = make(3, LARGE)
    os.truncate(nodes.folder / "0", 5 * MIB)
    nodes.begin()
    outcomes = [nodes.relays[place].outcome() for place in (1, 2, 3)]
    assert {outcome.failure for outcome in outcomes} == {"no other node can be reached"}


def test_damaged_bytes_are_taken_from_another_node_and_their_sender_is_named(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    liar = find_parent(1, 7, 0)
    real, forked = ChunkFile.compute_checksum, os.getpid()

    def lying(file: ChunkFile, tree: int, position: int) -> int:
        wrong = os.getpid() != forked and place_of(file) == liar and position == 5
        return real(file, tree, position) ^ wrong

    monkeypatch.setattr(ChunkFile, "compute_checksum", lying)
    monkeypatch.setattr(relay, "_SLOW_SHARE", 0.0)  # nobody leaves it for being slow before
    nodes = make(7, LARGE)
    nodes.begin()
    outcomes = {place: nodes.assert_whole(place) for place in range(1, 8)}
    fed = [place for place in range(1, 8) for tree in (0, 1) if find_parent(place, 7, tree) == liar]
    assert {place for place, outcome in outcomes.items() if outcome.corrupt} == set(fed)
    assert {place for outcome in outcomes.values() for place in outcome.corrupt} == {liar}


def test_a_parent_is_not_silent_while_this_node_stands_still(
    make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its disk holds it for longer than a parent may be silent; so nobody is left for that.

    The node's clock is put forward for that: a real pause could be one of its parent's as well.
    """
    ahead = [0.0]
    shifted = {**vars(time), "monotonic": lambda: time.monotonic() + ahead[0]}
    monkeypatch.setattr(relay, "time", types.SimpleNamespace(**shifted))
    add = ChunkFile.add

    def add_late(file: ChunkFile, tree: int, data: memoryview, checksum: int) -> None:
        if file.have[tree] == 5 and tree == 0:
            ahead[0] += 3600.0
        add(file, tree, data, checksum)

    monkeypatch.setattr(ChunkFile, "add", add_late)
    begin, notes = RelayParent.__init__, tmp_path / "connections"

    def begin_and_note(link: RelayParent, *arguments: Any) -> None:
        with notes.open("a") as file:
            file.write("x")
        begin(link, *arguments)

    monkeypatch.setattr(RelayParent, "__init__", begin_and_note)
    nodes = make(1, LARGE)
    nodes.begin()
    nodes.assert_whole(1)
    assert notes.read_text() == "x" * TREES


def test_a_full_disk_fails_one_node_and_no_other(make: Make) -> None:
    nodes = make(3)
    nodes.relays[2].end()
    handle = os.open("/dev/full", os.O_RDWR)  # pwrite: no space left on device
    listener = listen("127.0.0.1")
    nodes.places[2] = listener.getsockname()[:2]
    nodes.relays[2] = RelayProcess(ChunkFile(handle, nodes.size), nodes.token, listener)
    os.close(handle)
    nodes.begin()
    assert nodes.relays[2].outcome().failure == "No space left on device"
    for place in (1, 3):
        nodes.assert_whole(place)


def test_a_relay_that_stands_still_is_given_up_and_can_be_ended(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_process, "STILL_SECONDS", 2)
    nodes = make(1)
    nodes.kill(1, signal.SIGSTOP)
    nodes.begin()
    assert nodes.relays[1].outcome() == RelayOutcome(failure="its relay stood still for 2 s")


@pytest.mark.usefixtures("soon")
def test_without_the_source_everybody_gives_up_although_all_others_live(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that waits for one that waits in vain learns of it."""
    begin_chunk = RelayChild._begin_chunk

    def begin_or_die(child: RelayChild) -> None:
        if place_of(child._file) == 0 and child._next == 60:
            os.kill(os.getpid(), signal.SIGKILL)
        begin_chunk(child)

    monkeypatch.setattr(RelayChild, "_begin_chunk", begin_or_die)
    nodes = make(7, LARGE)
    nodes.begin()
    outcomes = [nodes.relays[place].outcome() for place in range(1, 8)]
    assert {outcome.failure for outcome in outcomes} == {"no other node can be reached"}
    assert min(nodes.has(place) for place in range(1, 8)) > 0


def test_whoever_waits_for_the_outcome_hears_of_the_end(make: Make) -> None:
    """One thread waits, and two end the relay: one on the driver's word, one for a signal."""
    nodes = make(1)
    nodes.kill(0, signal.SIGSTOP)
    nodes.begin()
    relay, heard = nodes.relays[1], []
    waiting = threading.Thread(target=lambda: heard.append(relay.outcome()))
    ending = [threading.Thread(target=relay.end) for _ in range(2)]
    for thread in (waiting, *ending):
        thread.start()
    for thread in (waiting, *ending):
        thread.join(timeout=300)
    nodes.kill(0, signal.SIGCONT)
    assert heard == [RelayOutcome(failure="its relay ended")]


def strangers(place: tuple[str, int], count: int) -> list[socket.socket]:
    return [socket.create_connection(place) for _ in range(count)]


def challenged(place: tuple[str, int]) -> tuple[socket.socket, bytes]:
    """A stranger's connection and its nonce; among many, any one may be ended at once."""
    for _ in range(20):
        [connection] = strangers(place, 1)
        connection.settimeout(300)
        with contextlib.suppress(ConnectionError):
            nonce = connection.recv(NONCE_BYTES, socket.MSG_WAITALL)
            if nonce:
                return connection, nonce
        connection.close()
    raise AssertionError("nobody was challenged")


def test_strangers_learn_nothing_and_keep_nobody_out(make: Make) -> None:
    nodes = make(3)
    source = Path(f"/proc/{nodes.relays[0].pid}/fd")
    before = len(os.listdir(source))
    silent = strangers(nodes.places[0], 2 * MOST_STRANGERS)
    loud, nonce = challenged(nodes.places[0])
    loud.sendall(os.urandom(HELLO_BYTES))
    assert loud.recv(1) == b""
    assert len(nonce) == NONCE_BYTES
    nodes.begin()
    for place in (1, 2, 3):
        nodes.assert_whole(place)
    assert len(os.listdir(source)) <= before + MOST_STRANGERS + MOST_CHILDREN + 16
    for connection in (*silent, loud):
        connection.close()


def test_a_stranger_that_sends_a_byte_now_and_then_is_sent_away(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_peers, "HANDSHAKE_SECONDS", 1.0)
    nodes = make(1)
    [slow] = strangers(nodes.places[0], 1)
    slow.settimeout(300)
    slow.recv(NONCE_BYTES, socket.MSG_WAITALL)
    sent = 0
    source = nodes.relays[0]
    with contextlib.suppress(ConnectionError):
        for _ in range(HELLO_BYTES - 1):
            slow.sendall(b"x")
            sent += 1
            seen = source._rounds[0]  # the time that it counts passes in its rounds
            time.sleep(0.1)
            assert until(lambda seen=seen: source._rounds[0] > seen + 1, 300, pause=0.01)  # type: ignore[misc]
    assert sent < HELLO_BYTES - 1
    slow.close()


def test_a_stranger_can_feed_nothing(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody who listens in a parent's place, and does not know the token."""
    monkeypatch.setattr(relay, "_UNREACHED_SECONDS", 0.5)
    nodes = make(1)
    with socket.create_server(("127.0.0.1", 0)) as false_source:
        true_place, nodes.places[0] = nodes.places[0], false_source.getsockname()[:2]
        nodes.begin()
        for _ in range(2):  # one connection for each tree
            connection, _ = false_source.accept()
            connection.sendall(os.urandom(NONCE_BYTES) + os.urandom(200))
            connection.close()
        false_source.close()  # who tries again is refused
        [(place, _)] = nodes.relays[1].outcome().unreached
        assert place == 0
    assert true_place != nodes.places[0]
    assert nodes.has(1) == 0
