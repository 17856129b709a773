"""A connection to a parent: what comes in pieces, and what no relay sends."""

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
from pathlib import Path

import pytest

from bundle.transfer.relay_chunks import ChunkFile
from bundle.transfer.relay_handshake import HELLO_BYTES, NONCE_BYTES, Handshake, ParentReply
from bundle.transfer.relay_peers import ALIVE, CHUNK, FRAME, CorruptChunk, RelayParent

TOKEN = secrets.token_bytes(32)
SIZE = 5 * (1 << 16) + 77
TREE = 0


def await_bytes(link: RelayParent) -> None:
    """Wait until something has come."""
    assert select.select([link], [], [], 300)[0]


@contextlib.contextmanager
def connected(file: ChunkFile) -> Iterator[tuple[RelayParent, socket.socket]]:
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
        answer = ParentReply(parent=0, accepted=True, have=0)
        far.sendall(Handshake(TOKEN, nonce).reply(hello, answer))
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


@pytest.mark.parametrize("seed", range(8))
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


def test_whether_more_may_be_there_is_known(file: ChunkFile) -> None:
    with connected(file) as (link, far):
        far.sendall(FRAME.pack(ALIVE, 7, 0, 0))
        await_bytes(link)
        link.receive(file, time.monotonic())
        assert link.drained
        assert link.have == 7
