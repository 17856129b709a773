"""The places that one node of a relay must know, and how it asks the source for them.

A node takes the file from those above it in the two trees, and from no others: about 2 log2 N
places of N. So each node asks for its own ones, over a connection to the source that proves the
transfer's token both ways (:mod:`bundle.transfer.relay_handshake`); the lists of all nodes on all
nodes would grow with the square of their number.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import socket
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass

from ..protocol.codec import decode
from ..system.files import error_text
from . import trees
from .relay_child import HANDSHAKE_SECONDS
from .relay_handshake import (
    NONCE_BYTES,
    PLACES,
    REPLY_BYTES,
    SEAL_BYTES,
    ChunkRequest,
    Handshake,
)
from .relay_parent import CONNECT_SECONDS

ASK_SECONDS = 15.0
"""Time in which a node asks again: a source that many strangers connect to may end its question."""
_UNREACHED_ASKS = 4
"""Questions of a node to which the source has never answered a word."""
_PAUSE_SECONDS = 0.3
_SPREAD_SECONDS = 0.0005
"""Time for each node of the transfer over which the first questions are spread."""
_MOST_BYTES = 1 << 20


@dataclass(frozen=True)
class RelayPlace:
    """One end of a relay's connections: a node, or the source."""

    position: int
    """Its position in the trees; 0 for the source."""
    name: str
    """What it is called in messages."""
    address: str
    """Where it listens; empty for the address of the driver's host."""
    port: int
    """The port there."""


@dataclass(frozen=True)
class RelayCandidates:
    """The facts that one node must know of the others."""

    position: int
    """Its own position in the trees."""
    by_tree: tuple[tuple[int, ...], ...]
    """For each tree, the positions that it may take chunks from, in the order of preference."""
    places: tuple[RelayPlace, ...]
    """All of them, each one once."""


class SourceUnreachable(Exception):
    """The source cannot be asked; its text says why."""


class _NoAnswer(Exception):
    """The source was reached, and ended the connection without an answer."""


def key_of(node: str) -> int:
    """Return the number by which a node asks for its places: a digest of its name."""
    return int.from_bytes(hashlib.sha256(node.encode()).digest()[:8], "big")


def ask_source(
    source: tuple[str, int],
    token: bytes,
    node: str,
    over: threading.Event,
    on_unreached: Callable[[str], None],
) -> RelayCandidates:
    """Ask the source for the places of a node, several times if need be.

    Raises:
        SourceUnreachable: it gave no answer, or the answer is of no more use.
    """
    reason, unreached = "the transfer is over", 0
    until = time.monotonic() + ASK_SECONDS
    while not over.is_set() and unreached < _UNREACHED_ASKS:
        try:
            return _ask(source, token, node)
        except _NoAnswer as exc:
            reason = str(exc)
        except OSError as exc:
            reason = _reason(exc, CONNECT_SECONDS)
            unreached += 1
            if unreached == 1:
                on_unreached(reason)
        if time.monotonic() >= until:  # not before the first question: this node may stand still
            break
        over.wait(_PAUSE_SECONDS * (0.5 + _spread(node)))
    raise SourceUnreachable(reason)


def first_pause(node: str, nodes: int) -> float:
    """Return the seconds that a node waits before it asks: all at once would crowd the source."""
    return nodes * _SPREAD_SECONDS * _spread(node)


def _spread(node: str) -> float:
    """Return a number from 0 to 1 that differs between nodes."""
    return key_of(node) / (1 << 64)


def _ask(source: tuple[str, int], token: bytes, node: str) -> RelayCandidates:
    with socket.create_connection(source, timeout=CONNECT_SECONDS) as connection:
        connection.settimeout(HANDSHAKE_SECONDS)
        try:
            handshake = Handshake(token, _exactly(connection, NONCE_BYTES))
            question = ChunkRequest(trees.SOURCE, PLACES, key_of(node))
            hello = handshake.hello(secrets.token_bytes(NONCE_BYTES), question)
            connection.sendall(hello)
            answer = handshake.read_reply(hello, _exactly(connection, REPLY_BYTES))
            if answer is None or not answer.accepted or answer.have > _MOST_BYTES:
                raise _NoAnswer("it does not know this transfer, or this node")
            body = _exactly(connection, answer.have)
            seal = _exactly(connection, SEAL_BYTES)
        except OSError as exc:
            raise _NoAnswer(_reason(exc, HANDSHAKE_SECONDS)) from exc
    if not handshake.is_sealed(hello, body, seal):
        raise _NoAnswer("its answer was changed on the way")
    return decode(RelayCandidates, json.loads(zlib.decompress(body)))


def _exactly(connection: socket.socket, size: int) -> bytes:
    received = b""
    while len(received) < size:
        piece = connection.recv(size - len(received))
        if not piece:
            raise _NoAnswer("it closed the connection")
        received += piece
    return received


def _reason(exc: OSError, seconds: float) -> str:
    if isinstance(exc, socket.timeout):
        return f"no answer within {seconds:g} s"
    return error_text(exc).lower()
