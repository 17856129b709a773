"""The events of a job's driver: one class for each, the lines they become, and back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import field
from typing import ClassVar, Union

from . import messages
from .codec import AnyText, DecodeError, decode, encode
from .counts import format_count
from .dataclass import dataclass
from .enumerations import FailureClass, PhaseName, Retry
from .messages import (
    VERSION,
    AgentEvent,
    Answer,
    Departure,
    FailureRecord,
    Lingering,
    RankState,
    Vanished,
    WireMessage,
)
from .problem import Problem, ProblemCode


@dataclass(frozen=True)
class OutputLoss:
    """Output that is in no log; its size is known in bytes or in frames."""

    node: str = ""  # the node whose ranks wrote it
    rank: int | None = None
    """The rank that wrote it; null where that is unknown, or for the launcher."""
    why: AnyText = ""  # the reason, in words
    code: ProblemCode = ProblemCode.OUTPUT_LOST  # the kind of problem that it is
    bytes: int | None = None  # bytes that are lost, where they were counted
    frames: int | None = None  # frames of messages that are lost, where bytes were not counted

    def __str__(self) -> str:
        """Return the loss in words: ``rank 3 (120 bytes)``."""
        source = "the node's ranks" if self.rank is None else f"rank {self.rank}"
        frames = "some frames" if self.frames is None else format_count(self.frames, "frame")
        amount = f"{frames} of messages" if self.bytes is None else format_count(self.bytes, "byte")
        return f"{source} ({amount})"


@dataclass(frozen=True)
class StagingWork:
    """The work of one node for its environment."""

    sent: int  # bytes that are sent to it
    bytes: int  # bytes that it writes
    files: int  # files that it writes
    linked: int = 0  # files that it has already, and takes by hard link

    def __post_init__(self) -> None:
        if min(self.sent, self.bytes, self.files, self.linked) < 0:
            raise ValueError("a count is below zero")


@dataclass(frozen=True)
class PlannedGroup:
    """Nodes that get their environment in the same way."""

    nodes: tuple[str, ...]  # their names
    how: str
    """``present``: the environment is there; ``shared``: they read the bundle where it lies;
    ``relay``, ``sbcast`` and ``ssh``: it is sent to them."""
    bytes: int = 0  # size of the file that is sent
    layers: tuple[str, ...] = ()  # names of the layers in it: packages, the project and assets
    work: StagingWork | None = None
    """The work of each node; null if there is none, or it is not known."""


@dataclass(frozen=True)
class StagingForecast:
    """The expected time until the ranks run."""

    measured: bool  # true if the rates were measured on earlier jobs, and not assumed
    seconds: dict[str, float]  # seconds by phase, and ``total``


@dataclass(frozen=True)
class NodePair:
    """The network between two nodes, as ranks of both have measured it."""

    a: str  # one node
    b: str  # the other
    gb_per_s: float  # 10^9 bytes a second, one way
    latency_us: float  # microseconds that a few bytes take, one way


@dataclass(frozen=True)
class AllReduceMeasured:
    """The measurements of an all-reduce over all ranks."""

    world_size: int  # the number of ranks
    nodes: tuple[str, ...]  # the nodes, in the order of their ranks
    backend: str  # ``gloo`` or ``nccl``
    bytes: int  # size of the tensor
    seconds: float  # time that the all-reduce took
    gb_per_s: float  # bytes of the tensor by that time, in 10^9 bytes a second
    pairs: tuple[NodePair, ...]  # the pairs of nodes that were measured


@dataclass(frozen=True)
class ClockOffset:
    """A node's clock against the driver's, in seconds."""

    ahead: float  # seconds by which it is ahead; negative if it is behind
    give_or_take: float  # the uncertainty of that


@dataclass(frozen=True)
class DeepReport:
    """The measurements of ``verify --deep``."""

    connect_seconds: dict[str, float] | None = None
    """Time in which each node has connected to the head; absent where all are one machine."""
    clocks: dict[str, ClockOffset] | None = None
    """The clock of each node; absent where all are one machine."""
    all_reduce: AllReduceMeasured | None = None
    """The all-reduce; null where there was none, or it failed."""
    skipped: str = ""  # the reason why there was none; empty if there was one


# --- The events of a job's driver ----------------------------------------------------------------

# A line is one JSON object with ``v``, the job's id, the time, the phase it belongs to, ``event``,
# the name of a class here or of an agent's event, and that class's fields. ``events.<jobid>.jsonl``
# has all of them but the output of ranks, which has logs of its own.


@dataclass(frozen=True)
class DriverEvent(WireMessage):
    """An event of the driver's own."""

    event: ClassVar[str]

    def to_json(self) -> dict[str, object]:
        """Return the event as a JSON object."""
        return {"event": self.event, **encode(self)}


@dataclass(frozen=True)
class JobBegins(DriverEvent, event="job"):
    """The job has its nodes; the first event, also of each further attempt after a requeue."""

    nodes: tuple[str, ...] = ()  # its nodes, in order; the first one is the head
    log_dir: str = ""  # the directory of its logs
    cluster: AnyText = ""  # the name of its cluster; empty where it is not Slurm's
    bundle_id: str = ""  # the id of its bundle; empty in lines of older versions


@dataclass(frozen=True)
class PhaseBegins(DriverEvent, event="begin"):
    """A phase begins on all nodes."""

    phase: PhaseName  # the phase


@dataclass(frozen=True)
class PhaseEnds(DriverEvent, event="end"):
    """A phase has ended on all nodes."""

    phase: PhaseName  # the phase
    seconds: float = 0.0  # time that it took


@dataclass(frozen=True)
class TransferPlan(DriverEvent, event="plan"):
    """The decision how each node gets its environment."""

    why: str = ""  # the reason, in one line
    bytes: int = 0  # bytes of all files that are sent
    groups: tuple[PlannedGroup, ...] = ()  # the nodes, by the way in which they get it
    cpus: int = 0  # CPUs of each node that unpack
    forecast: StagingForecast | None = None  # the expected time; null in lines of older versions


@dataclass(frozen=True)
class FileSent(DriverEvent, event="sent"):
    """A file has reached nodes."""

    bytes: int = 0  # its size
    seconds: float = 0.0  # time that the sending took
    relayed: bool = False  # true if the nodes passed it on to each other


@dataclass(frozen=True)
class NodesLeftOut(DriverEvent, event="left-out"):
    """The job goes on without some nodes."""

    nodes: dict[str, tuple[AnyText, ...]] = field(default_factory=dict)
    """The problems of each of them, in words."""
    problems: dict[str, tuple[Problem, ...]] = field(default_factory=dict)
    """The same problems; none in lines of older versions."""


@dataclass(frozen=True)
class Remark(DriverEvent, event="note"):
    """A remark for the user."""

    text: AnyText = ""  # the remark
    warning: bool = False  # true if it matters also to those who want to read results only


@dataclass(frozen=True)
class StrayLines(DriverEvent, event="stray"):
    """Lines came through srun that no agent has written."""

    count: int = 0  # their number
    lines: tuple[AnyText, ...] = ()  # the first of them


@dataclass(frozen=True)
class FramesLost(DriverEvent, event="lost"):
    """Messages of an agent did not arrive, and were given up."""

    node: str = ""  # the agent's node
    task: str = ""  # the number of its task; empty where that is unknown
    frames: int = 0  # frames of messages that are missing
    unknown: int = 0  # messages that came from a node that the phase does not have


@dataclass(frozen=True)
class NodesLate(DriverEvent, event="late"):
    """Nodes go on though others have ended well long ago; their step is ended."""

    nodes: tuple[str, ...] = ()  # the nodes
    seconds: int = 0  # seconds since the first node had ended


@dataclass(frozen=True)
class RanksSilent(DriverEvent, event="silent"):
    """No rank has printed anything for a while; said again each time that has doubled."""

    seconds: float = 0.0
    """Time since the last output of any rank; since the start, where there was none."""
    usual: float | None = None
    """The longest pause between two outputs before; null where there were fewer than two."""
    rank: int | None = None  # the rank that printed last; null for the launcher, or where none has
    line: AnyText = ""  # the last line that it printed


@dataclass(frozen=True)
class Hang(DriverEvent, event="hang"):
    """The reason why silent ranks do not go on, as far as their processes and stacks show it."""

    kind: str = "unknown"
    """``stopped``: a process is stopped or dead. ``held``: the kernel holds one. ``behind``: ranks
    wait in a collective operation for one that has not entered it. ``mismatch``: ranks are in
    different operations. ``elsewhere``: a rank is at another place than most. ``network``: all
    ranks wait in the same operation. ``unknown``: none of these."""
    rank: int | None = None  # the rank at fault, the first of them; null if none is
    node: str = ""  # its node
    ranks: tuple[int, ...] = ()  # all ranks at fault
    waiting: int = 0  # the number of ranks that wait
    group: AnyText = ""  # the process group in which they wait
    operation: AnyText = ""  # the collective operation in which they wait: ``all_reduce``
    number: int = -1  # the number of that operation in its group; -1 if it is unknown
    place: AnyText = ""
    """The place in the program where the rank at fault is: ``loader.py:88 read_shard``."""
    text: AnyText = ""  # all of this in one sentence
    certain: bool = True
    """False while a rank at fault uses the CPU or its stack changes: it may work, and not hang."""
    ended: bool = False  # true if the job is ended for it, after ``launch.hang-timeout``


@dataclass(frozen=True)
class CompiledCode(DriverEvent, event="compiled"):
    """What ``torch.compile`` and Triton have made: used from earlier jobs, or brought back."""

    kind: str = ""  # the kind of nodes that it is for
    used_bytes: int = 0
    """Bytes of the code of earlier jobs that the nodes had at the start; 0 for none."""
    used_kernels: int = 0  # compiled functions in it: shared objects and GPU binaries
    used_from: tuple[AnyText, ...] = ()  # the jobs that have made it
    sent_to: tuple[str, ...] = ()  # the nodes that it was sent to; the others had it
    new_bytes: int = 0  # bytes of the code that was brought back from this job
    new_kernels: int = 0  # compiled functions in that
    first_step: float | None = None
    """Time from the start of the ranks to the first step that they printed; null where unknown."""
    first_step_before: float | None = None
    """The same of a job with this command that had no compiled code; null where unknown."""


@dataclass(frozen=True)
class FailedAttempt:
    """A start of the ranks that failed, and whether another one makes sense."""

    number: int  # its number, from 0: the ranks' ``STAGER_ATTEMPT``
    kind: FailureClass = field(metadata={"json": "class"})
    """The class of its failure, as far as the driver knows it."""
    cause: AnyText  # the failure: ``rank 3 on node02 was killed (signal 9)``
    retry: Retry  # whether to start the ranks again
    reason: AnyText  # the reason for that
    node: str = ""  # the node of the failure; empty if it is no node's
    rank: int | None = None  # the rank that failed; null if none did by itself
    progress: AnyText = ""
    """How far the ranks had come, by what they printed: ``step 120``; empty if unknown."""
    seconds: float = 0.0  # time from its start to its end


@dataclass(frozen=True)
class AttemptBegins(DriverEvent, event="attempt"):
    """The ranks are started again after a failure; the first start too where nodes are spare."""

    number: int = 0  # times that they were started before, in this allocation
    nodes: tuple[str, ...] = ()  # the nodes that get ranks, in the order of these
    spares: tuple[str, ...] = ()  # the nodes that get none, until one of the others fails
    failed: FailedAttempt | None = None  # the attempt before; null for the first one
    left_out: tuple[str, ...] = ()  # nodes of that attempt that have no ranks any more
    seconds: float = 0.0  # time since that attempt had ended


@dataclass(frozen=True)
class OutputsCollected(DriverEvent, event="collected"):
    """The outputs of a run directory that the nodes do not share have come back."""

    node: str = ""  # the node that they come from: that of rank 0
    others: tuple[str, ...] = ()
    """Other nodes, where ranks have written files that this one has not."""
    source: str = field(default="", metadata={"json": "from"})  # the directory there
    target: str = field(default="", metadata={"json": "to"})
    """The run directory that they were put into."""
    files: int = 0  # files that have come
    bytes: int = 0  # their bytes
    renamed: dict[str, AnyText] = field(default_factory=dict)
    """New names of files whose names were taken."""
    missing: tuple[AnyText, ...] = ()  # outputs that were asked for and are not there
    left_out: dict[str, AnyText] = field(default_factory=dict)
    """Files that did not come, and the reasons."""
    changed: dict[str, AnyText] = field(default_factory=dict)
    """Files that changed on the way, and the reasons."""
    problems: tuple[Problem, ...] = ()  # the reasons why something went wrong


@dataclass(frozen=True)
class JobEnds(DriverEvent, event="result"):
    """The end of the job: the last event."""

    ok: bool  # true if the job did all that it was to do
    interrupted: bool = False  # true if its user ended it
    ended_by: str = ""
    """The reason why Slurm ended the allocation, ``time-limit``; empty if it did not."""
    problems: dict[str, tuple[Problem, ...]] = field(default_factory=dict)
    """The problems of each node, and of the host of the driver, which need not be one of them."""
    of_driver: bool = False
    """True if the problem is the driver's own, also where its host is one of the nodes."""
    left_out: tuple[str, ...] = ()  # nodes that the job went on without
    logs_lost: tuple[OutputLoss, ...] = ()  # output of ranks that no log has
    logs_fault: AnyText = ""  # the reason why something could not be kept; empty while all is well
    bytes_broadcast: int = 0  # bytes that were sent to nodes
    seconds: dict[str, float] = field(default_factory=dict)  # time taken by phase
    send_seconds: float | None = None
    """Time in which files were sent, a part of the phase ``unpack``; null if none was."""
    unpack_seconds: float | None = None
    """The longest unpacking of a node, without its wait for bytes; null if none unpacked."""
    check_seconds: float | None = None
    """The longest check of an environment that a node had already."""
    plan: TransferPlan | None = None  # the decision how each node got its environment
    repaired: dict[str, Problem] | None = None
    """The damage of environments that was repaired, by node."""
    deep: DeepReport | None = None  # the measurements of ``verify --deep``
    world_size: int | None = None  # the number of ranks
    backend: str | None = None  # the backend of their process group
    exit_codes: dict[str, int] | None = None  # the exit status of each node's launcher
    task_codes: dict[str, int] | None = None
    """The exit status of each task of the launch, by its number."""
    failures: tuple[FailureRecord, ...] | None = None  # the ranks that failed
    tails: dict[str, tuple[AnyText, ...]] | None = None
    """The last lines of each node's output, after a failure."""
    stopped: tuple[str, ...] | None = None  # nodes whose launcher was told to end
    lingering: tuple[Lingering, ...] | None = None
    """Ranks that went on for too long, and still did at the end."""
    vanished: tuple[Vanished, ...] | None = None
    """Ranks that ended while others went on, with a status that nobody saw."""
    left: tuple[Departure, ...] | None = None
    """After a failure, ranks that had left or ended well, and that others may have missed."""
    notes: tuple[AnyText, ...] | None = None  # remarks for the user though nothing has failed
    hang: Hang | None = None  # the hang that the ranks were in when they were ended, or failed
    attempt: FailedAttempt | None = None  # the last start of the ranks, if it failed


@dataclass(frozen=True)
class OutputShown(AgentEvent, event="output"):
    """Output of ranks, as it is printed while the job runs."""

    rank: int | None = None  # the rank; null for the launcher, or the agent itself
    lines: tuple[AnyText, ...] = ()  # the output
    head: bool = False
    """True if it is the first node's; that of the first ranks, where ranks may move."""
    skipped: int = 0
    """Lines before these that are not shown, as the reader did not keep up; the logs have them."""


Event = Union[DriverEvent, AgentEvent]  # any event of a job
OF_DRIVER: tuple[type[DriverEvent], ...] = (
    *(JobBegins, PhaseBegins, PhaseEnds, TransferPlan, FileSent, NodesLeftOut, NodesLate),
    *(FramesLost, StrayLines, RanksSilent, Hang, AttemptBegins, OutputsCollected, CompiledCode),
    *(Remark, JobEnds),
)
OF_AGENTS: tuple[type[AgentEvent], ...] = (
    *(messages.PreflightAnswer, messages.Ready, messages.OutOfReach, messages.Heartbeat),
    *(messages.Relayed, messages.UnpackAnswer, messages.ProbeAnswer, messages.NodeClock),
    *(messages.DeepAnswer, messages.Started, messages.Lingering, messages.RanksEnded),
    *(messages.LaunchAnswer, messages.TidyAnswer, messages.CleanAnswer, OutputShown),
)
PRINTED_ONLY = (OutputShown,)  # events that are not kept in the file


# --- The file of the ranks' stacks, ``stacks.<jobid>.json`` ---------------------------------------


@dataclass(frozen=True)
class JobStacks:
    """Where all ranks of a job are, or were when they were last asked."""

    job_id: str  # the job's id
    time: float  # the time of it, in seconds since the epoch by the driver's clock
    silent: float  # time since the last output of any rank before
    nodes: dict[str, tuple[RankState, ...]] = field(default_factory=dict)
    """The ranks of each node, also those that gave no answer."""
    hang: Hang | None = None
    """The reason why they do not go on; null if they do, or it is not known."""
    ending: bool = False  # true if only ranks were asked that had been told to end, and had not
    nccl: AnyText = ""
    """What NCCL's RAS service (2.24 or newer) says of all ranks and communicators; empty if it does
    not answer within two seconds."""


# --- The line that an event becomes, and events read back from lines that may be damaged ---------

_KINDS: tuple[type[DriverEvent] | type[AgentEvent], ...] = (*OF_DRIVER, *OF_AGENTS)
_BY_NAME = {kind.event: kind for kind in _KINDS}
_LAST_TIME = 1e12  # no time since the epoch is as late as this


@dataclass(frozen=True)
class Record:
    """An event as a line has it."""

    event: Event  # the event
    job_id: str = ""  # the allocation's id, or one made up for a local job
    time: float | None = None
    """Seconds since the epoch, by the driver's clock; None in lines of older versions."""
    phase: str = ""  # the phase of an agent's event; empty for others

    def to_json(self) -> dict[str, object]:
        """Return the line as a JSON object."""
        phase = {"phase": self.phase} if self.phase else {}
        head = {"v": VERSION, "job_id": self.job_id, "time": self.time, **phase}
        return {**head, **self.event.to_json()}


def read_record(raw: object) -> Record | None:
    """Read a line decoded from JSON; None if it has no class here, or its main fields are damaged.

    It may be written by somebody hostile, or of another version: what cannot be used is left out.
    """
    if not isinstance(raw, Mapping):
        return None
    kind = _BY_NAME.get(_get_text(raw, "event"))
    if kind is None:
        return None
    try:
        output = _read_output_fast(raw) if kind is OutputShown else None
        event: Event = output or decode(kind, raw, strict=False)
    except (DecodeError, RecursionError):
        return None
    return Record(event, _get_text(raw, "job_id"), _get_time(raw), _get_text(raw, "phase"))


def _read_output_fast(raw: Mapping[str, object]) -> OutputShown | None:
    """Read output without the codec (a million lines are possible); None if it needs the codec."""
    node, rank = raw.get("node"), raw.get("rank")
    lines, head, skipped = raw.get("lines"), raw.get("head"), raw.get("skipped", 0)
    if not isinstance(node, str) or not isinstance(head, bool) or not isinstance(lines, list):
        return None
    if not (rank is None or type(rank) is int) or type(skipped) is not int:
        return None
    if not all(isinstance(line, str) for line in lines):
        return None
    return OutputShown(node, rank, tuple(lines), head, skipped)


def _get_text(raw: Mapping[str, object], key: str) -> str:
    value = raw.get(key)
    return value if isinstance(value, str) else ""


def _get_time(raw: Mapping[str, object]) -> float | None:
    value = raw.get("time")
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if abs(value) < _LAST_TIME else None


# --- The lines of agents, as their driver reads them: each is an event, or else output -----------

_OF_AGENTS: dict[str, type[AgentEvent]] = {
    **{kind.event: kind for kind in OF_AGENTS if kind is not OutputShown},
    messages.RankStates.event: messages.RankStates,  # kept in a file of its own, as JobStacks
}


@dataclass(frozen=True)
class RankOutput(AgentEvent, event="output"):
    """Output of a rank, of the launcher, or of an agent itself."""

    rank: int | None = None  # the rank; None for the launcher, or the agent itself
    data: bytes = b""  # the bytes
    of_ranks: bool = False
    """True if a rank or the launcher wrote it; only that is counted by agents."""


def find_answer_class(phase: str) -> type[Answer]:
    """Return the class of the answers to a phase."""
    kind = _OF_AGENTS.get(phase, Answer)
    return kind if issubclass(kind, Answer) else Answer


def read_agent_line(line: bytes, node: str, phase: str) -> AgentEvent:
    """Read a line of an agent's; one that is no event, as of a traceback, is its own output."""
    try:
        return _decode_event(line, node, phase)
    except (KeyError, RecursionError, TypeError, ValueError):  # a DecodeError is a ValueError
        return RankOutput(node, data=line + b"\n")


def _decode_event(line: bytes, node: str, phase: str) -> AgentEvent:
    raw = json.loads(line)
    if not isinstance(raw, dict) or raw.pop("v", None) != VERSION:
        raise ValueError("it is no event of this version")
    name = raw.pop("event")
    if name == RankOutput.event:
        rank = raw["rank"]
        if rank is not None and type(rank) is not int:
            raise ValueError("its rank is not a whole number")
        return RankOutput(node, rank, messages.decode_output(raw), of_ranks=True)
    kind = _OF_AGENTS[phase if name == PhaseName.SESSION else name]
    return decode(kind, {**raw, "node": node})
