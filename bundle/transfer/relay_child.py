"""A relay's connection to a node that takes chunks from this one."""

from __future__ import annotations

import os
import secrets
import socket
import struct
from collections.abc import Callable

from .chunks import ChunkFile
from .relay_handshake import HELLO_BYTES, NONCE_BYTES, PLACES, Handshake, ParentReply

Directory = Callable[[int], "bytes | None"]
"""Returns the source's answer to the node with a key; None for one that takes no part."""

FRAME = struct.Struct("!BQII")
"""The head of a frame: its kind, the position of a chunk in its tree, its length, its CRC-32."""
CHUNK, ALIVE = 1, 2
"""The kinds of frames. One that only shows that the parent is alive has the number of the chunks
that it has as its position, and nothing follows."""
HANDSHAKE_SECONDS = 5.0
ALIVE_SECONDS = 1.0
"""After so long without a chunk a parent says that it is alive."""
_STUCK_SECONDS = 15.0
"""Time without a byte taken, or acknowledged, after which a child is given up: it was stopped, or
its network is gone, and it would keep its place."""


class ConnectionOver(Exception):
    """A connection is of no more use; its text says why."""


class RelayChild:
    """A connection that somebody has made to this node, a stranger until the token is proved.

    Attributes:
        accepted: True once it gets chunks.
        blocked: True if its connection has taken less than it was given, and is full.
    """

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
        self._body = (0, 0)
        """The part of a chunk that is still to be sent: its offset and length in the file."""
        self._until = now + HANDSHAKE_SECONDS
        self._last = now
        self._asked = False
        self._tree = self._next = 0
        """The tree whose chunks it gets, and the position of the next one."""
        self.accepted = self.blocked = False

    def fileno(self) -> int:
        """Return the descriptor of the connection."""
        return self._socket.fileno()

    @property
    def has_more(self) -> bool:
        """True if there is something to send."""
        return bool(self._unsent) or self._body[1] > 0 or self._chunk_waits

    @property
    def _chunk_waits(self) -> bool:
        return self.accepted and self._next < self._file.have[self._tree]

    def receive(self, *, room: bool) -> None:
        """Take what it sends: its hello, and later only its end.

        Raises:
            ConnectionOver: it has ended, or does not know the token.
            OSError: the connection is broken.
        """
        if self._asked:
            if not self._socket.recv(1):
                raise ConnectionOver("it has ended")
            raise ConnectionOver("it sent more than its request")
        raw = self._socket.recv(HELLO_BYTES - len(self._hello))
        if not raw:
            raise ConnectionOver("it has ended")
        self._hello += raw
        if len(self._hello) == HELLO_BYTES:
            self._answer(room=room)

    def _answer(self, *, room: bool) -> None:
        request = self._handshake.read_hello(self._hello)
        if request is not None and request.tree == PLACES:
            self._answer_place(request.first)
            return
        if request is None or request.tree >= len(self._file.have):
            raise ConnectionOver("it does not know the token")
        self._asked, self.accepted = True, room and request.parent == self._position
        self._tree, self._next = request.tree, request.first
        answer = ParentReply(self._position, self.accepted, self._file.have[request.tree])
        raw = self._handshake.reply(self._hello, answer)
        self._unsent = memoryview(bytes(self._unsent) + raw)

    def _answer_place(self, key: int) -> None:
        """Send a node its candidates, and nothing else."""
        places = self._directory(key) if self._directory is not None else None
        answer = ParentReply(self._position, places is not None, len(places or b""))
        raw = self._handshake.reply(self._hello, answer)
        if places is not None:
            raw += places + self._handshake.seal(self._hello, places)
        self._asked = True
        self._unsent = memoryview(bytes(self._unsent) + raw)

    def send(self, now: float) -> None:
        """Send as much as the connection takes, of one chunk at most.

        Raises:
            ConnectionOver: all that it may have is sent: a refusal, or its places.
            OSError: the connection is broken, or the file cannot be read.
        """
        self._last, self.blocked = now, True
        if not self._unsent and not self._body[1] and self._chunk_waits:
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
        checksum = self._file.checksum(self._tree, self._next)
        self._unsent = memoryview(FRAME.pack(CHUNK, self._next, self._body[1], checksum))
        self._next += 1

    def tick(self, now: float) -> None:
        """Show that this node is alive, where nothing else has shown it for a while.

        Raises:
            ConnectionOver: it has not proved its right in time, or takes nothing any more.
        """
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
