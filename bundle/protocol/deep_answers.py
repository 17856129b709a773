"""A node's report in ``verify --deep``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from .answers import AgentEvent, Answer
from .codec import REQUIRED, WRITTEN
from .problem import Problem


@dataclass(frozen=True)
class NodeClock(AgentEvent):
    """A node's clock, as soon as it is asked."""

    event: ClassVar[str] = "clock"

    clock: float = field(default=0.0, metadata=REQUIRED)
    """Seconds since the epoch."""


@dataclass(frozen=True)
class NetworkReport:
    """The network as one node sees it."""

    differs: dict[str, tuple[str, ...]]
    """Names for which it finds other addresses than the driver, and these."""
    missing: tuple[str, ...] | None = None
    """On the head: the nodes that did not connect."""
    seconds: float | None = None
    """On every other node: time that connecting to the head took."""
    problem: Problem | None = None
    """The reason why there is neither."""


@dataclass(frozen=True)
class DeepAnswer(Answer):
    """A node after the thorough check."""

    event: ClassVar[str] = "deep"

    torch: bool = field(default=False, metadata=WRITTEN)
    """True if ranks can be started in its environment."""
    damage: tuple[Problem, ...] | None = None
    """The damage to its environment; None if that is unknown."""
    network: NetworkReport | None = None
    """The network as it sees it; None where all nodes are one machine."""
