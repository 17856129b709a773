"""A relay's connections: to its children, to its parents, and the places of both."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import json
import os
import secrets
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable
from typing import NamedTuple

from ..protocol.codec import decode
from ..protocol.dataclass import dataclass
from ..system.files import error_text
from . import relay_chunks
from .relay_chunks import ChunkFile

# --- The handshake: both ends prove that they know the transfer's token -------------------------

# The token is random, made for one transfer, and travels over the driver's own channel alone. Both
# ends contribute a fresh nonce, so a proof that somebody has overheard is worth nothing; until the
# connecting end has proved its right, it gets 16 random bytes and nothing else.
#
#     parent -> child   nonce
#     child  -> parent  nonce, request, HMAC-SHA256("child", both nonces, request)
#     parent -> child   reply, HMAC-SHA256("parent", both nonces, request, reply)
#
#     request           position of the parent that is meant (4 bytes), tree (1), first chunk (8)
#     reply             position of the parent that answers (4), accepted (1), chunks it has (8)
#
# A node also asks the source for the places that it must know: the tree is PLACES, the first chunk
# is the node's key, and "chunks it has" is the length of the places, which are a part of the reply.
#
# Both ends also say which position they mean, under the proofs: where an address leads to another
# node of the same transfer (it was given to another host, or translated), that node refuses. Two
# nodes could wait for each other's chunks else. Numbers are unsigned, in network byte order.

NONCE_BYTES = 16
_MAC_BYTES = 32
_FIELDS = struct.Struct("!IBQ")
PLACES = 255  # what a question for places has in the place of a tree
_ASKED_BYTES = NONCE_BYTES + _FIELDS.size
HELLO_BYTES = _ASKED_BYTES + _MAC_BYTES
REPLY_BYTES = _FIELDS.size + _MAC_BYTES


class ChunkRequest(NamedTuple):
    """The chunks that a child asks for: those of a tree, from a position in it on."""

    parent: int  # the position of the node that it means
    tree: int
    first: int


class ParentReply(NamedTuple):
    """A parent's answer."""

    parent: int  # the position of the node that answers
    accepted: bool  # false if it serves as many as it can, or another node was meant
    have: int  # the number of the tree's chunks that it has


class Handshake(NamedTuple):
    """The handshake of one connection, at either end of it."""

    token: bytes  # the transfer's token
    nonce: bytes  # the parent's nonce, with which the handshake begins

    def make_hello(self, child_nonce: bytes, request: ChunkRequest) -> bytes:
        """Return the child's message."""
        asked = child_nonce + _FIELDS.pack(*request)
        return asked + self._compute_proof(b"child", asked)

    def read_hello(self, hello: bytes) -> ChunkRequest | None:
        """Return what a child asks for with ``HELLO_BYTES`` bytes; None without the token."""
        asked, proof = hello[:_ASKED_BYTES], hello[_ASKED_BYTES:]
        if not hmac.compare_digest(proof, self._compute_proof(b"child", asked)):
            return None
        return ChunkRequest(*_FIELDS.unpack(asked[NONCE_BYTES:]))

    def make_reply(self, hello: bytes, reply: ParentReply, places: bytes = b"") -> bytes:
        """Return what a parent answers to a child's hello."""
        answered = _FIELDS.pack(*reply) + places
        return answered + self._compute_proof(b"parent", hello[:_ASKED_BYTES], answered)

    def read_reply(self, hello: bytes, reply: bytes) -> ParentReply | None:
        """Return the parent's answer in a reply; None without the token."""
        answered, proof = reply[:-_MAC_BYTES], reply[-_MAC_BYTES:]
        expected = self._compute_proof(b"parent", hello[:_ASKED_BYTES], answered)
        if not hmac.compare_digest(proof, expected):
            return None
        parent, accepted, have = _FIELDS.unpack_from(answered)
        return ParentReply(parent, bool(accepted), have)

    def _compute_proof(self, what: bytes, *parts: bytes) -> bytes:
        # All parts but the last have a fixed length, so no separator is needed.
        return hmac.new(self.token, b"".join([what, self.nonce, *parts]), "sha256").digest()


Directory = Callable[[int], "bytes | None"]  # the source's answer to a node's key; None for no node

FRAME = struct.Struct("!BQII")  # of a chunk: kind, position in its tree, length, CRC-32
CHUNK, ALIVE = 1, 2  # kinds of frames; the second has the number of chunks as its position
HANDSHAKE_SECONDS = 5.0
ALIVE_SECONDS = 1.0  # after so long without a chunk a parent says that it is alive
_STUCK_SECONDS = 15.0  # without a byte taken or acknowledged: it would keep its place


class ConnectionOver(Exception):
    """A connection is of no more use, its text says why; every method raises it, or OSError."""


class RelayChild:
    """A connection that somebody has made to this node, a stranger until the token is proved."""

    def __init__(
        self,
        connection: socket.socket,
        position: int,
        token: bytes,
        file: ChunkFile,
        now: float,
        directory: Directory | None = None,
    ) -> None:
        """Send the challenge; only the source has a directory, which answers nodes with places."""
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        limit = int(_STUCK_SECONDS * 1000)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, limit)
        self._socket, self._position, self._file = connection, position, file
        self._directory = directory
        self._handshake = Handshake(token, secrets.token_bytes(NONCE_BYTES))
        self._hello = b""
        self._unsent = memoryview(self._handshake.nonce)
        self._body = (0, 0)  # the offset and length of what is still to be sent of a chunk
        self._until = now + HANDSHAKE_SECONDS
        self._last = now
        self._asked = False
        self._tree = self._next = 0  # whose chunks it gets, and the next one's position
        self.accepted = False  # true once it gets chunks
        self.blocked = False  # true if it has taken less than it was given, and is full

    def fileno(self) -> int:
        """Return the descriptor of the connection."""
        return self._socket.fileno()

    @property
    def has_more(self) -> bool:
        """True if there is something to send."""
        return bool(self._unsent) or self._body[1] > 0 or self._has_chunk

    @property
    def _has_chunk(self) -> bool:
        return self.accepted and self._next < self._file.have[self._tree]

    def receive(self, *, room: bool) -> None:
        """Take what it sends: its hello, and later only its end."""
        raw = self._socket.recv(1 if self._asked else HELLO_BYTES - len(self._hello))
        if not raw:
            raise ConnectionOver("it has ended")
        if self._asked:
            raise ConnectionOver("it sent more than its request")
        self._hello += raw
        if len(self._hello) == HELLO_BYTES:
            self._answer(room=room)

    def _answer(self, *, room: bool) -> None:
        request = self._handshake.read_hello(self._hello)
        places = None
        if request is not None and request.tree == PLACES:
            places = self._directory(request.first) if self._directory is not None else None
            answer = ParentReply(self._position, places is not None, len(places or b""))
        elif request is not None and request.tree < len(self._file.have):
            self.accepted = room and request.parent == self._position
            self._tree, self._next = request.tree, request.first
            answer = ParentReply(self._position, self.accepted, self._file.have[request.tree])
        else:
            raise ConnectionOver("it does not know the token")
        self._asked = True
        raw = self._handshake.make_reply(self._hello, answer, places or b"")
        self._unsent = memoryview(bytes(self._unsent) + raw)

    def send(self, now: float) -> None:
        """Send as much as the connection takes, of one chunk at most."""
        self._last, self.blocked = now, True
        if not self._unsent and not self._body[1] and self._has_chunk:
            self._begin_chunk()
        if self._unsent:
            flags = socket.MSG_MORE if self._body[1] else 0  # one packet, where it has room
            self._unsent = self._unsent[self._socket.send(self._unsent, flags) :]
        if self._unsent:
            return
        if self._body[1]:
            self._send_body()
        elif self._asked and not self.accepted:
            raise ConnectionOver("it has its answer")
        self.blocked = self._body[1] > 0

    def _send_body(self) -> None:
        offset, length = self._body
        sent = os.sendfile(self._socket.fileno(), *self._file.locate(offset, length))
        if not sent:
            raise ConnectionOver("the file has become shorter")
        self._body = offset + sent, length - sent

    def _begin_chunk(self) -> None:
        self._body = self._file.place(self._tree, self._next)
        checksum = self._file.compute_checksum(self._tree, self._next)
        self._unsent = memoryview(FRAME.pack(CHUNK, self._next, self._body[1], checksum))
        self._next += 1

    def tick(self, now: float) -> None:
        """Show that this node is alive, where nothing else has shown it for a while."""
        if not self._asked:
            if now > self._until:
                raise ConnectionOver("it did not prove its right in time")
        elif self.has_more:
            if now > self._last + _STUCK_SECONDS:
                raise ConnectionOver("it takes nothing")
        elif self.accepted and now > self._last + ALIVE_SECONDS:
            have = self._file.have[self._tree]
            self._unsent = memoryview(FRAME.pack(ALIVE, have, 0, 0))

    def close(self) -> None:
        """End the connection."""
        self._socket.close()


CONNECT_SECONDS = 1.5  # a firewall that drops what is sent shows in no other way
SILENT_SECONDS = 5.0  # without a word, though parents say each second that they live


class CorruptChunk(ConnectionOver):
    """A chunk did not come as it was sent."""


class ParentSilent(ConnectionOver):
    """A parent stands, and says nothing: it was stopped, or waits for its disk."""


class ParentBusy(ConnectionOver):
    """A parent serves as many as it can."""


class RelayParent:
    """A connection to a parent, or to a node that may become one."""

    def __init__(
        self, position: int, address: tuple[str, int], token: bytes, tree: int, now: float
    ) -> None:
        """Begin to connect; OSError if it cannot be reached."""
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.position = position  # its place in the trees
        self.have = 0  # the chunks of the tree that it has, as far as it has said
        self.accepted = False  # true once it has proved that it is the node asked, and serves
        self.is_connecting = True  # until the connection stands: then it can be written to
        self.drained = True  # true if all that had come has been taken
        self._tree = tree
        self._until = now + CONNECT_SECONDS
        self._handshake, self._hello = Handshake(token, b""), b""
        self._buffer = bytearray(REPLY_BYTES)
        self._filled, self._wanted = 0, NONCE_BYTES
        code = self._socket.connect_ex(address)
        if code not in (0, errno.EINPROGRESS):
            self._socket.close()
            raise OSError(code, os.strerror(code))

    def fileno(self) -> int:
        """Return the descriptor of the connection."""
        return self._socket.fileno()

    def connect(self, now: float) -> None:
        """Note that the connection stands."""
        code = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise ConnectionOver(os.strerror(code).lower())
        self.is_connecting = False
        self._until = now + HANDSHAKE_SECONDS

    def receive(self, file: ChunkFile, now: float) -> None:
        """Take what has come; whole chunks go into the file, or UnwritableFile says why not."""
        limit = len(self._buffer) if self.accepted else self._wanted
        with memoryview(self._buffer) as view:
            size = self._socket.recv_into(view[self._filled : limit])
        if not size:
            raise ConnectionOver("it closed the connection")
        self._filled += size
        self.drained = self._filled < limit
        if self.accepted:
            self._until = now + SILENT_SECONDS
        while self._filled >= self._wanted:
            self._take(file, now)

    def _take(self, file: ChunkFile, now: float) -> None:
        if not self._handshake.nonce:
            self._send_hello(file)
        elif not self.accepted:
            self._read_reply(file, now)
        elif self._wanted == FRAME.size:
            self._read_head(file)
        else:
            self._read_chunk(file)

    def _drop_buffered(self, size: int) -> None:
        with memoryview(self._buffer) as view:
            view[: self._filled - size] = view[size : self._filled]
        self._filled -= size
        self._wanted = FRAME.size

    def _send_hello(self, file: ChunkFile) -> None:
        self._handshake = self._handshake._replace(nonce=bytes(self._buffer[:NONCE_BYTES]))
        request = ChunkRequest(self.position, self._tree, file.have[self._tree])
        self._hello = self._handshake.make_hello(secrets.token_bytes(NONCE_BYTES), request)
        self._socket.sendall(self._hello)  # the first bytes of a connection always have room
        self._filled, self._wanted = 0, REPLY_BYTES

    def _read_reply(self, file: ChunkFile, now: float) -> None:
        raw = bytes(self._buffer[:REPLY_BYTES])
        answer = self._handshake.read_reply(self._hello, raw)
        if answer is None:
            raise ConnectionOver("it does not know this transfer")
        if answer.parent != self.position:
            raise ConnectionOver("another node of this transfer has its address")
        if not answer.accepted:
            raise ParentBusy("it serves as many as it can")
        self.accepted, self.have = True, answer.have
        self._until = now + SILENT_SECONDS
        self._drop_buffered(REPLY_BYTES)
        # So the head of a chunk comes with its first bytes, and the next one's head with its last.
        self._buffer = bytearray(FRAME.size + file.chunk_bytes + FRAME.size)

    def _read_head(self, file: ChunkFile) -> None:
        kind, position, length, _ = FRAME.unpack_from(self._buffer)
        if kind == ALIVE:
            self.have = position
            self._drop_buffered(FRAME.size)
            return
        if position >= file.totals[self._tree] or length != file.place(self._tree, position)[1]:
            kind = 0
        if kind != CHUNK or position > file.have[self._tree]:
            raise CorruptChunk("it sent what no relay sends")
        self.have = max(self.have, position + 1)
        self._wanted = FRAME.size + length

    def _read_chunk(self, file: ChunkFile) -> None:
        _, position, _, checksum = FRAME.unpack_from(self._buffer)
        with memoryview(self._buffer) as view, view[FRAME.size : self._wanted] as data:
            if zlib.crc32(data) != checksum:
                raise CorruptChunk("its bytes did not come as they were sent")
            if position == file.have[self._tree]:  # else it came from another parent meanwhile
                file.add(self._tree, data, checksum)
        self._drop_buffered(self._wanted)

    def tick(self, now: float) -> None:
        """Look at the time."""
        if now <= self._until:
            return
        if self.is_connecting:
            raise ConnectionOver(f"no answer within {CONNECT_SECONDS:g} s")
        raise ParentSilent("it fell silent" if self.accepted else "no answer")

    def close(self) -> None:
        """End the connection."""
        self._socket.close()


# --- The places that one node of a relay must know, and how it asks the source for them ----------

# About 2 log2 N places of N, those above it in the two trees: all of them on all nodes would grow
# with the square of their number.

ASK_SECONDS = 15.0  # to ask again: strangers that connect may end a question
_UNREACHED_ASKS = 4  # questions of a node to which the source has never answered a word
_PAUSE_SECONDS = 0.3
_SPREAD_SECONDS = 0.0005  # for each node, over which the first questions are spread
_MOST_BYTES = 1 << 20
_UNKNOWN = "it does not know this transfer, or this node"


@dataclass(frozen=True)
class RelayPlace:
    """One end of a relay's connections: a node, or the source, at its position in the trees."""

    position: int
    name: str  # what it is called in messages
    address: str  # where it listens; empty for the address of the driver's host
    port: int


@dataclass(frozen=True)
class RelayCandidates:
    """The facts that one node must know of the others."""

    position: int  # its own position in the trees
    by_tree: tuple[tuple[int, ...], ...]  # the positions to take chunks from, preferred ones first
    places: tuple[RelayPlace, ...]  # all of them, each one once


class SourceUnreachable(Exception):
    """The source cannot be asked; its text says why."""


class _NoAnswer(Exception):
    """The source was reached, and ended the connection without an answer."""


def compute_node_key(node: str) -> int:
    """Return the number by which a node asks for its places: a digest of its name."""
    return int.from_bytes(hashlib.sha256(node.encode()).digest()[:8], "big")


def ask_source(
    source: tuple[str, int],
    token: bytes,
    node: str,
    over: threading.Event,
    on_unreached: Callable[[str], None],
) -> RelayCandidates:
    """Ask the source for the places of a node, several times if need be."""
    reason, unreached = "the transfer is over", 0
    until = time.monotonic() + ASK_SECONDS
    while not over.is_set() and unreached < _UNREACHED_ASKS:
        try:
            return _ask(source, token, node)
        except _NoAnswer as exc:
            reason = str(exc)
        except OSError as exc:
            reason = _describe_connection_error(exc, CONNECT_SECONDS)
            unreached += 1
            if unreached == 1:
                on_unreached(reason)
        if time.monotonic() >= until:  # not before the first question: this node may stand still
            break
        over.wait(_PAUSE_SECONDS * (0.5 + _spread_by_name(node)))
    raise SourceUnreachable(reason)


def compute_first_pause(node: str, nodes: int) -> float:
    """Return the seconds that a node waits before it asks: all at once would crowd the source."""
    return nodes * _SPREAD_SECONDS * _spread_by_name(node)


def _spread_by_name(node: str) -> float:
    return compute_node_key(node) / (1 << 64)


def _ask(source: tuple[str, int], token: bytes, node: str) -> RelayCandidates:
    with contextlib.ExitStack() as opened:
        connection = opened.enter_context(socket.create_connection(source, timeout=CONNECT_SECONDS))
        connection.settimeout(HANDSHAKE_SECONDS)
        reader = opened.enter_context(connection.makefile("rb"))

        def read(size: int) -> bytes:
            received = reader.read(size)
            if len(received) < size:
                raise _NoAnswer("it closed the connection")
            return received

        try:
            handshake = Handshake(token, read(NONCE_BYTES))
            question = ChunkRequest(relay_chunks.SOURCE, PLACES, compute_node_key(node))
            hello = handshake.make_hello(secrets.token_bytes(NONCE_BYTES), question)
            connection.sendall(hello)
            head = read(_FIELDS.size)
            length = ParentReply(*_FIELDS.unpack(head)).have
            if length > _MOST_BYTES:  # a stranger, who may never send as much
                raise _NoAnswer(_UNKNOWN)
            places = read(length)
            answer = handshake.read_reply(hello, head + places + read(_MAC_BYTES))
        except OSError as exc:
            raise _NoAnswer(_describe_connection_error(exc, HANDSHAKE_SECONDS)) from exc
    if answer is None or not answer.accepted:
        raise _NoAnswer(_UNKNOWN)
    return decode(RelayCandidates, json.loads(zlib.decompress(places)))


def _describe_connection_error(exc: OSError, seconds: float) -> str:
    is_late = isinstance(exc, socket.timeout)
    return f"no answer within {seconds:g} s" if is_late else error_text(exc).lower()
