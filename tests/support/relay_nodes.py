"""A source and nodes of a relay: real processes of this machine."""

from __future__ import annotations

import hashlib
import os
import secrets
import signal
from pathlib import Path

from bundle.transfer.relay import RelayOutcome, listen
from bundle.transfer.relay_chunks import ChunkFile
from bundle.transfer.relay_peers import Directory
from bundle.transfer.relay_process import RelayProcess
from tests.support.relay_places import at_addresses

MIB = 1 << 20


class Nodes:
    """A source and nodes that relay its file."""

    def __init__(self, folder: Path, size: int, directory: Directory | None = None) -> None:
        self.folder, self.size = folder, size
        self.token = secrets.token_bytes(32)
        self.places: list[tuple[str, int]] = []
        self.relays: list[RelayProcess] = []
        content = os.urandom(size)
        self.digest = hashlib.sha256(content).hexdigest()
        (folder / "0").write_bytes(content)
        self.add(complete=True, directory=directory)
        self.relays[0].begin(None)

    def add(
        self,
        *,
        complete: bool = False,
        address: str = "127.0.0.1",
        directory: Directory | None = None,
    ) -> int:
        """Start a node, or the source; return its place."""
        number = len(self.relays)
        handle = os.open(self.folder / str(number), os.O_RDWR | os.O_CREAT)
        listener = listen(address)
        self.places.append(listener.getsockname()[:2])
        file = ChunkFile(handle, self.size, complete=complete)
        self.relays.append(RelayProcess(file, self.token, listener, directory))
        os.close(handle)
        return number

    def begin(self, *places: int) -> None:
        """Let nodes begin; all by default."""
        for place in places or range(1, len(self.relays)):
            self.relays[place].begin(at_addresses(self.places, place))

    def kill(self, place: int, number: int = signal.SIGKILL) -> None:
        """Send a node a signal."""
        os.kill(self.relays[place]._child, number)

    def has(self, place: int) -> int:
        """The bytes of a node's file so far."""
        return (self.folder / str(place)).stat().st_size

    def assert_whole(self, place: int) -> RelayOutcome:
        """Check that a node gets the file; return its outcome."""
        outcome = self.relays[place].outcome()
        assert outcome.failure == ""
        content = (self.folder / str(place)).read_bytes()
        assert hashlib.sha256(content).hexdigest() == self.digest
        return outcome

    def close(self) -> None:
        """End all of them."""
        for relay in self.relays:
            relay.close()
