"""The requests that a node's agent is asked with, one class a phase.

On the wire a request is one JSON object with ``v``, the version, ``phase`` and the fields
of its class. In a step of Slurm's, whose tasks all get the same bytes, the requests of all nodes
travel as one :class:`StepMessage`. :class:`RequestReader` is an agent's side of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, TypeVar

from .codec import REQUIRED, decode, encode
from .job import Job
from .json_values import AnyText, DecodeError
from .problem import NodeError, Problem, ProblemCode

_T = TypeVar("_T")
VERSION = 1
"""Version of the protocol between a driver and its agents."""


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

    def to_json(self) -> dict[str, object]:
        """Return the request as a JSON object, without the fields that have their default."""
        return {"v": VERSION, "phase": self.phase, **encode(self, short=True)}


@dataclass(frozen=True)
class PlacedRequest(AgentRequest):
    """A request to a node whose node root and interpreter the preflight has found."""

    root: str
    """The node root."""
    python: str
    """The interpreter for the environment; empty for the bundle's own."""


@dataclass(frozen=True)
class EarlyRequest(AgentRequest):
    """Start the launcher before all other phases; there is no answer."""

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
class RelayTask:
    """A node's part in a relay."""

    token: str
    """The random token of this transfer, in hexadecimal digits."""
    address: str
    """The address of this node that others reach."""


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
    relay: RelayTask | None = None
    """Given if the nodes pass the file on to each other; else ``sbcast`` brings it."""
    results: bool = False
    """True for earlier results, for the ranks' working directory, instead of a bundle."""


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

    directory: str
    """The directory that they are in."""
    brought: tuple[AnyText, ...] | None = None
    """Files that other nodes have sent: only others are, with their directories. None: send all."""


@dataclass(frozen=True)
class TidyRequest(PlacedRequest):
    """Remove the ranks' working directory on a node that does not share the run directory."""

    phase: ClassVar[str] = "tidy"

    keep_files: bool = False
    """True to leave it where there are files in it."""
    brought: tuple[AnyText, ...] | None = None
    """Outputs that have been sent by other nodes: a directory that has more is left. None: any."""


@dataclass(frozen=True)
class CleanRequest(AgentRequest):
    """Remove the environments that nobody uses."""

    phase: ClassVar[str] = "clean"


REQUESTS: dict[str, type[AgentRequest]] = {
    kind.phase: kind
    for kind in (
        EarlyRequest,
        PreflightRequest,
        UnpackRequest,
        ProbeRequest,
        DeepRequest,
        LaunchRequest,
        CollectRequest,
        TidyRequest,
        CleanRequest,
    )
}
"""The class of a request by its phase."""


@dataclass(frozen=True)
class StepMessage:
    """The requests of the nodes of a step as one, with what all of them have written once."""

    phase: str
    """The phase that is asked for."""
    common: dict[str, object]
    """Fields that all requests have; the job is left out where the agents know it."""
    own: dict[str, dict[str, object]]
    """By node, the fields that only its request has; of a value in a field, too, only these."""
    nodes: tuple[str, ...] | None = None
    """The nodes that are asked; None for all of the step."""
    v: int = field(default=VERSION, metadata=REQUIRED)
    """Version of the protocol."""


@dataclass(frozen=True)
class Handover:
    """A request that an agent passes on to itself under another interpreter."""

    request: dict[str, object]
    """The request."""
    in_step: bool
    """True in a step of Slurm's."""
    frames_sent: int
    """The number of frames that the agent had sent."""


RELAY_SOURCE = "the source"
"""What the driver's host is called in a relay, beside the names of nodes."""


@dataclass(frozen=True)
class RelayStart:
    """The beginning of a relay. Each node asks its source for the places that it must know."""

    port: int
    """The port of the source on the driver's host."""
    nodes: int
    """The number of nodes that take part."""
    left_out: tuple[str, ...] = ()
    """The names of those that take no part: they listened too late, or were lost."""


@dataclass(frozen=True)
class FramesAgain:
    """A question of the driver's for frames that it has not received."""

    again: dict[str, tuple[tuple[int, int], ...]]
    """By source, the first and the last number of frames that are missing."""


class RequestReader:
    """Reads the requests that come to one agent.

    Attributes:
        in_step: True in a step of Slurm's.
        handed_over: True if the agent was started under this interpreter by itself.
        frames_sent: the number of frames that it had sent before.
    """

    def __init__(self, node: str, phase: str = "") -> None:
        self.in_step = self.handed_over = False
        self.frames_sent = 0
        self._node, self._phase = node, phase
        self._job: object = None
        """The job of the last message, as JSON."""

    def first(self, raw: object) -> AgentRequest:
        """Read the first request.

        Raises:
            NodeError: it is of another version, or a field is missing, unknown or wrong.
        """
        fields = raw if isinstance(raw, dict) else {}
        if "handover" in fields:
            handover = _decoded(Handover, fields["handover"])
            self.in_step, self.frames_sent = handover.in_step, handover.frames_sent
            self.handed_over = True
            self._job = handover.request.get("job")
            return self._request(handover.request)
        self.in_step = "common" in fields
        request = self.next(raw)
        if request is None:
            raise NodeError(_unreadable(DecodeError("nodes", f"{self._node} is not asked")))
        return request

    def next(self, raw: object) -> AgentRequest | None:
        """Read a further request; return None for one to other nodes.

        Raises:
            NodeError: it is of another version, or a field is missing, unknown or wrong.
        """
        if not self.in_step:
            return self._request(raw)
        message = _decoded(StepMessage, raw)
        self._job = message.common.get("job", self._job)  # it may be new in one to other nodes
        if message.nodes is not None and self._node not in message.nodes:
            return None
        job = Job.from_json(self._job)
        return self._request(
            {
                **_merged(message.common, message.own.get(self._node, {})),
                "v": message.v,
                "phase": message.phase,
                "job": self._job,
                "node": self._node,
                "node_rank": job.nodes.index(self._node),
            }
        )

    def _request(self, raw: object) -> AgentRequest:
        try:
            if not isinstance(raw, dict):
                raise DecodeError("", "it is not an object")
            fields = {"v": None, "phase": self._phase, **raw}
            version, phase = fields.pop("v"), str(fields.pop("phase"))
            if version != VERSION:
                raise DecodeError("v", f"version {version!r}, this program speaks {VERSION}")
            if phase not in REQUESTS:
                raise DecodeError("phase", f"{phase!r} is none of {', '.join(REQUESTS)}")
            return decode(REQUESTS[phase], fields)
        except DecodeError as exc:
            raise NodeError(_unreadable(exc)) from exc


def _merged(common: dict[str, object], own: Mapping[str, object]) -> dict[str, object]:
    """Merge the fields of a request; a value may have its own fields in both parts."""
    merged = dict(common)
    for name, value in own.items():
        shared = common.get(name)
        has_both = isinstance(shared, dict) and isinstance(value, dict)
        merged[name] = _merged(shared, value) if has_both else value  # type: ignore[arg-type]
    return merged


def _decoded(kind: type[_T], raw: object) -> _T:
    try:
        return decode(kind, raw)
    except DecodeError as exc:
        raise NodeError(_unreadable(exc)) from exc


def _unreadable(exc: DecodeError) -> Problem:
    return Problem(ProblemCode.REQUEST_UNREADABLE, exc.path, {"why": exc.reason})
