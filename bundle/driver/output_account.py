"""The account of what ranks wrote and what has come: the difference is lost, and is reported."""

from __future__ import annotations

import collections
from dataclasses import dataclass, field

from ..protocol.events import FramesLost, OutputLoss
from ..protocol.problem import Problem, ProblemCode
from ..protocol.problem_table import TABLE
from ..protocol.reports import LaunchAnswer

_LOST_ON_THE_WAY = TABLE[ProblemCode.OUTPUT_LOST].why

RankOfNode = tuple[str, "int | None"]
"""A node and one of its ranks; the node's launcher has None in place of a rank."""


def loss_problem(loss: OutputLoss) -> Problem:
    """Return a loss of output as a problem of its node."""
    values = {"source": str(loss)}
    if loss.code is not ProblemCode.OUTPUT_LOST:
        values["why"] = loss.why
    return Problem(loss.code, loss.node, values)


@dataclass
class OutputAccount:
    """Output of one launch: received as it comes, compared with what the agents say they sent."""

    _received: collections.Counter[RankOfNode] = field(default_factory=collections.Counter)
    """Bytes received."""
    _missing: dict[RankOfNode, OutputLoss] = field(default_factory=dict)
    """Losses known so far."""
    _counted: set[tuple[str, str]] = field(default_factory=set)
    """The nodes and tasks that have said how much they have sent."""

    def receive(self, node: str, rank: int | None, count: int) -> None:
        """Add bytes that have come from a rank, or from the launcher (None)."""
        self._received[node, rank] += count

    def compare(self, event: object) -> None:
        """Compare what an event says was sent or lost with what has come."""
        if isinstance(event, FramesLost):
            self._add_frames(event)
        if isinstance(event, LaunchAnswer) and event.sent is not None:
            self._counted.add((event.node, "" if event.task is None else str(event.task)))
            for rank, count in event.sent.items():
                self._add_bytes(event.node, int(rank) if rank else None, count)

    def losses(self) -> list[OutputLoss]:
        """Return what agents have sent and has not come."""
        return list(self._missing.values())

    def clear(self) -> None:
        """Start anew, for another launch."""
        self._received.clear()
        self._missing.clear()
        self._counted.clear()

    def _add_frames(self, event: FramesLost) -> None:
        if (event.node, event.task) in self._counted:
            return  # its bytes were compared, which is more exact
        frames = event.frames + event.unknown
        before = self._missing.get((event.node, None))
        if before is not None:
            frames += before.frames or 0
        lost = OutputLoss(event.node, None, _LOST_ON_THE_WAY, frames=frames)
        self._missing[event.node, None] = lost

    def _add_bytes(self, node: str, rank: int | None, sent: int) -> None:
        missing = sent - self._received.pop((node, rank), 0)
        if missing > 0:
            self._missing[node, rank] = OutputLoss(node, rank, _LOST_ON_THE_WAY, bytes=missing)
