"""A node's reports of one phase: on its ranks, on removed environments, on ``--deep``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from .codec import REQUIRED, WRITTEN, AnyText
from .messages import AgentEvent, Answer
from .problem import Problem

# --- A node's report on its ranks ----------------------------------------------------------------


@dataclass(frozen=True)
class Started(AgentEvent):
    """The ranks of a node are about to begin."""

    event: ClassVar[str] = "started"

    argv: tuple[AnyText, ...] = field(default=(), metadata=REQUIRED)
    """The command that starts them, without secrets; empty where it is that of a node before, but
    for the rank and the address of the node."""
    interface: str = field(default="", metadata=REQUIRED)
    """The network interface by which they reach the head."""


@dataclass(frozen=True)
class Lingering(AgentEvent):
    """A rank whose process goes on for too long; times are in seconds since the epoch."""

    event: ClassVar[str] = "lingering"

    rank: int = field(default=0, metadata=REQUIRED)
    """The rank."""
    finished: float | None = field(default=None, metadata=REQUIRED)
    """The time when its program had finished; None if it has not."""
    left: float | None = field(default=None, metadata=REQUIRED)
    """The time when it had left its process group; None if it has not."""
    waits_for: tuple[AnyText, ...] = field(default=(), metadata=REQUIRED)
    """Names of the threads and processes that keep it."""


@dataclass(frozen=True)
class RanksEnded(AgentEvent):
    """The ranks of a node have ended well, and their launcher still waits for other nodes."""

    event: ClassVar[str] = "ranks-ended"


@dataclass(frozen=True)
class FailureRecord:
    """A rank that failed; times are in seconds since the epoch."""

    node: str
    """Its node."""
    rank: int
    """Its number."""
    exit_code: int
    """Exit status of its process, negative for a signal."""
    time: float
    """The time of the failure."""
    local_rank: int = field(default=0, metadata=REQUIRED)
    """Its number on the node."""
    exception: AnyText = field(default="", metadata=REQUIRED)
    """Class of the exception that ended it; empty for none."""
    message: AnyText = field(default="", metadata=REQUIRED)
    """The exception's message."""
    lines: tuple[AnyText, ...] = field(default=(), metadata=REQUIRED)
    """The end of its traceback, or of its output."""
    ended: float | None = None
    """The time when its process ended, which after an exception takes PyTorch a while."""
    told_to_end: bool | None = None
    """True if its launcher or its agent had told it to end by then."""
    root_cause: bool | None = None
    """True if torchrun calls it the first failure that it saw."""


@dataclass(frozen=True)
class Departure:
    """A rank that others may have missed: it had left its process group, or ended well."""

    node: str
    """Its node."""
    rank: int
    """Its number."""
    time: float
    """The time when it left."""
    goes_on: bool = field(default=False, metadata=REQUIRED)
    """True if its program had not ended well."""


@dataclass(frozen=True)
class Vanished:
    """A rank that ended while others went on, with a status that nobody saw."""

    node: str
    """Its node."""
    rank: int
    """Its number."""
    time: float | None
    """The time when it ended."""


@dataclass(frozen=True)
class LaunchAnswer(Answer):
    """The ranks of a node, or of one task of it, after their end."""

    event: ClassVar[str] = "launch"

    failures: tuple[FailureRecord, ...] = field(default=(), metadata=WRITTEN)
    """The ranks that failed."""
    tail: tuple[AnyText, ...] = field(default=(), metadata=WRITTEN)
    """The last lines of output, after a failure."""
    sent: dict[str, int] | None = None
    """Bytes of output that were sent, by rank; ``""`` for the launcher's own."""
    stopped: bool = field(default=False, metadata=WRITTEN)
    """True if the ranks were told to end."""
    first_rank: float | None = None
    """The time when rank 0 last began here, in seconds since the epoch; None if it never did."""
    left: tuple[Departure, ...] = field(default=(), metadata=WRITTEN)
    """The first rank that others may have missed."""
    vanished: tuple[Vanished, ...] = field(default=(), metadata=WRITTEN)
    """Ranks that ended unseen."""
    lingering: tuple[Lingering, ...] = field(default=(), metadata=WRITTEN)
    """Ranks that went on for too long, and still did at the end."""
    joined: tuple[int, ...] = field(default=(), metadata=WRITTEN)
    """Ranks that have been in a process group of PyTorch's."""
    alone: tuple[int, ...] = field(default=(), metadata=WRITTEN)
    """Ranks that have never been in one."""


# --- A node's report on the environments that it has removed -------------------------------------


@dataclass(frozen=True)
class NodeCleanup:
    """The result of cleaning one node root; in a dry run, the plan."""

    root: str
    """The node root."""
    removed: tuple[tuple[str, int], ...] = field(default=(), metadata=REQUIRED)
    """Environments: the bundle's id, and the bytes that became free."""
    kept: tuple[tuple[str, str], ...] = field(default=(), metadata=REQUIRED)
    """Everything that stays: the bundle's id or the path in the root, and the reason."""
    left_overs: tuple[tuple[str, int], ...] = field(default=(), metadata=REQUIRED)
    """Everything else that was removed: its path in the root, and the bytes that became free."""
    problems: tuple[Problem, ...] = field(default=(), metadata=REQUIRED)
    """The failures to remove something."""
    gone: bool = field(default=False, metadata=REQUIRED)
    """True if nothing was left and the root itself was removed."""
    freed: int = field(default=0, metadata=REQUIRED)
    """Bytes that became free, without files that other environments share."""


@dataclass(frozen=True)
class CleanAnswer(Answer):
    """The node roots of one node after a cleaning."""

    event: ClassVar[str] = "clean"

    roots: tuple[NodeCleanup, ...] = field(default=(), metadata=WRITTEN)
    """Each node root of this user."""


# --- A node's report in ``verify --deep`` --------------------------------------------------------


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
