"""Only who knows the token gets a byte, or can give one."""

from __future__ import annotations

import secrets

from bundle.transfer.relay_handshake import (
    HELLO_BYTES,
    REPLY_BYTES,
    TOKEN_BYTES,
    ChunkRequest,
    Handshake,
    ParentReply,
)

TOKEN = secrets.token_bytes(TOKEN_BYTES)
THEIRS, OURS = secrets.token_bytes(16), secrets.token_bytes(16)
HANDSHAKE = Handshake(TOKEN, THEIRS)
REQUEST = ChunkRequest(parent=7, tree=1, first=4711)
REPLY = ParentReply(parent=7, accepted=True, have=12)


def test_both_ends_prove_that_they_know_the_token() -> None:
    hello = HANDSHAKE.hello(OURS, REQUEST)
    assert len(hello) == HELLO_BYTES
    assert HANDSHAKE.read_hello(hello) == REQUEST
    reply = HANDSHAKE.reply(hello, REPLY)
    assert len(reply) == REPLY_BYTES
    assert HANDSHAKE.read_reply(hello, reply) == REPLY


def test_a_proof_that_was_overheard_is_worth_nothing_under_another_nonce() -> None:
    hello = HANDSHAKE.hello(OURS, REQUEST)
    reply = HANDSHAKE.reply(hello, REPLY)
    fresh = secrets.token_bytes(16)
    assert Handshake(TOKEN, fresh).read_hello(hello) is None
    again = HANDSHAKE.hello(fresh, REQUEST)
    assert HANDSHAKE.read_reply(again, reply) is None


def test_each_changed_byte_is_noticed() -> None:
    hello = HANDSHAKE.hello(OURS, REQUEST)
    reply = HANDSHAKE.reply(hello, REPLY)
    for place in range(HELLO_BYTES):
        changed = hello[:place] + bytes([hello[place] ^ 1]) + hello[place + 1 :]
        assert HANDSHAKE.read_hello(changed) is None
    for place in range(REPLY_BYTES):
        changed = reply[:place] + bytes([reply[place] ^ 1]) + reply[place + 1 :]
        assert HANDSHAKE.read_reply(hello, changed) is None


def test_a_proof_of_one_end_is_none_of_the_other() -> None:
    """A node that only sends back what it was sent does not pass for a parent."""
    hello = HANDSHAKE.hello(OURS, REQUEST)
    mirrored = hello[16 : 16 + REPLY_BYTES]
    assert HANDSHAKE.read_reply(hello, mirrored) is None
