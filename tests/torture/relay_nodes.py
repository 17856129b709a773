"""The nodes of a relay as rounds have them: real relay processes, each on a host of its own."""

from __future__ import annotations

import hashlib
import os
import secrets
import signal
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from bundle.transfer.relay import RelayOutcome, listen
from bundle.transfer.relay_chunks import ChunkFile
from bundle.transfer.relay_process import RelayProcess
from tests.support.relay_places import at_addresses

from . import isolation
from .deadline import Deadline
from .network import Network
from .rounds import require

SOURCE = 0


@dataclass
class Swarm:
    """A source and nodes that relay its file.

    Attributes:
        outcomes: how it ended on a node, by place.
    """

    folder: Path
    network: Network
    count: int
    size: int
    rng: Random
    relays: list[RelayProcess] = field(default_factory=list)
    places: list[tuple[str, int]] = field(default_factory=list)
    outcomes: dict[int, RelayOutcome] = field(default_factory=dict)

    def start(self, full: dict[int, int]) -> None:
        """Start all of them, with the source's file in place; nobody begins yet.

        Args:
            full: bytes that fit on a node's disk, for those whose disk is going to be full.
        """
        self.token = secrets.token_bytes(32)
        content = self.rng.randbytes(self.size)
        self.digest = hashlib.sha256(content).hexdigest()
        for place in range(self.count + 1):
            if place in full:
                isolation.mount_tmpfs(self.path(place).parent, f"size={full[place]}")
            self.path(place).parent.mkdir(exist_ok=True)
            self.path(place).write_bytes(b"" if place else content)
            with self.network.inside(place):
                self._add(place)
        self.relays[SOURCE].begin(None)

    def path(self, place: int) -> Path:
        """Where the file of a node lies."""
        return self.folder / f"node{place}" / "file"

    def _add(self, place: int) -> None:
        handle = os.open(self.path(place), os.O_RDWR)
        listener = listen(self.network.address(place))
        self.places.append(listener.getsockname()[:2])
        file = ChunkFile(handle, self.size, complete=place == SOURCE)
        self.relays.append(RelayProcess(file, self.token, listener))
        os.close(handle)

    def begin(self) -> None:
        """Let all nodes begin, and wait for how it ends."""
        for place in range(1, self.count + 1):
            self.relays[place].begin(at_addresses(self.places, place))
            waiting = threading.Thread(target=self._await_outcome, args=(place,), daemon=True)
            waiting.start()

    def _await_outcome(self, place: int) -> None:
        self.outcomes[place] = self.relays[place].outcome()

    def unfinished(self) -> set[int]:
        """The nodes on which it goes on."""
        return set(range(1, self.count + 1)) - self.outcomes.keys()

    def await_outcomes(self, seconds: float) -> None:
        """Wait until it has ended on every node.

        Raises:
            Broken: it has not, in that time.
        """
        deadline = Deadline(seconds)
        while self.unfinished() and not deadline.passed():
            time.sleep(0.02)
        require(not self.unfinished(), "it ends on every node", f"{self.unfinished()}: {self}")

    def signal(self, place: int, number: signal.Signals) -> None:
        """Send the relay of a node a signal, unless it has ended."""
        child = self.relays[place]._child  # 0 once its end is known; that would be this group
        if child:
            os.kill(child, number)

    def assert_whole(self, place: int) -> None:
        """Hold that a node has got the file.

        Raises:
            Broken: it has not.
        """
        require(not self.outcomes[place].failure, f"node {place} gets the file", self)
        require(self.is_sound(place), f"node {place} has what was sent", self)

    def is_sound(self, place: int) -> bool:
        """Return whether the file of a node is the source's."""
        return hashlib.sha256(self.path(place).read_bytes()).hexdigest() == self.digest

    def close(self) -> None:
        """End all of them.

        Raises:
            Broken: one does not end.
        """
        ending = threading.Thread(
            target=lambda: [relay.close() for relay in self.relays], daemon=True
        )
        ending.start()
        deadline = Deadline(20)
        while ending.is_alive() and not deadline.passed():
            ending.join(0.05)
        require(not ending.is_alive(), "every relay can be ended", self)

    def __str__(self) -> str:
        return "\n".join(f"{place}: {self.outcomes.get(place)}" for place in range(self.count + 1))
