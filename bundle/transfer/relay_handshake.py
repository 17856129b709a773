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
from typing import NamedTuple

NONCE_BYTES = 16
TOKEN_BYTES = 32
SEAL_BYTES = _MAC_BYTES = 32
_FIELDS = struct.Struct("!IBQ")
PLACES = 255
"""What a question for places has in the place of a tree."""
_ASKED_BYTES = NONCE_BYTES + _FIELDS.size
HELLO_BYTES = _ASKED_BYTES + _MAC_BYTES
REPLY_BYTES = _FIELDS.size + _MAC_BYTES


class ChunkRequest(NamedTuple):
    """The chunks that a child asks for: those of a tree, from a position in it on."""

    parent: int
    """The position of the node that it asks, as it believes."""
    tree: int
    first: int


class ParentReply(NamedTuple):
    """A parent's answer."""

    parent: int
    """The position of the node that answers."""
    accepted: bool
    """False if it serves as many as it can, or another node was meant."""
    have: int
    """The number of the tree's chunks that it has."""


class Handshake(NamedTuple):
    """The handshake of one connection, at either end of it."""

    token: bytes
    """The transfer's token."""
    nonce: bytes
    """The parent's nonce, with which the handshake begins."""

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

    def make_reply(self, hello: bytes, reply: ParentReply) -> bytes:
        """Return what a parent answers to a child's hello."""
        answered = _FIELDS.pack(*reply)
        return answered + self._compute_proof(b"parent", hello[:_ASKED_BYTES], answered)

    def read_reply(self, hello: bytes, reply: bytes) -> ParentReply | None:
        """Return a parent's answer in ``REPLY_BYTES`` bytes; None without the token."""
        answered, proof = reply[: _FIELDS.size], reply[_FIELDS.size :]
        expected = self._compute_proof(b"parent", hello[:_ASKED_BYTES], answered)
        if not hmac.compare_digest(proof, expected):
            return None
        parent, accepted, have = _FIELDS.unpack(answered)
        return ParentReply(parent, bool(accepted), have)

    def make_seal(self, hello: bytes, places: bytes) -> bytes:
        """Return the proof that follows the source's answer to a question for places."""
        return self._compute_proof(b"places", hello[:_ASKED_BYTES], places)

    def is_sealed(self, hello: bytes, places: bytes, seal: bytes) -> bool:
        """Return whether an answer to a question for places is the source's."""
        return hmac.compare_digest(seal, self.make_seal(hello, places))

    def _compute_proof(self, what: bytes, *parts: bytes) -> bytes:
        """Return a proof; all parts but the last have a fixed length, so no separator is needed."""
        return hmac.new(self.token, b"".join([what, self.nonce, *parts]), "sha256").digest()
