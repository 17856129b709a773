"""A relay's connection to a node that it takes the chunks of one tree from."""

from __future__ import annotations

import errno
import os
import secrets
import socket
import zlib
from dataclasses import replace

from .chunks import ChunkFile
from .relay_child import ALIVE, CHUNK, FRAME, HANDSHAKE_SECONDS, ConnectionOver
from .relay_handshake import NONCE_BYTES, REPLY_BYTES, ChunkRequest, Handshake

CONNECT_SECONDS = 1.5
"""Time for a connection to stand. A firewall that drops what is sent shows in no other way."""
SILENT_SECONDS = 5.0
"""Time without a word, after which a parent that says each second that it is alive is left."""


class CorruptChunk(ConnectionOver):
    """A chunk did not come as it was sent."""


class ParentSilent(ConnectionOver):
    """A parent stands, and says nothing: it was stopped, or waits for its disk."""


class ParentBusy(ConnectionOver):
    """A parent serves as many as it can."""


class RelayParent:
    """A connection to a parent, or to a node that may become one.

    Attributes:
        position: its place in the trees.
        have: the chunks of the tree that it has, as far as it has said.
        accepted: True once it has proved that it is the node that was asked, and serves this one.
        drained: True if all that had come has been taken.
    """

    def __init__(
        self, position: int, address: tuple[str, int], token: bytes, tree: int, now: float
    ) -> None:
        """Begin to connect.

        Raises:
            OSError: it cannot be reached.
        """
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.position, self.have, self.accepted = position, 0, False
        self.drained = True
        self._tree = tree
        self._until = now + CONNECT_SECONDS
        self._connected = False
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

    @property
    def connecting(self) -> bool:
        """True until the connection stands, which shows when it can be written to."""
        return not self._connected

    def connect(self, now: float) -> None:
        """Note that the connection stands.

        Raises:
            ConnectionOver: it does not.
        """
        code = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise ConnectionOver(os.strerror(code).lower())
        self._connected = True
        self._until = now + HANDSHAKE_SECONDS

    def receive(self, file: ChunkFile, now: float) -> None:
        """Take what has come; whole chunks go into the file.

        Raises:
            ConnectionOver: it is of no more use.
            OSError: the connection is broken.
            UnwritableFile: this node's disk does not take a chunk.
        """
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
            self._prove(file)
        elif not self.accepted:
            self._read_reply(file, now)
        elif self._wanted == FRAME.size:
            self._read_head(file)
        else:
            self._read_chunk(file)

    def _forget(self, size: int) -> None:
        with memoryview(self._buffer) as view:
            view[: self._filled - size] = view[size : self._filled]
        self._filled -= size
        self._wanted = FRAME.size

    def _prove(self, file: ChunkFile) -> None:
        self._handshake = replace(self._handshake, nonce=bytes(self._buffer[:NONCE_BYTES]))
        request = ChunkRequest(self.position, self._tree, file.have[self._tree])
        self._hello = self._handshake.hello(secrets.token_bytes(NONCE_BYTES), request)
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
        self._forget(REPLY_BYTES)
        # So the head of a chunk comes with its first bytes, and the next one's head with its last.
        self._buffer = bytearray(FRAME.size + file.chunk_bytes + FRAME.size)

    def _read_head(self, file: ChunkFile) -> None:
        kind, position, length, _ = FRAME.unpack_from(self._buffer)
        if kind == ALIVE:
            self.have = position
            self._forget(FRAME.size)
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
        self._forget(self._wanted)

    def tick(self, now: float) -> None:
        """Look at the time.

        Raises:
            ConnectionOver: nothing has come for too long.
        """
        if now <= self._until:
            return
        if not self._connected:
            raise ConnectionOver("no answer")
        raise ParentSilent("it fell silent" if self.accepted else "no answer")

    def close(self) -> None:
        """End the connection."""
        self._socket.close()
