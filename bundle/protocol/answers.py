"""The events of a node's agent: its answer to each phase, and what it reports on the way.

On the wire each is one JSON object with ``v``, the protocol's version, and ``event``, the name of
its class. Output of ranks has a form of its own (:mod:`bundle.protocol.output`). What only one
phase needs is in modules of their own: ``deep_answers``, ``launch_answers``, ``clean_answers``.
:mod:`bundle.protocol.agent_events` reads all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from .codec import REQUIRED, WRITTEN, encode
from .digest import Digest
from .facts import GpuFacts, HostFacts
from .json_values import AnyText
from .problem import Problem
from .requests import VERSION


@dataclass(frozen=True)
class AgentEvent:
    """An event of a node's agent."""

    event: ClassVar[str] = ""
    """Its name on the wire."""

    node: str = field(default="", metadata=REQUIRED)
    """The node's name."""

    def to_json(self) -> dict[str, object]:
        """Return the event as a JSON object, without the fields that have their default."""
        return {"v": VERSION, "event": self.event, **encode(self, short=True)}


@dataclass(frozen=True)
class Answer(AgentEvent):
    """A node's answer to a phase."""

    ok: bool = field(default=True, metadata=REQUIRED)
    """True if the node has done its part."""
    seconds: float = field(default=0.0, metadata=REQUIRED)
    """Time that it took."""
    problems: tuple[Problem, ...] = field(default=(), metadata=REQUIRED)
    """Everything that keeps the node from running the job."""
    exit_code: int | None = None
    """Exit status of a launch; of a node that gave no answer, that of its agent."""
    task: int | None = None
    """The number of the task that answers, where Slurm starts several on a node."""
    tasks: int = 1
    """The number of tasks whose answers these are."""
    lost: bool = False
    """True if the node gave no answer, and the driver made up this one."""
    unreachable: bool = False
    """True if no rank has begun anywhere because none could begin here."""


@dataclass(frozen=True)
class PreflightAnswer(Answer):
    """Everything about a node that matters before anything is sent to it."""

    event: ClassVar[str] = "preflight"

    root: str = field(default="", metadata=WRITTEN)
    """The node root; empty if no directory fits."""
    python: str = field(default="", metadata=WRITTEN)
    """An interpreter for the environment; empty if there is none, or the bundle has its own."""
    address: str = field(default="", metadata=WRITTEN)
    """Address at which the others reach the node; empty if none is known."""
    port: int = field(default=0, metadata=WRITTEN)
    """Free port that it has as the head; 0 if it cannot be the head."""
    no_head: Problem | None = None
    """Why it cannot be the head; its address is then that of its way to the driver's host."""
    loopback: str = ""
    """The loopback address at which ``ssh`` has reached it: the machine that ``ssh`` came from."""
    proj: bool = field(default=False, metadata=WRITTEN)
    """True if the node sees the run directory."""
    pkgs: bool = field(default=False, metadata=WRITTEN)
    """True if the node has the environment, or can read the bundle."""
    ready: bool = field(default=False, metadata=WRITTEN)
    """True if it has the environment, undamaged."""
    rate: float | None = field(default=None, metadata=WRITTEN)
    """Bytes a second at which it reads the bundle; None if it cannot, or need not."""
    check_seconds: float = field(default=0.0, metadata=WRITTEN)
    """Time that the check of the environment took."""
    damage: Problem | None = None
    """The damage of its environment."""
    lacks: tuple[int, ...] | None = None
    """The numbers of the layers that no environment there has; None if that is unknown."""
    has_wheel: bool = field(default=False, metadata=WRITTEN)
    """True if an environment there has the bundle's decompressor, or none is needed."""
    host: HostFacts | None = None
    """The machine."""
    gpus: GpuFacts | None = None
    """Its NVIDIA driver and GPUs; None where there is no such driver."""
    unchecked: str = ""
    """Why it could not check the bundle's signature; empty if it has, or none is required."""


@dataclass(frozen=True)
class UnpackAnswer(Answer):
    """The environment that a node has made, or had already."""

    event: ClassVar[str] = "unpack"

    path: str = field(default="", metadata=WRITTEN)
    """The environment's directory."""
    reused: bool = field(default=False, metadata=WRITTEN)
    """True if it was there already."""
    files_linked: int = field(default=0, metadata=WRITTEN)
    """Files that were taken from older environments by hard link."""
    files_written: int = field(default=0, metadata=WRITTEN)
    """Files that were written from the bundle."""
    unpack_seconds: float | None = None
    """Time that the unpacking took, without the wait for bytes; None where nothing was unpacked."""
    mended: Problem | None = None
    """The damage of the environment that was there before."""
    lacking: bool = False
    """True if layers that were not sent are missing: an older environment has been removed."""
    arrived: Digest | None = None
    """Of a damaged file that was sent, the digest of the bytes that arrived."""


@dataclass(frozen=True)
class ProbeAnswer(Answer):
    """An environment, as its own Python describes it."""

    event: ClassVar[str] = "probe"

    python: str = field(default="", metadata=WRITTEN)
    """Its full version."""
    prefix: str = field(default="", metadata=WRITTEN)
    """Its ``sys.prefix``."""
    packages: dict[str, str | None] = field(default_factory=dict, metadata=WRITTEN)
    """Version of each package that was asked for; None for one that is missing."""
    origins: dict[str, str] = field(default_factory=dict, metadata=WRITTEN)
    """File or directory of each module."""
    origin_ok: bool = field(default=False, metadata=WRITTEN)
    """True if every module comes from the environment."""
    line: AnyText = ""
    """The line that people look for: ``NODE hpc09 OK -> ...``; the driver adds it."""
    interface: str = field(default="", metadata=WRITTEN)
    """The network interface by which the node reaches the head."""
    address: str = field(default="", metadata=WRITTEN)
    """Its address there."""
    warnings: tuple[Problem, ...] = ()
    """What its Python lacks there, and no module of the job's ``imports`` needs."""


@dataclass(frozen=True)
class TidyAnswer(Answer):
    """The ranks' working directory on the node has been looked after."""

    event: ClassVar[str] = "tidy"
    left: bool = False
    """True if it is still there, with files in it."""
    unsent: bool = False
    """True if outputs are among them that no other node has sent."""


@dataclass(frozen=True)
class Ready(AgentEvent):
    """An agent waits for a file, or for permission to start its ranks.

    The driver keeps this to itself: no job's events have it.
    """

    event: ClassVar[str] = "ready"

    step: str = ""
    """The Slurm step that a file is to be sent to."""
    address: str = ""
    """The address at which the agent takes part in a relay."""
    port: int = 0
    """The port there."""
    switches: str = ""
    """The switches above the node from the top down, with dots between, where Slurm knows them."""


@dataclass(frozen=True)
class OutOfReach(AgentEvent):
    """A node cannot connect to some of those that it would take a file from.

    The driver keeps this to itself: no job's events have it.
    """

    event: ClassVar[str] = "out-of-reach"

    nodes: tuple[tuple[str, str], ...] = ()
    """Their names, with the reasons."""


@dataclass(frozen=True)
class Relaying(AgentEvent):
    """The file of a relay is still on its way to a node: the driver has asked.

    The driver keeps this to itself: no job's events have it.
    """

    event: ClassVar[str] = "relaying"


@dataclass(frozen=True)
class Unpacking(AgentEvent):
    """A node still unpacks: it makes progress, or hangs.

    The driver keeps this to itself: no job's events have it.
    """

    event: ClassVar[str] = "unpacking"

    hung: str = ""
    """The processes that hang, and what in; empty while it makes progress."""
    seconds: float = 0.0
    """Time since its last progress."""


@dataclass(frozen=True)
class Relayed(AgentEvent):
    """A relay has brought the file to a node, or has not.

    The driver keeps this to itself: no job's events have it.
    """

    event: ClassVar[str] = "relayed"

    seconds: float = 0.0
    """Time until the last byte had come."""
    failure: str = ""
    """Why the file did not come; empty if it did."""
    corrupt: tuple[str, ...] = ()
    """Those that sent damaged bytes."""
