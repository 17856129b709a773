"""The events of a job's driver: one class for each, and the line that each becomes.

A line is one JSON object with ``v``, the job's id, the time, the phase it belongs to, ``event``,
the name of a class here or of an agent's event, and that class's fields. ``events.<jobid>.jsonl``
has all of them but the output of ranks, which has logs of its own; ``docs/events.md`` lists them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Union

from . import answers, clean_answers, deep_answers, launch_answers
from .answers import AgentEvent
from .codec import REQUIRED, encode
from .deep_report import DeepReport
from .enumerations import PhaseName
from .json_values import AnyText
from .launch_answers import Departure, FailureRecord, Lingering, Vanished
from .output_loss import OutputLoss
from .planned_transfer import PlannedGroup, StagingForecast
from .problem import Problem


@dataclass(frozen=True)
class DriverEvent:
    """An event of the driver's own."""

    event: ClassVar[str]
    """Its name in a line."""

    def to_json(self) -> dict[str, object]:
        """Return the event as a JSON object, without the fields that have their default."""
        return {"event": self.event, **encode(self, short=True)}


@dataclass(frozen=True)
class JobBegins(DriverEvent):
    """The job has its nodes; the first event, also of each further attempt after a requeue."""

    event: ClassVar[str] = "job"

    nodes: tuple[str, ...] = field(default=(), metadata=REQUIRED)
    """Its nodes, in order; the first one is the head."""
    log_dir: str = field(default="", metadata=REQUIRED)
    """The directory of its logs."""
    cluster: AnyText = ""
    """The name of its cluster; empty where it is not Slurm's."""
    bundle_id: str = ""
    """The id of its bundle; empty in lines of older versions."""


@dataclass(frozen=True)
class PhaseBegins(DriverEvent):
    """A phase begins on all nodes."""

    event: ClassVar[str] = "begin"

    phase: PhaseName
    """The phase."""


@dataclass(frozen=True)
class PhaseEnds(DriverEvent):
    """A phase has ended on all nodes."""

    event: ClassVar[str] = "end"

    phase: PhaseName
    """The phase."""
    seconds: float = field(default=0.0, metadata=REQUIRED)
    """Time that it took."""


@dataclass(frozen=True)
class TransferPlan(DriverEvent):
    """The decision how each node gets its environment."""

    event: ClassVar[str] = "plan"

    why: str = field(default="", metadata=REQUIRED)
    """The reason, in one line."""
    bytes: int = field(default=0, metadata=REQUIRED)
    """Bytes of all files that are sent."""
    groups: tuple[PlannedGroup, ...] = field(default=(), metadata=REQUIRED)
    """The nodes, by the way in which they get it."""
    cpus: int = field(default=0, metadata=REQUIRED)
    """CPUs of each node that unpack."""
    forecast: StagingForecast | None = field(default=None, metadata=REQUIRED)
    """The expected time; null in lines of older versions."""


@dataclass(frozen=True)
class FileSent(DriverEvent):
    """A file has reached nodes."""

    event: ClassVar[str] = "sent"

    bytes: int = field(default=0, metadata=REQUIRED)
    """Its size."""
    seconds: float = field(default=0.0, metadata=REQUIRED)
    """Time that the sending took."""
    relayed: bool = False
    """True if the nodes passed it on to each other."""


@dataclass(frozen=True)
class NodesLeftOut(DriverEvent):
    """The job goes on without some nodes."""

    event: ClassVar[str] = "left-out"

    nodes: dict[str, tuple[AnyText, ...]] = field(default_factory=dict, metadata=REQUIRED)
    """The problems of each of them, in words."""
    problems: dict[str, tuple[Problem, ...]] = field(default_factory=dict)
    """The same problems; none in lines of older versions."""


@dataclass(frozen=True)
class Remark(DriverEvent):
    """A remark for the user."""

    event: ClassVar[str] = "note"

    text: AnyText = field(default="", metadata=REQUIRED)
    """The remark."""
    warning: bool = False
    """True if it matters also to those who want to read results only."""


@dataclass(frozen=True)
class StrayLines(DriverEvent):
    """Lines came through srun that no agent has written."""

    event: ClassVar[str] = "stray"

    count: int = field(default=0, metadata=REQUIRED)
    """Their number."""
    lines: tuple[AnyText, ...] = field(default=(), metadata=REQUIRED)
    """The first of them."""


@dataclass(frozen=True)
class FramesLost(DriverEvent):
    """Messages of an agent did not arrive, and were given up."""

    event: ClassVar[str] = "lost"

    node: str = field(default="", metadata=REQUIRED)
    """The agent's node."""
    task: str = field(default="", metadata=REQUIRED)
    """The number of its task; empty where that is unknown."""
    frames: int = field(default=0, metadata=REQUIRED)
    """Frames of messages that are missing."""
    unknown: int = 0
    """Messages that came from a node that the phase does not have."""


@dataclass(frozen=True)
class NodesLate(DriverEvent):
    """Nodes go on though others have ended well long ago; their step is ended."""

    event: ClassVar[str] = "late"

    nodes: tuple[str, ...] = field(default=(), metadata=REQUIRED)
    """The nodes."""
    seconds: int = field(default=0, metadata=REQUIRED)
    """Seconds since the first node had ended."""


@dataclass(frozen=True)
class OutputsCollected(DriverEvent):
    """The outputs of a run directory that the nodes do not share have come back."""

    event: ClassVar[str] = "collected"

    node: str = field(default="", metadata=REQUIRED)
    """The node that they come from: that of rank 0."""
    others: tuple[str, ...] = ()
    """Other nodes, where ranks have written files that this one has not."""
    source: str = field(default="", metadata={"json": "from", **REQUIRED})
    """The directory there."""
    target: str = field(default="", metadata={"json": "to", **REQUIRED})
    """The run directory that they were put into."""
    files: int = field(default=0, metadata=REQUIRED)
    """Files that have come."""
    bytes: int = field(default=0, metadata=REQUIRED)
    """Their bytes."""
    renamed: dict[str, AnyText] = field(default_factory=dict, metadata=REQUIRED)
    """New names of files whose names were taken."""
    missing: tuple[AnyText, ...] = field(default=(), metadata=REQUIRED)
    """Outputs that were asked for and are not there."""
    left_out: dict[str, AnyText] = field(default_factory=dict, metadata=REQUIRED)
    """Files that did not come, and the reasons."""
    changed: dict[str, AnyText] = field(default_factory=dict, metadata=REQUIRED)
    """Files that changed on the way, and the reasons."""
    problems: tuple[Problem, ...] = field(default=(), metadata=REQUIRED)
    """The reasons why something went wrong."""


@dataclass(frozen=True)
class JobEnds(DriverEvent):
    """The end of the job: the last event."""

    event: ClassVar[str] = "result"

    ok: bool
    """True if the job did all that it was to do."""
    interrupted: bool = field(default=False, metadata=REQUIRED)
    """True if its user ended it."""
    ended_by: str = field(default="", metadata=REQUIRED)
    """The reason why Slurm ended the allocation, ``time-limit``; empty if it did not."""
    problems: dict[str, tuple[Problem, ...]] = field(default_factory=dict, metadata=REQUIRED)
    """The problems of each node, and of the host of the driver, which need not be one of them."""
    of_driver: bool = False
    """True if the problem is the driver's own, also where its host is one of the nodes."""
    left_out: tuple[str, ...] = field(default=(), metadata=REQUIRED)
    """Nodes that the job went on without."""
    logs_lost: tuple[OutputLoss, ...] = field(default=(), metadata=REQUIRED)
    """Output of ranks that no log has."""
    logs_fault: AnyText = field(default="", metadata=REQUIRED)
    """The reason why something could not be kept; empty while all is well."""
    bytes_broadcast: int = field(default=0, metadata=REQUIRED)
    """Bytes that were sent to nodes."""
    seconds: dict[str, float] = field(default_factory=dict, metadata=REQUIRED)
    """Time taken by phase."""
    send_seconds: float | None = None
    """Time in which files were sent, a part of the phase ``unpack``; null if none was."""
    unpack_seconds: float | None = None
    """The longest unpacking of a node, without its wait for bytes; null if none unpacked."""
    check_seconds: float | None = None
    """The longest check of an environment that a node had already."""
    plan: TransferPlan | None = None
    """The decision how each node got its environment."""
    repaired: dict[str, Problem] | None = None
    """The damage of environments that was repaired, by node."""
    deep: DeepReport | None = None
    """The measurements of ``verify --deep``."""
    world_size: int | None = None
    """The number of ranks."""
    backend: str | None = None
    """The backend of their process group."""
    exit_codes: dict[str, int] | None = None
    """The exit status of each node's launcher."""
    task_codes: dict[str, int] | None = None
    """The exit status of each task of the launch, by its number."""
    failures: tuple[FailureRecord, ...] | None = None
    """The ranks that failed."""
    tails: dict[str, tuple[AnyText, ...]] | None = None
    """The last lines of each node's output, after a failure."""
    stopped: tuple[str, ...] | None = None
    """Nodes whose launcher was told to end."""
    lingering: tuple[Lingering, ...] | None = None
    """Ranks that went on for too long, and still did at the end."""
    vanished: tuple[Vanished, ...] | None = None
    """Ranks that ended while others went on, with a status that nobody saw."""
    left: tuple[Departure, ...] | None = None
    """After a failure, ranks that had left or ended well, and that others may have missed."""
    notes: tuple[AnyText, ...] | None = None
    """Remarks for the user though nothing has failed."""


@dataclass(frozen=True)
class OutputShown(AgentEvent):
    """Output of ranks, as it is printed while the job runs."""

    event: ClassVar[str] = "output"

    rank: int | None = None
    """The rank; null for the launcher, or the agent itself."""
    lines: tuple[AnyText, ...] = field(default=(), metadata=REQUIRED)
    """The output."""
    head: bool = field(default=False, metadata=REQUIRED)
    """True if it is the first node's; that of the first ranks, where ranks may move."""
    skipped: int = 0
    """Lines before these that are not shown, as the reader did not keep up; the logs have them."""


Event = Union[DriverEvent, AgentEvent]
"""Any event of a job."""
OF_DRIVER: tuple[type[DriverEvent], ...] = (
    JobBegins,
    PhaseBegins,
    PhaseEnds,
    TransferPlan,
    FileSent,
    NodesLeftOut,
    NodesLate,
    FramesLost,
    StrayLines,
    OutputsCollected,
    Remark,
    JobEnds,
)
OF_AGENTS: tuple[type[AgentEvent], ...] = (
    answers.PreflightAnswer,
    answers.Ready,
    answers.OutOfReach,
    answers.Relaying,
    answers.Unpacking,
    answers.Relayed,
    answers.UnpackAnswer,
    answers.ProbeAnswer,
    deep_answers.NodeClock,
    deep_answers.DeepAnswer,
    launch_answers.Started,
    launch_answers.Lingering,
    launch_answers.RanksEnded,
    launch_answers.LaunchAnswer,
    answers.TidyAnswer,
    clean_answers.CleanAnswer,
    OutputShown,
)
PRINTED_ONLY = (OutputShown,)
"""Events that are not kept in the file."""
