"""A node asks the source of a relay for the places that it must know."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from bundle.driver.transports.relay_source import RelayDirectory, candidates_of
from bundle.transfer import relay_peers
from bundle.transfer.relay import listen
from bundle.transfer.relay_chunks import ChunkFile
from bundle.transfer.relay_handshake import (
    NONCE_BYTES,
    PLACES,
    REPLY_BYTES,
    ChunkRequest,
    Handshake,
)
from bundle.transfer.relay_peers import (
    RelayCandidates,
    RelayPlace,
    SourceUnreachable,
    ask_source,
    key_of,
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
        own = candidates_of(position, PLACES_OF_ALL)
        assert asked(source, f"node{position}") == (own, "", [])


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


def test_a_source_that_cannot_be_connected_to_is_reported_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(relay_peers, "_PAUSE_SECONDS", 0.05)
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        refused = "connection refused"
        assert asked(nobody.getsockname(), "node1") == (None, refused, [refused])


def test_nothing_is_asked_once_the_transfer_is_over(source: tuple[str, int]) -> None:
    over = threading.Event()
    over.set()
    with pytest.raises(SourceUnreachable, match="the transfer is over"):
        ask_source(source, TOKEN, "node1", over, print)


def test_an_answer_that_was_changed_on_the_way_is_not_taken(
    source: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody between both, who does not know the token, passes on all but one bit."""
    monkeypatch.setattr(relay_peers, "ASK_SECONDS", 0.0)  # one question
    with socket.create_server(("127.0.0.1", 0)) as between:

        def pass_on() -> None:
            there, _ = between.accept()
            with there, socket.create_connection(source) as here:
                there.sendall(here.recv(NONCE_BYTES, socket.MSG_WAITALL))
                here.sendall(there.recv(1 << 16))
                answer = bytearray()
                while piece := here.recv(1 << 16):
                    answer += piece
                answer[REPLY_BYTES + 20] ^= 1
                there.sendall(answer)

        passing = threading.Thread(target=pass_on)
        passing.start()
        answer, why, _ = asked(between.getsockname(), "node1")
        passing.join()
    assert (answer, why) == (None, "its answer was changed on the way")


def test_a_node_that_serves_no_places_refuses(tmp_path: Path) -> None:
    """Only the source has them."""
    handle = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    listener = listen("127.0.0.1")
    address = listener.getsockname()
    with contextlib.closing(RelayProcess(ChunkFile(handle, 0), TOKEN, listener)) as process:
        process.begin(candidates_of(1, PLACES_OF_ALL))
        with socket.create_connection(address, timeout=300) as connection:
            nonce = connection.recv(NONCE_BYTES, socket.MSG_WAITALL)
            question = ChunkRequest(0, PLACES, key_of("node2"))
            connection.sendall(Handshake(TOKEN, nonce).hello(bytes(NONCE_BYTES), question))
            assert len(connection.recv(REPLY_BYTES, socket.MSG_WAITALL)) == REPLY_BYTES
            assert connection.recv(1) == b""
    os.close(handle)
