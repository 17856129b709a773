"""Only who knows the token gets a byte, or can give one."""

from __future__ import annotations

import secrets

from bundle.transfer import relay_handshake
from bundle.transfer.relay_handshake import (
    HELLO_BYTES,
    REPLY_BYTES,
    TOKEN_BYTES,
    ChunkRequest,
    ParentReply,
)

TOKEN = secrets.token_bytes(TOKEN_BYTES)
THEIRS, OURS = secrets.token_bytes(16), secrets.token_bytes(16)
REQUEST = ChunkRequest(parent=7, tree=1, first=4711)
REPLY = ParentReply(parent=7, accepted=True, have=12)


def test_both_ends_prove_that_they_know_the_token() -> None:
    hello = relay_handshake.hello(TOKEN, THEIRS, OURS, REQUEST)
    assert len(hello) == HELLO_BYTES
    assert relay_handshake.read_hello(TOKEN, THEIRS, hello) == REQUEST
    reply = relay_handshake.reply(TOKEN, THEIRS, hello, REPLY)
    assert len(reply) == REPLY_BYTES
    assert relay_handshake.read_reply(TOKEN, THEIRS, hello, reply) == REPLY


def test_another_token_is_refused() -> None:
    other = secrets.token_bytes(TOKEN_BYTES)
    hello = relay_handshake.hello(TOKEN, THEIRS, OURS, REQUEST)
    assert relay_handshake.read_hello(other, THEIRS, hello) is None
    reply = relay_handshake.reply(other, THEIRS, hello, REPLY)
    assert relay_handshake.read_reply(TOKEN, THEIRS, hello, reply) is None


def test_a_proof_that_was_overheard_is_worth_nothing_under_another_nonce() -> None:
    hello = relay_handshake.hello(TOKEN, THEIRS, OURS, REQUEST)
    reply = relay_handshake.reply(TOKEN, THEIRS, hello, REPLY)
    fresh = secrets.token_bytes(16)
    assert relay_handshake.read_hello(TOKEN, fresh, hello) is None
    again = relay_handshake.hello(TOKEN, THEIRS, fresh, REQUEST)
    assert relay_handshake.read_reply(TOKEN, THEIRS, again, reply) is None


def test_each_changed_byte_is_noticed() -> None:
    hello = relay_handshake.hello(TOKEN, THEIRS, OURS, REQUEST)
    reply = relay_handshake.reply(TOKEN, THEIRS, hello, REPLY)
    for place in range(HELLO_BYTES):
        changed = hello[:place] + bytes([hello[place] ^ 1]) + hello[place + 1 :]
        assert relay_handshake.read_hello(TOKEN, THEIRS, changed) is None
    for place in range(REPLY_BYTES):
        changed = reply[:place] + bytes([reply[place] ^ 1]) + reply[place + 1 :]
        assert relay_handshake.read_reply(TOKEN, THEIRS, hello, changed) is None


def test_a_proof_of_one_end_is_none_of_the_other() -> None:
    """A node that only sends back what it was sent does not pass for a parent."""
    hello = relay_handshake.hello(TOKEN, THEIRS, OURS, REQUEST)
    mirrored = hello[16 : 16 + REPLY_BYTES]
    assert relay_handshake.read_reply(TOKEN, THEIRS, hello, mirrored) is None
