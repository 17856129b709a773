"""The connections of a relay: the proofs of both ends, a parent's bytes, and answers of places."""

from __future__ import annotations

import contextlib
import os
import queue
import random
import secrets
import select
import socket
import threading
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import pytest

from bundle.channel.agent_channel import GO, RELAY, AgentChannel
from bundle.driver.transports.agent_program import pack_message
from bundle.driver.transports.relay_source import RelayDirectory, find_candidates
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
from bundle.transfer.relay_peers import (
    ALIVE,
    CHUNK,
    FRAME,
    HELLO_BYTES,
    NONCE_BYTES,
    REPLY_BYTES,
    ChunkRequest,
    ConnectionOver,
    CorruptChunk,
    Handshake,
    ParentReply,
    RelayCandidates,
    RelayParent,
    RelayPlace,
    SourceUnreachable,
    ask_source,
)
from bundle.transfer.relay_process import RelayProcess
from bundle.transfer.relay_receiver import RelayReceiver

TOKEN = secrets.token_bytes(32)
NODES = [RelayPlace(position, f"node{position}", "127.0.0.1", 9) for position in range(1, 8)]


@contextlib.contextmanager
def serving(folder: Path, content: bytes, *nodes: RelayPlace) -> Iterator[int]:
    """Serve a file to some nodes; yield the port."""
    (folder / "sent").write_bytes(content)
    handle = os.open(folder / "sent", os.O_RDONLY)
    listener = listen("127.0.0.1")
    port = listener.getsockname()[1]
    file = ChunkFile(handle, len(content), complete=True)
    directory = RelayDirectory([RelayPlace(0, RELAY_SOURCE, "", port), *nodes])
    with contextlib.closing(RelayProcess(file, TOKEN, listener, directory)) as process:
        process.begin(None)
        yield port
    os.close(handle)


@pytest.fixture
def source(tmp_path: Path) -> Iterator[tuple[str, int]]:
    """Where a source serves."""
    with serving(tmp_path, b"", *NODES) as port:
        yield "127.0.0.1", port


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a source that gets no processor for a while answer all the same."""
    for limit in ("CONNECT_SECONDS", "HANDSHAKE_SECONDS"):
        monkeypatch.setattr(relay_peers, limit, 300.0)


def asked(
    source: tuple[str, int], node: str, token: bytes = TOKEN
) -> tuple[RelayCandidates | None, str, list[str]]:
    """The answer; else why there is none; and what was said of the connection."""
    unreached: list[str] = []
    try:
        answer = ask_source(source, token, node, threading.Event(), unreached.append)
    except SourceUnreachable as exc:
        return None, str(exc), unreached
    return answer, "", unreached


def test_a_node_gets_its_own_places(source: tuple[str, int]) -> None:
    places = [RelayPlace(0, RELAY_SOURCE, "", source[1]), *NODES]
    for position in (1, 4, 7):
        own = find_candidates(position, places)
        assert asked(source, f"node{position}") == (own, "", [])
    over = threading.Event()
    over.set()
    with pytest.raises(SourceUnreachable, match="the transfer is over"):
        ask_source(source, TOKEN, "node1", over, print)


@pytest.mark.parametrize(
    ("node", "token"), [("node9", TOKEN), ("node1", bytes(32))], ids=["no node", "no token"]
)
def test_who_is_no_node_of_the_transfer_learns_nothing(
    source: tuple[str, int], monkeypatch: pytest.MonkeyPatch, node: str, token: bytes
) -> None:
    monkeypatch.setattr(relay_peers, "ASK_SECONDS", 0.0)  # one question
    answer, why, unreached = asked(source, node, token)
    assert (answer, unreached) == (None, [])
    assert why in ("it does not know this transfer, or this node", "it closed the connection")


def test_a_stranger_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another server at the port sends something, and then waits in its turn."""
    monkeypatch.setattr(relay_peers, "ASK_SECONDS", 0.0)  # one question
    monkeypatch.setattr(relay_peers, "HANDSHAKE_SECONDS", 5.0)
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(asked, server.getsockname(), "node1")
        stranger, _ = server.accept()
        with stranger:
            stranger.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/html\r\n\r\n")
            unknown = "it does not know this transfer, or this node"
            assert answer.result() == (None, unknown, [])


HANDSHAKE = Handshake(TOKEN, secrets.token_bytes(16))
REQUEST = ChunkRequest(parent=7, tree=1, first=4711)
REPLY = ParentReply(parent=7, accepted=True, have=12)


def changes(sent: bytes) -> Iterator[bytes]:
    """What was sent, with each byte in turn changed."""
    for place in range(len(sent)):
        yield sent[:place] + bytes([sent[place] ^ 1]) + sent[place + 1 :]


def test_both_ends_prove_that_they_know_the_token() -> None:
    hello = HANDSHAKE.make_hello(secrets.token_bytes(16), REQUEST)
    reply = HANDSHAKE.make_reply(hello, REPLY)
    assert (len(hello), len(reply)) == (HELLO_BYTES, REPLY_BYTES)
    assert HANDSHAKE.read_hello(hello) == REQUEST
    assert HANDSHAKE.read_reply(hello, reply) == REPLY
    # It is worth nothing under another nonce, nor is what was sent when it is sent back.
    fresh = secrets.token_bytes(16)
    assert Handshake(TOKEN, fresh).read_hello(hello) is None
    assert HANDSHAKE.read_reply(HANDSHAKE.make_hello(fresh, REQUEST), reply) is None
    assert HANDSHAKE.read_reply(hello, hello[16 : 16 + REPLY_BYTES]) is None
    # Each changed byte is noticed.
    reply = HANDSHAKE.make_reply(hello, REPLY, b"places")
    assert HANDSHAKE.read_reply(hello, reply) == REPLY
    assert {HANDSHAKE.read_hello(changed) for changed in changes(hello)} == {None}
    assert {HANDSHAKE.read_reply(hello, changed) for changed in changes(reply)} == {None}


SIZE = 5 * (1 << 16) + 77
TREE = 0


def await_bytes(link: RelayParent) -> None:
    """Wait until something has come."""
    assert select.select([link], [], [], 300)[0]


@contextlib.contextmanager
def connected(
    file: ChunkFile, parent: int = 0, accepted: bool = True
) -> Iterator[tuple[RelayParent, socket.socket]]:
    """Make a connection whose handshake is over; yield both ends."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        link = RelayParent(0, server.getsockname(), TOKEN, TREE, time.monotonic())
        far, _ = server.accept()
    far.settimeout(300)
    with far, contextlib.closing(link):
        link.connect(time.monotonic())
        nonce = secrets.token_bytes(NONCE_BYTES)
        far.sendall(nonce)
        await_bytes(link)
        link.receive(file, time.monotonic())
        hello = far.recv(HELLO_BYTES, socket.MSG_WAITALL)
        answer = ParentReply(parent, accepted, have=0)
        far.sendall(Handshake(TOKEN, nonce).make_reply(hello, answer))
        while not link.accepted:
            await_bytes(link)
            link.receive(file, time.monotonic())
        yield link, far


@pytest.fixture
def file(tmp_path: Path) -> Iterator[ChunkFile]:
    """An empty file that is to get chunks."""
    handle = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    yield ChunkFile(handle, SIZE)
    os.close(handle)


@pytest.mark.parametrize(
    ("parent", "accepted", "why"),
    [
        (1, True, "another node of this transfer has its address"),
        (0, False, "it serves as many as it can"),
    ],
)
def test_another_node_at_an_address_is_noticed(
    file: ChunkFile, parent: int, accepted: bool, why: str
) -> None:
    """Two nodes that find each other where the source should be would wait for ever."""
    with pytest.raises(ConnectionOver, match=why), connected(file, parent, accepted):
        pass


def frames(file: ChunkFile, content: bytes, rng: random.Random) -> bytes:
    """Return the stream of a tree's chunks, with words in between that the parent is alive."""
    sent = b""
    for position in range(file.totals[TREE]):
        for _ in range(rng.randrange(3)):
            sent += FRAME.pack(ALIVE, position, 0, 0)
        offset, length = file.place(TREE, position)
        data = content[offset : offset + length]
        sent += FRAME.pack(CHUNK, position, length, zlib.crc32(data)) + data
    return sent


def take(link: RelayParent, file: ChunkFile) -> None:
    """Take what comes until all chunks of the tree are there."""
    while file.have[TREE] < file.totals[TREE]:
        await_bytes(link)
        link.receive(file, time.monotonic())


@pytest.mark.parametrize("seed", range(3))
def test_a_stream_may_come_in_any_pieces(file: ChunkFile, seed: int) -> None:
    rng = random.Random(seed)
    content = rng.randbytes(SIZE)
    stream = frames(file, content, rng)

    def send() -> None:
        start = 0
        while start < len(stream):
            length = rng.choice([1, FRAME.size - 1, FRAME.size, 1000, 1 << 16, 1 << 17])
            far.sendall(stream[start : start + length])
            start += length
            time.sleep(0)

    with connected(file) as (link, far):
        sending = threading.Thread(target=send)
        sending.start()
        take(link, file)
        sending.join()
    for position in range(file.totals[TREE]):
        offset, length = file.place(TREE, position)
        assert os.pread(file.handle, length, offset) == content[offset : offset + length]


@pytest.mark.parametrize(
    "frame",
    [
        FRAME.pack(3, 0, 1 << 16, 0),
        FRAME.pack(CHUNK, 1, 1 << 16, 0),  # not the next one
        FRAME.pack(CHUNK, 1 << 40, 1 << 16, 0),
        FRAME.pack(CHUNK, 0, (1 << 16) + 1, 0),
        FRAME.pack(CHUNK, 0, 1, 0),
        FRAME.pack(CHUNK, 0, 1 << 16, 1) + bytes(1 << 16),  # another checksum
    ],
)
def test_a_frame_that_no_relay_sends_ends_the_connection(file: ChunkFile, frame: bytes) -> None:
    with connected(file) as (link, far):
        far.sendall(frame)
        with pytest.raises(CorruptChunk):
            take(link, file)
    assert file.have[TREE] == 0


NODE = "node01"
CONTENT = os.urandom(300_000)


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


@pytest.fixture
def receiver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RelayReceiver]:
    """The agent's part."""
    monkeypatch.setenv("SLURM_LAUNCH_NODE_IPADDR", "127.0.0.1")
    task = RelayTask(TOKEN.hex(), "127.0.0.1")
    incoming = Incoming(str(tmp_path / "arrived"), None, (), len(CONTENT), task)
    with contextlib.closing(RelayReceiver(incoming, task)) as made:
        yield made


def own_place(receiver: RelayReceiver) -> RelayPlace:
    ready = receiver.ready()
    return RelayPlace(1, NODE, ready.address, ready.port)


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
        places = own_place(receiver), above
        with serving(tmp_path, CONTENT, *places) as port, following(receiver, driver):
            driver.begin(port)
            first, last = driver.heard.get(timeout=300), driver.heard.get(timeout=300)
    assert isinstance(first, OutOfReach)
    assert first.nodes == (("node02", "connection refused"),)
    assert isinstance(last, Relayed)
    assert last.failure == ""
    assert (tmp_path / "arrived").read_bytes() == CONTENT
    assert not receiver.arrival.has_failed


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
