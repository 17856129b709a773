"""A source and nodes of a relay: real processes of this machine."""

from __future__ import annotations

import hashlib
import os
import secrets
import signal
from collections.abc import Sequence
from pathlib import Path

from bundle.driver.transports.relay_source import find_candidates
from bundle.transfer.relay import RelayOutcome, listen
from bundle.transfer.relay_chunks import ChunkFile
from bundle.transfer.relay_peers import Directory, RelayCandidates, RelayPlace
from bundle.transfer.relay_process import RelayProcess

MIB = 1 << 20


def at_addresses(addresses: Sequence[tuple[str, int]], position: int) -> RelayCandidates:
    """What the node at a position must know; the source has the first address."""
    places = [RelayPlace(place, "", *address[:2]) for place, address in enumerate(addresses)]
    return find_candidates(position, places)


class Nodes:
    def __init__(self, folder: Path, size: int, directory: Directory | None = None) -> None:
        self.folder, self.size = folder, size
        self.token = secrets.token_bytes(32)
        self.places: list[tuple[str, int]] = []
        self.relays: list[RelayProcess] = []
        content = os.urandom(size)
        self.digest = hashlib.sha256(content).hexdigest()
        self.path(0).write_bytes(content)
        self.add(directory=directory)
        self.relays[0].begin(None)

    def path(self, place: int) -> Path:
        return self.folder / str(place)

    def add(self, *, address: str = "127.0.0.1", directory: Directory | None = None) -> None:
        number = len(self.relays)
        handle = os.open(self.path(number), os.O_RDWR | os.O_CREAT)
        listener = listen(address)
        self.places.append(listener.getsockname()[:2])
        file = ChunkFile(handle, self.size, complete=number == 0)
        self.relays.append(RelayProcess(file, self.token, listener, directory))
        os.close(handle)

    def begin(self, *places: int) -> None:
        for place in places or range(1, len(self.relays)):
            self.relays[place].begin(at_addresses(self.places, place))

    def kill(self, place: int, number: int = signal.SIGKILL) -> None:
        """Send a node a signal, unless it has ended."""
        child = self.relays[place]._child  # 0 once its end is known; that would be this group
        if child:
            os.kill(child, number)

    def has(self, place: int) -> int:
        return self.path(place).stat().st_size

    def is_whole(self, place: int) -> bool:
        return hashlib.sha256(self.path(place).read_bytes()).hexdigest() == self.digest

    def assert_whole(self, place: int) -> RelayOutcome:
        outcome = self.relays[place].outcome()
        assert outcome.failure == ""
        assert self.is_whole(place)
        return outcome

    def close(self) -> None:
        for relay in self.relays:
            relay.close()
