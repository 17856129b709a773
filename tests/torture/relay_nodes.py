"""The nodes of a relay as rounds have them: real relay processes, each on a host of its own."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from random import Random

from bundle.transfer.relay import RelayOutcome
from tests.support.relay_nodes import Nodes

from . import isolation
from .deadline import Deadline
from .network import Network
from .rounds import require

SOURCE = 0
SIZE = 3_500_000  # bytes, 0.7 s at the rate of a link, and a little more for each node on the way


class Swarm(Nodes):
    """A source and nodes that relay its file, on hosts of a network; the first is the source's."""

    def __init__(self, folder: Path, rng: Random, network: Network, full: dict[int, int]) -> None:
        """Start all of them; ``full`` has the bytes that fit on disks that are going to be full."""
        self.folder, self.rng, self.network = folder, rng, network
        self.others = range(1, network.hosts)
        self.outcomes: dict[int, RelayOutcome] = {}  # how it ended on a node, by place
        for place in range(network.hosts):
            self.path(place).parent.mkdir()
            if place in full:
                isolation.mount_tmpfs(self.path(place).parent, f"size={full[place]}")
        super().__init__(folder, SIZE + rng.randrange(70_000))
        for _ in self.others:
            self.add()

    def path(self, place: int) -> Path:
        return self.folder / f"node{place}" / "file"

    def add(self, **_: object) -> None:
        place = len(self.relays)
        with self.network.inside(place):
            super().add(address=self.network.address(place))

    def begin(self, *places: int) -> None:
        super().begin(*places)
        for place in self.others:
            threading.Thread(target=self._await_outcome, args=(place,), daemon=True).start()

    def _await_outcome(self, place: int) -> None:
        self.outcomes[place] = self.relays[place].outcome()

    def unfinished(self) -> set[int]:
        return {*self.others} - self.outcomes.keys()

    def await_outcomes(self, seconds: float) -> None:
        deadline = Deadline(seconds)
        while self.unfinished() and not deadline.passed():
            time.sleep(0.02)
        require(not self.unfinished(), "it ends on every node", f"{self.unfinished()}: {self}")

    def close(self) -> None:
        ending = threading.Thread(target=super().close, daemon=True)
        ending.start()
        deadline = Deadline(20)
        while ending.is_alive() and not deadline.passed():
            ending.join(0.05)
        require(not ending.is_alive(), "every relay can be ended", self)

    def __str__(self) -> str:
        return "\n".join(f"{place}: {outcome}" for place, outcome in sorted(self.outcomes.items()))
