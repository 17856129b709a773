"""A node's report on its ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from .answers import AgentEvent, Answer
from .codec import REQUIRED, WRITTEN
from .json_values import AnyText


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
