"""The requests that a node's agent is asked with, one class a phase.

On the wire a request is one JSON object with ``v``, ``phase`` and the fields of its class. In a
step of Slurm's the requests of all nodes travel as one (:func:`factored`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .job import Job


@dataclass(frozen=True)
class AgentRequest:
    """The part that all requests have."""

    phase: ClassVar[str]
    """The name of the phase."""

    job: Job
    """The job."""
    node: str
    """The node that is asked."""
    node_rank: int
    """Its rank among the job's nodes, from 0."""
    nodes_here: int
    """The number of nodes that share one machine."""


@dataclass(frozen=True)
class PlacedRequest(AgentRequest):
    """A request to a node whose node root and interpreter the preflight has found."""

    root: str
    """The node root."""
    python: str
    """The interpreter for the environment."""


@dataclass(frozen=True)
class EarlyRequest(AgentRequest):
    """Start the launcher before all else; there is no answer."""

    phase: ClassVar[str] = "early"


@dataclass(frozen=True)
class PreflightRequest(AgentRequest):
    """Report everything that could stop the job. Without a bundle only ``marker`` is known."""

    phase: ClassVar[str] = "preflight"

    marker: str = ""
    """The name of a file in the run directory, by which a node sees that it is the same one."""
    heads: tuple[str, ...] = ()
    """Digest of the head of each layer of the bundle."""
    room: tuple[tuple[int, int], ...] | None = None
    """Bytes and inodes that each layer takes."""
    own_room: tuple[int, int] = (0, 0)
    """Bytes and inodes that an environment takes besides."""
    size: int = 0
    """Bytes of the bundle."""
    wheel: tuple[str, int] | None = None
    """Name and size of the bundle's decompressor."""


@dataclass(frozen=True)
class Incoming:
    """A file that is sent to a node."""

    target: str
    """Its path there."""
    manifest: str | None
    """The bundle's manifest, where the file has only a part of the bundle."""
    members: tuple[str, ...]
    """The members of the bundle that the file has, where it has only a part."""
    size: int
    """Bytes."""


@dataclass(frozen=True)
class UnpackRequest(PlacedRequest):
    """Make the environment, from a bundle that the node sees or a file that is sent to it."""

    phase: ClassVar[str] = "unpack"

    bundle: str = ""
    """The bundle's path, unless a file is sent."""
    checked: bool = False
    """True if the preflight has just found the environment undamaged."""
    incoming: Incoming | None = None
    """The file that is sent."""


@dataclass(frozen=True)
class ProbeRequest(PlacedRequest):
    """Let the environment describe itself."""

    phase: ClassVar[str] = "probe"

    head: str
    """Address of the head node."""


@dataclass(frozen=True)
class DeepRequest(PlacedRequest):
    """Check the node thoroughly."""

    phase: ClassVar[str] = "deep"

    head: tuple[str, int] | None = None
    """Address and port of the head node; None where all nodes are one machine."""
    names: dict[str, tuple[str, ...]] | None = None
    """The addresses that the driver finds for each node's name."""


@dataclass(frozen=True)
class GroupSettings:
    """The meeting point of the ranks, and what is the same for all of them."""

    address: str
    """Address of the head node."""
    port: int
    """Port on the head node."""
    backend: str
    """``gloo`` or ``nccl``."""
    nproc: int
    """Ranks on each node."""
    on_cpus: bool = False
    """True if ranks must not use GPUs, since some node has none."""


@dataclass(frozen=True)
class LaunchRequest(PlacedRequest):
    """Start the ranks, and follow them to their end."""

    phase: ClassVar[str] = "launch"

    group: GroupSettings
    """The meeting point of the ranks."""
    shared: bool
    """True if the nodes share the run directory."""
    own: bool = False
    """True if the program is ours, and not the user's."""
    limit: float | None = None
    """Seconds after which the ranks are told to end; None for any time."""
    hold: bool = False
    """True to report ``ready``, and wait for a word before a rank begins."""


@dataclass(frozen=True)
class CollectRequest(PlacedRequest):
    """Send the job's outputs, as a stream of bytes."""

    phase: ClassVar[str] = "collect"

    place: str
    """The directory that they are in."""


@dataclass(frozen=True)
class TidyRequest(PlacedRequest):
    """Remove the files that the job has left."""

    phase: ClassVar[str] = "tidy"


@dataclass(frozen=True)
class CleanRequest(AgentRequest):
    """Remove the environments that nobody uses."""

    phase: ClassVar[str] = "clean"
