"""The account of what ranks wrote and what has come: the difference is lost, and is reported."""

from __future__ import annotations

import collections
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..protocol import output
from ..protocol.problem import Problem, ProblemCode

Writer = tuple[str, "int | None"]
"""A node and one of its ranks; the node's launcher has None in place of a rank."""


@dataclass(frozen=True)
class Loss:
    """Output that is in no log; its size is known in bytes or in frames."""

    node: str
    """The node whose ranks wrote it."""
    rank: int | None
    """The rank that wrote it; None where that is unknown, or for the launcher."""
    fault: str = ""
    """The reason why no log took it; empty where it did not come."""
    disk_full: bool = False
    """True if that reason is a full disk."""
    bytes: int | None = None
    """Bytes that are lost, where they were counted."""
    frames: int | None = None
    """Frames of messages that are lost, where bytes were not counted."""

    def to_json(self) -> dict[str, Any]:
        """Return the loss as the result has it."""
        return {"node": self.node, **self._amount(), "why": self.problem().why}

    def problem(self) -> Problem:
        """Return the loss as a problem of its node."""
        source = output.described(self._amount())
        if not self.fault:
            return Problem(ProblemCode.OUTPUT_LOST, self.node, {"source": source})
        full = self.disk_full
        code = ProblemCode.OUTPUT_DISK_FULL if full else ProblemCode.OUTPUT_NOT_LOGGED
        return Problem(code, self.node, {"source": source, "why": self.fault})

    def _amount(self) -> dict[str, Any]:
        size = {"frames": self.frames} if self.bytes is None else {"bytes": self.bytes}
        return {"rank": self.rank, **size}


@dataclass
class OutputAccount:
    """Output of one launch: received as it comes, compared with what the agents say they sent."""

    _received: collections.Counter[Writer] = field(default_factory=collections.Counter)
    """Bytes received."""
    _missing: dict[Writer, Loss] = field(default_factory=dict)
    """Losses known so far."""
    _counted: set[tuple[Any, str]] = field(default_factory=set)
    """The nodes and tasks that have said how much they have sent."""

    def receive(self, node: str, rank: int | None, count: int) -> None:
        """Add bytes that have come from a rank, or from the launcher (None)."""
        self._received[node, rank] += count

    def compare(self, event: Mapping[str, Any]) -> None:
        """Compare what an event says was sent or lost with what has come."""
        if event["event"] == "lost":
            self._add_frames(event)
        if "sent" in event:
            self._counted.add(_source(event))
            for key, count in (event["sent"] or {}).items():
                self._add_bytes(str(event.get("node", "")), int(key) if key else None, int(count))

    def losses(self) -> list[Loss]:
        """Return what agents have sent and has not come."""
        return list(self._missing.values())

    def clear(self) -> None:
        """Start anew, for another launch."""
        self._received.clear()
        self._missing.clear()
        self._counted.clear()

    def _add_frames(self, event: Mapping[str, Any]) -> None:
        if _source(event) in self._counted:
            return  # its bytes were compared, which is more exact
        node = str(event.get("node", ""))
        frames = int(event["frames"]) + int(event.get("unknown", 0))
        before = self._missing.get((node, None))
        if before is not None:
            frames += before.frames or 0
        self._missing[node, None] = Loss(node, None, frames=frames)

    def _add_bytes(self, node: str, rank: int | None, sent: int) -> None:
        missing = sent - self._received.pop((node, rank), 0)
        if missing > 0:
            self._missing[node, rank] = Loss(node, rank, bytes=missing)


def _source(event: Mapping[str, Any]) -> tuple[Any, str]:
    return event.get("node"), str(event.get("task", ""))
