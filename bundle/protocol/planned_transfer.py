"""The values of a transfer's plan, as its event has them."""

from __future__ import annotations

from dataclasses import dataclass, field

from .codec import REQUIRED


@dataclass(frozen=True)
class StagingWork:
    """The work of one node for its environment."""

    sent: int
    """Bytes that are sent to it."""
    bytes: int
    """Bytes that it writes."""
    files: int
    """Files that it writes."""
    linked: int = field(default=0, metadata=REQUIRED)
    """Files that it has already, and takes by hard link."""

    def __post_init__(self) -> None:
        if min(self.sent, self.bytes, self.files, self.linked) < 0:
            raise ValueError("a count is below zero")


@dataclass(frozen=True)
class PlannedGroup:
    """Nodes that get their environment in the same way."""

    nodes: tuple[str, ...]
    """Their names."""
    how: str
    """``present``: the environment is there; ``shared``: they read the bundle where it lies;
    ``relay``, ``sbcast`` and ``ssh``: it is sent to them."""
    bytes: int = field(default=0, metadata=REQUIRED)
    """Size of the file that is sent."""
    layers: tuple[str, ...] = field(default=(), metadata=REQUIRED)
    """Names of the layers in it: packages, the project and assets."""
    work: StagingWork | None = field(default=None, metadata=REQUIRED)
    """The work of each node; null if there is none, or it is not known."""


@dataclass(frozen=True)
class StagingForecast:
    """The expected time until the ranks run."""

    measured: bool
    """True if the rates were measured on earlier jobs, and not assumed."""
    seconds: dict[str, float]
    """Seconds by phase, and ``total``."""
