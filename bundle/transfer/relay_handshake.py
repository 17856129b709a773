"""The handshake of a relay's connections: both ends prove that they know the transfer's token.

The token is random, made for one transfer, and travels over the driver's own channel alone. Both
ends contribute a fresh nonce, so a proof that somebody has overheard is worth nothing. Until the
connecting end has proved its right, it gets 16 random bytes and nothing else.

    parent -> child   nonce
    child  -> parent  nonce, request, HMAC-SHA256("child", both nonces, request)
    parent -> child   reply, HMAC-SHA256("parent", both nonces, request, reply)

    request           position of the parent that is meant (4 bytes), tree (1), first chunk (8)
    reply             position of the parent that answers (4), accepted (1), chunks it has (8)

A node also asks the source for the places that it must know, in the same way: the tree is
:data:`PLACES`, the first chunk is the node's key, and "chunks it has" is the length of the answer,
which follows with an HMAC-SHA256("places", both nonces, request, answer).

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
PLACES = 255
"""What a question for places has in the place of a tree."""
SEAL_BYTES = _MAC_BYTES
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


@dataclass(frozen=True)
class Handshake:
    """The handshake of one connection, at either end of it."""

    token: bytes
    """The transfer's token."""
    nonce: bytes
    """The parent's nonce, with which the handshake begins."""

    def make_hello(self, child_nonce: bytes, request: ChunkRequest) -> bytes:
        """Return the child's message."""
        asked = _REQUEST.pack(request.parent, request.tree, request.first)
        return child_nonce + asked + self._compute_proof(b"child", child_nonce, asked)

    def read_hello(self, hello: bytes) -> ChunkRequest | None:
        """Return what a child asks for with ``HELLO_BYTES`` bytes; None without the token."""
        child_nonce, asked, proof = _split(hello)
        if not hmac.compare_digest(proof, self._compute_proof(b"child", child_nonce, asked)):
            return None
        return ChunkRequest(*_REQUEST.unpack(asked))

    def make_reply(self, hello: bytes, answer: ParentReply) -> bytes:
        """Return what a parent answers to a child's hello."""
        child_nonce, asked, _ = _split(hello)
        answered = _REPLY.pack(answer.parent, answer.accepted, answer.have)
        return answered + self._compute_proof(b"parent", child_nonce, asked, answered)

    def read_reply(self, hello: bytes, reply: bytes) -> ParentReply | None:
        """Return a parent's answer in ``REPLY_BYTES`` bytes; None without the token."""
        child_nonce, asked, _ = _split(hello)
        answered, proof = reply[: _REPLY.size], reply[_REPLY.size :]
        if not hmac.compare_digest(
            proof, self._compute_proof(b"parent", child_nonce, asked, answered)
        ):
            return None
        parent, accepted, have = _REPLY.unpack(answered)
        return ParentReply(parent, bool(accepted), have)

    def make_seal(self, hello: bytes, places: bytes) -> bytes:
        """Return the proof that follows the source's answer to a question for places."""
        child_nonce, asked, _ = _split(hello)
        return self._compute_proof(b"places", child_nonce, asked, places)

    def is_sealed(self, hello: bytes, places: bytes, seal: bytes) -> bool:
        """Return whether an answer to a question for places is the source's."""
        return hmac.compare_digest(seal, self.make_seal(hello, places))

    def _compute_proof(self, what: bytes, *parts: bytes) -> bytes:
        """Return a proof; all parts but the last have a fixed length, so no separator is needed."""
        return hmac.new(self.token, b"".join([what, self.nonce, *parts]), "sha256").digest()


def _split(hello: bytes) -> tuple[bytes, bytes, bytes]:
    end = NONCE_BYTES + _REQUEST.size
    return hello[:NONCE_BYTES], hello[NONCE_BYTES:end], hello[end:]
