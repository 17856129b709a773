"""The connections of a relay: the proofs of both ends, a parent's bytes, and answers of places."""

from __future__ import annotations

import contextlib
import os
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

import pytest

from bundle.driver.transports.relay_source import RelayDirectory, find_candidates
from bundle.transfer import relay_peers
from bundle.transfer.relay import listen
from bundle.transfer.relay_chunks import ChunkFile
from bundle.transfer.relay_peers import (
    ALIVE,
    CHUNK,
    FRAME,
    HELLO_BYTES,
    NONCE_BYTES,
    PLACES,
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
    compute_node_key,
)
from bundle.transfer.relay_process import RelayProcess

TOKEN = secrets.token_bytes(32)
PLACES_OF_ALL = [RelayPlace(position, f"node{position}", "127.0.0.1", 9) for position in range(8)]


@pytest.fixture
def source(tmp_path: Path) -> Iterator[tuple[str, int]]:
    """Where a source serves."""
    handle = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    listener = listen("127.0.0.1")
    address = listener.getsockname()
    file = ChunkFile(handle, 0, complete=True)
    with contextlib.closing(
        RelayProcess(file, TOKEN, listener, RelayDirectory(PLACES_OF_ALL))
    ) as process:
        process.begin(None)
        yield address
    os.close(handle)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a source that gets no processor for a while answer all the same."""
    for limit in ("CONNECT_SECONDS", "HANDSHAKE_SECONDS"):
        monkeypatch.setattr(relay_peers, limit, 300.0)
    monkeypatch.setattr(relay_peers, "HANDSHAKE_SECONDS", 300.0)


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
    for position in (1, 4, 7):
        own = find_candidates(position, PLACES_OF_ALL)
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


def test_a_node_that_serves_no_places_refuses(tmp_path: Path) -> None:
    """Only the source has them."""
    handle = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    listener = listen("127.0.0.1")
    address = listener.getsockname()
    with contextlib.closing(RelayProcess(ChunkFile(handle, 0), TOKEN, listener)) as process:
        process.begin(find_candidates(1, PLACES_OF_ALL))
        with socket.create_connection(address, timeout=300) as connection:
            nonce = connection.recv(NONCE_BYTES, socket.MSG_WAITALL)
            question = ChunkRequest(0, PLACES, compute_node_key("node2"))
            connection.sendall(Handshake(TOKEN, nonce).make_hello(bytes(NONCE_BYTES), question))
            assert len(connection.recv(REPLY_BYTES, socket.MSG_WAITALL)) == REPLY_BYTES
            assert connection.recv(1) == b""
    os.close(handle)


THEIRS, OURS = secrets.token_bytes(16), secrets.token_bytes(16)
HANDSHAKE = Handshake(TOKEN, THEIRS)
REQUEST = ChunkRequest(parent=7, tree=1, first=4711)
REPLY = ParentReply(parent=7, accepted=True, have=12)


def test_both_ends_prove_that_they_know_the_token() -> None:
    hello = HANDSHAKE.make_hello(OURS, REQUEST)
    assert len(hello) == HELLO_BYTES
    assert HANDSHAKE.read_hello(hello) == REQUEST
    reply = HANDSHAKE.make_reply(hello, REPLY)
    assert len(reply) == REPLY_BYTES
    assert HANDSHAKE.read_reply(hello, reply) == REPLY
    # It is worth nothing under another nonce, nor is what was sent when it is sent back.
    fresh = secrets.token_bytes(16)
    assert Handshake(TOKEN, fresh).read_hello(hello) is None
    assert HANDSHAKE.read_reply(HANDSHAKE.make_hello(fresh, REQUEST), reply) is None
    assert HANDSHAKE.read_reply(hello, hello[16 : 16 + REPLY_BYTES]) is None


def test_each_changed_byte_is_noticed() -> None:
    hello = HANDSHAKE.make_hello(OURS, REQUEST)
    reply = HANDSHAKE.make_reply(hello, REPLY, b"places")
    assert HANDSHAKE.read_reply(hello, reply) == REPLY
    for place in range(HELLO_BYTES):
        changed = hello[:place] + bytes([hello[place] ^ 1]) + hello[place + 1 :]
        assert HANDSHAKE.read_hello(changed) is None
    for place in range(len(reply)):
        changed = reply[:place] + bytes([reply[place] ^ 1]) + reply[place + 1 :]
        assert HANDSHAKE.read_reply(hello, changed) is None


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
