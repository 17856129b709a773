"""The measurements of ``verify --deep``, as a job's result has them."""

from __future__ import annotations

from dataclasses import dataclass, field

from .codec import REQUIRED


@dataclass(frozen=True)
class NodePair:
    """The network between two nodes, as ranks of both have measured it."""

    a: str
    """One node."""
    b: str
    """The other."""
    gb_per_s: float
    """10^9 bytes a second, one way."""
    latency_us: float
    """Microseconds that a few bytes take, one way."""


@dataclass(frozen=True)
class AllReduceMeasured:
    """The measurements of an all-reduce over all ranks."""

    world_size: int
    """The number of ranks."""
    nodes: tuple[str, ...]
    """The nodes, in the order of their ranks."""
    backend: str
    """``gloo`` or ``nccl``."""
    bytes: int
    """Size of the tensor."""
    seconds: float
    """Time that the all-reduce took."""
    gb_per_s: float
    """Bytes of the tensor by that time, in 10^9 bytes a second."""
    pairs: tuple[NodePair, ...]
    """The pairs of nodes that were measured."""


@dataclass(frozen=True)
class ClockOffset:
    """A node's clock against the driver's, in seconds."""

    ahead: float
    """Seconds by which it is ahead; negative if it is behind."""
    give_or_take: float
    """The uncertainty of that."""


@dataclass(frozen=True)
class DeepReport:
    """The measurements of ``verify --deep``."""

    connect_seconds: dict[str, float] | None = None
    """Time in which each node has connected to the head; absent where all are one machine."""
    clocks: dict[str, ClockOffset] | None = None
    """The clock of each node; absent where all are one machine."""
    all_reduce: AllReduceMeasured | None = field(default=None, metadata=REQUIRED)
    """The all-reduce; null where there was none, or it failed."""
    skipped: str = field(default="", metadata=REQUIRED)
    """The reason why there was none; empty if there was one."""
