"""The handshake of a relay's connections: both ends prove that they know the transfer's token.

The token is random, made for one transfer, and travels over the driver's own channel alone. Both
ends contribute a fresh nonce, so a proof that somebody has overheard is worth nothing. Until the
connecting end has proved its right, it gets 16 random bytes and nothing else.

    parent -> child   nonce
    child  -> parent  nonce, request, HMAC-SHA256("child", both nonces, request)
    parent -> child   reply, HMAC-SHA256("parent", both nonces, request, reply)

    request           position of the parent that is meant (4 bytes), tree (1), first chunk (8)
    reply             position of the parent that answers (4), accepted (1), chunks it has (8)

All nodes of a transfer know its token. So both ends also say which position they mean, under the
proofs: where an address leads to another node of the same transfer (it was given to another host,
or translated on the way), that node refuses, and the child sees who answered. Otherwise two nodes
could wait for each other's chunks. All numbers are unsigned, in network byte order.
"""

from __future__ import annotations

import hmac
import struct
from dataclasses import dataclass

NONCE_BYTES = 16
TOKEN_BYTES = 32
_MAC_BYTES = 32
_REQUEST = struct.Struct("!IBQ")
_REPLY = struct.Struct("!IBQ")
HELLO_BYTES = NONCE_BYTES + _REQUEST.size + _MAC_BYTES
REPLY_BYTES = _REPLY.size + _MAC_BYTES


@dataclass(frozen=True)
class ChunkRequest:
    """The chunks that a child asks for."""

    parent: int
    """The position of the node that it asks, as it believes."""
    tree: int
    """Along which tree they travel."""
    first: int
    """The first one's position in that tree; all later ones follow."""


@dataclass(frozen=True)
class ParentReply:
    """A parent's answer."""

    parent: int
    """The position of the node that answers."""
    accepted: bool
    """False if it serves as many as it can, or another node was meant."""
    have: int
    """The number of the tree's chunks that it has."""


def hello(token: bytes, theirs: bytes, ours: bytes, request: ChunkRequest) -> bytes:
    """Return what a child sends.

    Args:
        token: the transfer's token.
        theirs: the parent's nonce.
        ours: the child's nonce.
        request: what it asks for.
    """
    asked = _REQUEST.pack(request.parent, request.tree, request.first)
    return ours + asked + _proof(token, b"child", theirs, ours, asked)


def read_hello(token: bytes, ours: bytes, raw: bytes) -> ChunkRequest | None:
    """Return what a child asks for; None if it does not know the token.

    Args:
        token: the transfer's token.
        ours: the parent's nonce.
        raw: ``HELLO_BYTES`` bytes.
    """
    theirs, asked, proof = _split(raw, NONCE_BYTES, _REQUEST.size)
    if not hmac.compare_digest(proof, _proof(token, b"child", ours, theirs, asked)):
        return None
    return ChunkRequest(*_REQUEST.unpack(asked))


def reply(token: bytes, ours: bytes, raw: bytes, answer: ParentReply) -> bytes:
    """Return what a parent answers to a child's hello.

    Args:
        token: the transfer's token.
        ours: the parent's nonce.
        raw: the hello.
        answer: the answer.
    """
    theirs, asked, _ = _split(raw, NONCE_BYTES, _REQUEST.size)
    answered = _REPLY.pack(answer.parent, answer.accepted, answer.have)
    return answered + _proof(token, b"parent", ours, theirs, asked, answered)


def read_reply(token: bytes, theirs: bytes, sent: bytes, raw: bytes) -> ParentReply | None:
    """Return a parent's answer; None if it does not know the token.

    Args:
        token: the transfer's token.
        theirs: the parent's nonce.
        sent: the hello.
        raw: ``REPLY_BYTES`` bytes.
    """
    ours, asked, _ = _split(sent, NONCE_BYTES, _REQUEST.size)
    answered, proof = raw[: _REPLY.size], raw[_REPLY.size :]
    if not hmac.compare_digest(proof, _proof(token, b"parent", theirs, ours, asked, answered)):
        return None
    parent, accepted, have = _REPLY.unpack(answered)
    return ParentReply(parent, bool(accepted), have)


def _proof(token: bytes, *parts: bytes) -> bytes:
    """Return the proof for parts whose lengths are fixed, so that they need no separator."""
    return hmac.new(token, b"".join(parts), "sha256").digest()


def _split(raw: bytes, first: int, second: int) -> tuple[bytes, bytes, bytes]:
    return raw[:first], raw[first : first + second], raw[first + second :]
