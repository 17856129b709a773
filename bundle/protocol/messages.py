"""Messages between the driver and a node's agent: requests, answers, facts and output."""

from __future__ import annotations

import base64
import binascii
import json
import zlib
from collections.abc import Mapping
from dataclasses import field
from typing import ClassVar, TypeVar

from .codec import AnyText, DecodeError, decode, encode
from .dataclass import dataclass
from .digest import Digest
from .job import Job
from .problem import NodeError, Problem, ProblemCode

VERSION = 1  # version of the protocol between a driver and its agents


class WireMessage:
    """A message; its class gives its name: ``class Ready(AgentEvent, event="ready")``."""

    def __init_subclass__(cls, **name: str) -> None:
        for key, value in name.items():
            setattr(cls, key, value)


# --- Output of ranks in JSON events --------------------------------------------------------------

# ``{"event": "output", "rank": 3, "text": "..."}``; for bytes that are not UTF-8 ``"base64"`` is in
# place of ``"text"``, or ``"zlib"``, in base64, where that saves a quarter: what travels through
# ``srun`` costs more time than compressing it does.

_WORTH_BYTES = 1 << 12  # bytes from which on output is compressed
_MOST_BYTES = 1 << 24  # bytes that one event may hold, many times what an agent sends at once


def make_output_line(node: str, rank: int | None, data: bytes) -> bytes:
    """Return output of a rank, or of the launcher (None), as a line of JSON without its end."""
    event = {"v": VERSION, "node": node, "event": "output", "rank": rank, **_encode_output(data)}
    return json.dumps(event, ensure_ascii=False).encode()


def _encode_output(data: bytes) -> dict[str, str]:
    if len(data) >= _WORTH_BYTES:
        packed = binascii.b2a_base64(zlib.compress(data, 1), newline=False)
        if len(packed) < len(data) * 3 // 4:
            return {"zlib": packed.decode("ascii")}
    try:
        return {"text": data.decode()}
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(data).decode("ascii")}


def decode_output(event: Mapping[str, object]) -> bytes:
    """Return the bytes that an event holds; KeyError, ValueError: none, or too many."""
    if "base64" in event:
        return base64.b64decode(str(event["base64"]))
    if "zlib" not in event:
        return str(event["text"]).encode(errors="replace")
    reader = zlib.decompressobj()
    try:
        data = reader.decompress(binascii.a2b_base64(str(event["zlib"])), _MOST_BYTES)
    except zlib.error as exc:
        raise ValueError(str(exc)) from exc
    if not reader.eof:
        raise ValueError("the output is cut off, or too long")
    return data


def split_lines(data: bytes) -> list[str]:
    """Return output as lines of text."""
    return data.decode(errors="replace").removesuffix("\n").split("\n") if data else []


@dataclass(frozen=True)
class NodeRootFacts:
    """A directory, and the file system that it is on."""

    path: str  # the directory
    fstype: str  # type of the file system
    free_bytes: int  # bytes that this user may still write there
    free_inodes: int | None  # files that may still be made there; None for any number
    noexec: bool  # true if no program can be started from there
    read_only: bool  # true if nothing can be written there
    shared: bool  # true if other machines see the same file system
    owner: int  # the user that owns it
    mode: str  # its mode in octal, ``0700``


@dataclass(frozen=True)
class NodeRootProblem:
    """A directory that cannot be examined."""

    path: str  # the directory
    problem: str  # the reason


@dataclass(frozen=True)
class Gpu:
    """One NVIDIA GPU."""

    name: str  # its kind: ``NVIDIA A100-SXM4-80GB``
    memory: int = 0  # bytes of its memory; 0 where that is unknown
    mig: tuple[str, ...] = ()  # the profiles of its MIG instances: ``3g.20gb``


@dataclass(frozen=True)
class GpuFacts:
    """The NVIDIA driver of a machine, and its GPUs."""

    driver: str = ""  # version of the driver: ``570.124.06``; empty where that is unknown
    library: str = ""
    """Version of the driver's library that LD_LIBRARY_PATH puts first; empty for the driver's."""
    gpus: tuple[Gpu, ...] = ()  # the GPUs that can be seen
    fault: str = ""
    """What ``nvidia-smi`` says of a driver that does not work; empty for one that does."""


@dataclass(frozen=True)
class HostFacts:
    """Everything about a machine that may trouble a job."""

    hostname: str  # its own name
    kernel: str  # release of the kernel
    machine: str  # processor architecture as ``uname -m`` prints it
    libc: str  # ``glibc``, ``musl`` or ``unknown``
    libc_version: str  # version of the C library
    python: str  # version of the interpreter that the agent runs under
    cpus: int  # CPUs that this job may use
    memory_total: int  # bytes of memory, within the job's limit
    memory_available: int  # bytes of it that are free
    gpus: int  # GPUs that this job may use
    shm_free: int | None  # bytes free in /dev/shm; None where there is none
    clock: float  # its clock, in seconds since the epoch
    node_root: NodeRootFacts | NodeRootProblem | None
    """The directory of the node root; None if there is none."""


# --- The requests that a node's agent is asked with, one class a phase ---------------------------

# A request is one JSON object with ``v``, the version, ``phase`` and the fields of its class. In a
# step of Slurm's, whose tasks all get the same bytes, those of all nodes are one StepMessage.

_T = TypeVar("_T")


@dataclass(frozen=True)
class AgentRequest(WireMessage):
    """The part that all requests have."""

    phase: ClassVar[str]

    job: Job
    node: str
    node_rank: int  # its rank among the job's nodes, from 0
    nodes_here: int  # the number of nodes that share one machine

    def to_json(self) -> dict[str, object]:
        """Return the request as a JSON object."""
        return {"v": VERSION, "phase": self.phase, **encode(self)}


@dataclass(frozen=True)
class PlacedRequest(AgentRequest):
    """A request to a node whose node root and interpreter the preflight has found."""

    root: str
    python: str  # the interpreter for the environment; empty for the bundle's own


class EarlyRequest(AgentRequest, phase="early"):
    """Start the launcher before all other phases; there is no answer."""


@dataclass(frozen=True)
class PreflightRequest(AgentRequest, phase="preflight"):
    """Report everything that could stop the job; without a bundle only ``marker`` is known."""

    marker: str = ""  # name of a file in the run directory, by which a node knows it
    attempt: int = 0  # times that the ranks were started before: each has a port of its own
    heads: tuple[str, ...] = ()  # digest of the head of each layer of the bundle
    room: tuple[tuple[int, int], ...] | None = None  # bytes and inodes that each layer takes
    own_room: tuple[int, int] = (0, 0)  # bytes and inodes that an environment takes besides
    size: int = 0  # bytes of the bundle
    wheel: tuple[str, int] | None = None  # name and size of the bundle's decompressor
    code: dict[str, tuple[AnyText, ...]] | None = None  # some paths of each kind's compiled code


@dataclass(frozen=True)
class RelayTask:
    """A node's part in a relay."""

    token: str  # the random token of this transfer, in hexadecimal digits
    address: str  # the address of this node that others reach


@dataclass(frozen=True)
class Incoming:
    """A file that is sent to a node."""

    target: str  # its path there
    manifest: str | None  # the bundle's manifest, where the file has only a part of the bundle
    members: tuple[str, ...]  # the members of the bundle that the file has then
    size: int
    relay: RelayTask | None = None  # given if the nodes pass the file on; else ``sbcast`` brings it
    results: bool = False  # true for earlier results, for the ranks' directory
    code: str = ""  # the kind of node that it is compiled code for; empty for anything else


@dataclass(frozen=True)
class UnpackRequest(PlacedRequest, phase="unpack"):
    """Make the environment, from a bundle that the node sees or a file that is sent to it."""

    bundle: str = ""  # the bundle's path, unless a file is sent
    checked: bool = False  # true if the preflight has just found the environment undamaged
    incoming: Incoming | None = None  # the file that is sent


@dataclass(frozen=True)
class ProbeRequest(PlacedRequest, phase="probe"):
    """Let the environment describe itself."""

    head: str  # address of the head node


@dataclass(frozen=True)
class DeepRequest(PlacedRequest, phase="deep"):
    """Check the node thoroughly."""

    head: tuple[str, int] | None = None  # address and port of the head; None on one machine
    names: dict[str, tuple[str, ...]] | None = None  # the driver's addresses of each node


@dataclass(frozen=True)
class GroupSettings:
    """The meeting point of the ranks, and what is the same for all of them."""

    address: str  # address of the head node; the port is there, too
    port: int
    backend: str  # ``gloo`` or ``nccl``
    nproc: int  # ranks on each node
    on_cpus: bool = False  # true if ranks must not use GPUs, since some node has none


@dataclass(frozen=True)
class LaunchRequest(PlacedRequest, phase="launch"):
    """Start the ranks, and follow them to their end."""

    group: GroupSettings
    shared: bool  # true if the nodes share the run directory
    own: bool = False  # true if the program is ours, and not the user's
    limit: float | None = None  # seconds after which the ranks are told to end; None: no limit
    hold: bool = False  # true to report ``ready``, and wait for a word before a rank begins
    attempt: int = 0  # times that the driver has started the ranks before
    code: str = ""  # name of the directory for compiled code; empty for none
    removes_code: bool = False  # true to remove that directory at the end: a rank has crashed


@dataclass(frozen=True)
class CollectRequest(PlacedRequest, phase="collect"):
    """Send the job's outputs, as a stream of bytes."""

    directory: str  # the directory that they are in
    brought: tuple[AnyText, ...] | None = None  # outputs that need not be sent; None: send all
    code: str = ""  # name of the directory with compiled code to send instead; empty for none
    since: float = 0.0  # only compiled code of a later time is sent, in seconds since the epoch
    unchanged_seconds: float = 0.0  # only compiled code is sent that was not written to for so long


@dataclass(frozen=True)
class TidyRequest(PlacedRequest, phase="tidy"):
    """Remove the ranks' working directory on a node that does not share the run directory."""

    keep_files: bool = False  # true to leave it where there are files in it
    brought: tuple[AnyText, ...] | None = None  # a directory with more than these is left, if any


class CleanRequest(AgentRequest, phase="clean"):
    """Remove the environments that nobody uses."""


REQUESTS: dict[str, type[AgentRequest]] = {
    kind.phase: kind
    for kind in (
        *(EarlyRequest, PreflightRequest, UnpackRequest, ProbeRequest, DeepRequest, LaunchRequest),
        *(CollectRequest, TidyRequest, CleanRequest),
    )
}
"""The class of a request by its phase."""


@dataclass(frozen=True)
class StepMessage(WireMessage):
    """The requests of the nodes of a step as one, with what all of them have written once."""

    phase: str
    common: dict[str, object]  # fields of all requests; without the job that agents know
    own: dict[str, dict[str, object]]  # by node, the fields that only its request has
    nodes: tuple[str, ...] | None = None  # the nodes that are asked; None for all of the step
    v: int = VERSION


@dataclass(frozen=True)
class Handover(WireMessage):
    """A request that an agent passes on to itself under another interpreter."""

    request: dict[str, object]
    in_step: bool  # true in a step of Slurm's
    frames_sent: int  # the number of frames that the agent had sent


RELAY_SOURCE = "the source"  # the name of the driver's host in a relay


@dataclass(frozen=True)
class RelayStart(WireMessage):
    """The beginning of a relay. Each node asks its source for the places that it must know."""

    port: int  # the port of the source on the driver's host
    nodes: int  # the number of nodes that take part
    left_out: tuple[str, ...] = ()  # nodes that take no part: they were late, or are lost


@dataclass(frozen=True)
class FramesAgain(WireMessage):
    """A question of the driver's for frames that it has not received."""

    again: dict[str, tuple[tuple[int, int], ...]]  # by source, the first and last missing number


class RequestReader:
    """Reads the requests that come to one agent."""

    def __init__(self, node: str) -> None:
        self.in_step = False  # true in a step of Slurm's
        self.handed_over = False  # true if the agent was started under this interpreter by itself
        self.frames_sent = 0  # the number of frames that it had sent before
        self._node = node
        self._job: object = None  # the job of the last message, as JSON

    def first(self, raw: object) -> AgentRequest:
        """Read the first request; NodeError if it is of another version, or a field is wrong."""
        fields = raw if isinstance(raw, dict) else {}
        if "handover" in fields:
            handover = _decode_message(Handover, fields["handover"])
            self.in_step, self.frames_sent = handover.in_step, handover.frames_sent
            self.handed_over = True
            self._job = handover.request.get("job")
            return self._decode_request(handover.request)
        self.in_step = "common" in fields
        request = self.next(raw)
        if request is None:
            raise _make_error("nodes", f"{self._node} is not asked")
        return request

    def next(self, raw: object) -> AgentRequest | None:
        """Read a further request, as :meth:`first` does; return None for one to other nodes."""
        if not self.in_step:
            return self._decode_request(raw)
        message = _decode_message(StepMessage, raw)
        self._job = message.common.get("job", self._job)  # it may be new in one to other nodes
        if message.nodes is not None and self._node not in message.nodes:
            return None
        rank = Job.from_json(self._job).nodes.index(self._node)
        head = {"v": message.v, "phase": message.phase, "job": self._job}
        own = _merge_fields(message.common, message.own.get(self._node, {}))
        return self._decode_request({**own, **head, "node": self._node, "node_rank": rank})

    def _decode_request(self, raw: object) -> AgentRequest:
        if not isinstance(raw, dict):
            raise _make_error("", "it is not an object")
        fields = {"v": None, "phase": "", **raw}
        version, phase = fields.pop("v"), str(fields.pop("phase"))
        if version != VERSION:
            raise _make_error("v", f"version {version!r}, this program speaks {VERSION}")
        if phase not in REQUESTS:
            raise _make_error("phase", f"{phase!r} is none of {', '.join(REQUESTS)}")
        return _decode_message(REQUESTS[phase], fields)


def _merge_fields(common: dict[str, object], own: Mapping[str, object]) -> dict[str, object]:
    """Merge the fields of a request; a value may have its own fields in both parts."""
    merged = dict(common)
    for name, value in own.items():
        shared = common.get(name)
        has_both = isinstance(shared, dict) and isinstance(value, dict)
        merged[name] = _merge_fields(shared, value) if has_both else value  # type: ignore[arg-type]
    return merged


def _decode_message(kind: type[_T], raw: object) -> _T:
    try:
        return decode(kind, raw)
    except DecodeError as exc:
        raise _make_error(exc.path, exc.reason) from exc


def _make_error(where: str, why: str) -> NodeError:
    return NodeError(Problem(ProblemCode.REQUEST_UNREADABLE, where, {"why": why}))


# --- The events of a node's agent: each is one JSON object with ``v``, ``event`` and its fields --


@dataclass(frozen=True)
class AgentEvent(WireMessage):
    """An event of a node's agent."""

    event: ClassVar[str] = ""

    node: str = ""  # the node's name

    def to_json(self) -> dict[str, object]:
        """Return the event as a JSON object."""
        return {"v": VERSION, "event": self.event, **encode(self)}


@dataclass(frozen=True)
class Answer(AgentEvent):
    """A node's answer to a phase."""

    ok: bool = True  # true if the node has done its part
    seconds: float = 0.0  # time that it took
    problems: tuple[Problem, ...] = ()  # everything that keeps the node from running the job
    exit_code: int | None = None
    """Exit status of a launch; of a node that gave no answer, that of its agent."""
    task: int | None = None
    """The number of the task that answers, where Slurm starts several on a node."""
    tasks: int = 1  # the number of tasks whose answers these are
    lost: bool = False  # true if the node gave no answer, and the driver made up this one
    unreachable: bool = False  # true if no rank has begun anywhere because none could begin here


@dataclass(frozen=True)
class CodeFacts:
    """The kind of a node, as far as compiled code depends on it, and what the node has of it."""

    kind: Digest
    """Digest of the job's software and of its processor features, GPUs, driver and compiler."""
    machine: AnyText  # the kind in words: ``x86_64, Intel(R) Xeon(R) ...``
    has_all: bool  # true if it has the compiled code that it was asked for
    compiler: AnyText
    """Its C++ compiler, without which PyTorch compiles nothing for CPUs; empty if it has none."""


@dataclass(frozen=True)
class CodeAmount:
    """The compiled code on a node after the ranks have ended."""

    begun: float  # the node's time when they began
    new: int  # files that were written since then
    new_bytes: int  # bytes in them
    total: int  # all files
    total_bytes: int  # bytes in them


@dataclass(frozen=True)
class PreflightAnswer(Answer, event="preflight"):
    """Everything about a node that matters before anything is sent to it."""

    root: str = ""  # the node root; empty if no directory fits
    python: str = ""
    """An interpreter for the environment; empty if there is none, or the bundle has its own."""
    address: str = ""  # address at which the others reach the node; empty if none is known
    port: int = 0  # free port that it has as the head; 0 if it cannot be the head
    no_head: Problem | None = None
    """Why it cannot be the head; its address is then that of its way to the driver's host."""
    loopback: str = ""
    """The loopback address at which ``ssh`` has reached it: the machine that ``ssh`` came from."""
    proj: bool = False  # true if the node sees the run directory
    pkgs: bool = False  # true if the node has the environment, or can read the bundle
    ready: bool = False  # true if it has the environment, undamaged
    rate: float | None = None
    """Bytes a second at which it reads the bundle; None if it cannot, or need not."""
    check_seconds: float = 0.0  # time that the check of the environment took
    damage: Problem | None = None  # the damage of its environment
    lacks: tuple[int, ...] | None = None
    """The numbers of the layers that no environment there has; None if that is unknown."""
    has_wheel: bool = False
    """True if an environment there has the bundle's decompressor, or none is needed."""
    host: HostFacts | None = None  # the machine
    gpus: GpuFacts | None = None  # its NVIDIA driver and GPUs; None where there is no such driver
    unchecked: str = ""
    """Why it could not check the bundle's signature; empty if it has, or none is required."""
    code: CodeFacts | None = None  # facts for compiled code; None if none is used


@dataclass(frozen=True)
class UnpackAnswer(Answer, event="unpack"):
    """The environment that a node has made, or had already."""

    path: str = ""  # the environment's directory
    reused: bool = False  # true if it was there already
    files_linked: int = 0  # files that were taken from older environments by hard link
    files_written: int = 0  # files that were written from the bundle
    unpack_seconds: float | None = None
    """Time that the unpacking took, without the wait for bytes; None where nothing was unpacked."""
    mended: Problem | None = None  # the damage of the environment that was there before
    lacking: bool = False
    """True if layers that were not sent are missing: an older environment has been removed."""
    arrived: Digest | None = None
    """Of a damaged file that was sent, the digest of the bytes that arrived."""


@dataclass(frozen=True)
class ProbeAnswer(Answer, event="probe"):
    """An environment, as its own Python describes it."""

    python: str = ""  # its full version
    prefix: str = ""  # its ``sys.prefix``
    packages: dict[str, str | None] = field(default_factory=dict)
    """Version of each package that was asked for; None for one that is missing."""
    origins: dict[str, str] = field(default_factory=dict)  # file or directory of each module
    origin_ok: bool = False  # true if every module comes from the environment
    line: AnyText = ""
    """The line that people look for: ``NODE hpc09 OK -> ...``; the driver adds it."""
    interface: str = ""  # the network interface by which the node reaches the head
    address: str = ""  # its address there
    warnings: tuple[Problem, ...] = ()
    """What its Python lacks there, and no module of the job's ``imports`` needs."""


@dataclass(frozen=True)
class TidyAnswer(Answer, event="tidy"):
    """The ranks' working directory on the node has been looked after."""

    left: bool = False  # true if it is still there, with files in it
    unsent: bool = False  # true if outputs are among them that no other node has sent


@dataclass(frozen=True)
class Ready(AgentEvent, event="ready"):
    """An agent waits for a file, or for permission to start its ranks."""

    step: str = ""  # the Slurm step that a file is to be sent to
    address: str = ""  # the address at which the agent takes part in a relay
    port: int = 0  # the port there
    switches: str = ""
    """The switches above the node from the top down, with dots between, where Slurm knows them."""


@dataclass(frozen=True)
class OutOfReach(AgentEvent, event="out-of-reach"):
    """A node cannot connect to some of those that it would take a file from."""

    nodes: tuple[tuple[str, str], ...] = ()  # their names, with the reasons


@dataclass(frozen=True)
class Heartbeat(AgentEvent, event="heartbeat"):
    """A node is alive, but what it does hangs; a heartbeat of any other node is empty."""

    hung: str = ""  # the processes that hang, and what in
    seconds: float = 0.0  # time since their last progress


@dataclass(frozen=True)
class Relayed(AgentEvent, event="relayed"):
    """A relay has brought the file to a node, or has not."""

    seconds: float = 0.0  # time until the last byte had come
    failure: str = ""  # why the file did not come; empty if it did
    corrupt: tuple[str, ...] = ()  # those that sent damaged bytes


# --- A node's report on its ranks ----------------------------------------------------------------


@dataclass(frozen=True)
class Started(AgentEvent, event="started"):
    """The ranks of a node are about to begin."""

    argv: tuple[AnyText, ...] = ()
    """The command that starts them, without secrets; empty where it is that of a node before, but
    for the rank and the address of the node."""
    interface: str = ""  # the network interface by which they reach the head


@dataclass(frozen=True)
class Lingering(AgentEvent, event="lingering"):
    """A rank whose process goes on for too long; times are in seconds since the epoch."""

    rank: int = 0  # the rank
    finished: float | None = None  # the time when its program had finished; None if it has not
    left: float | None = None  # the time when it had left its process group; None if it has not
    waits_for: tuple[AnyText, ...] = ()  # names of the threads and processes that keep it


class RanksEnded(AgentEvent, event="ranks-ended"):
    """The ranks of a node have ended well, and their launcher still waits for other nodes."""


@dataclass(frozen=True)
class ThreadStack:
    """The Python stack of one thread of a rank."""

    name: AnyText  # its name, or its number in hexadecimal digits
    frames: tuple[AnyText, ...] = ()  # ``/path/file.py:88 read_shard``, the innermost first


@dataclass(frozen=True)
class CollectiveState:
    """How far a rank is in the collectives of one process group of PyTorch's."""

    group: AnyText  # the group's description, or its name
    ranks: tuple[int, ...] = ()  # the global ranks of the group; empty for all ranks of the job
    enqueued: int = -1
    """The number of the last collective that the rank has enqueued; -1 if unknown."""
    started: int = -1  # that of the last one that has started
    completed: int = -1  # that of the last one that has completed
    operation: AnyText = ""  # kind of the last one enqueued: ``all_reduce``; empty if unknown
    shapes: AnyText = ""  # its tensors: ``[1024] Float -> [1024] Float``


@dataclass(frozen=True)
class ProcessState:
    """A process of a rank, as the kernel reports it."""

    pid: int  # its number
    name: AnyText = ""  # its command
    state: str = ""
    """The letter of its state (``R``, ``S``, ``D``, ``T``, ``Z``); empty if it has ended."""
    waits_in: AnyText = ""
    """The function of the kernel that its first thread waits in; empty if unknown."""
    seconds: float = 0.0  # the CPU time that it has used


@dataclass(frozen=True)
class RankState:
    """What a rank does at one moment."""

    rank: int  # its number
    process: ProcessState  # its process
    threads: tuple[ThreadStack, ...] = ()
    """The stacks of its threads, that of the main thread first."""
    groups: tuple[CollectiveState, ...] = ()  # its process groups
    children: tuple[ProcessState, ...] = ()  # the processes that it has started, and theirs
    no_answer: AnyText = ""  # why there are no stacks; empty if there are


UNASKED = 0  # the number of :class:`RankStates` that answer no question


@dataclass(frozen=True)
class RankStates(AgentEvent, event="rank-states"):
    """What the ranks of a node do that have not ended."""

    ranks: tuple[RankState, ...] = ()  # each of them
    number: int = UNASKED
    """The number of the question; 0 where the agent looked by itself, at ranks told to end."""
    nccl: AnyText = ""  # what NCCL's RAS service says of the job; only from the node of rank 0


@dataclass(frozen=True)
class Variable:
    """A variable of a program, without its value where that is not one of Python's own types."""

    name: AnyText  # its name
    type: AnyText = ""  # the name of its class
    text: AnyText = ""
    """Its short form; of a tensor or an array element type, shape and device; empty for a secret,
    and where the class is all that is shown."""


@dataclass(frozen=True)
class FrameVariables:
    """The variables of one frame of a rank that failed."""

    place: AnyText  # ``/path/file.py:88 read_shard``
    values: tuple[Variable, ...] = ()  # its variables, those of the line itself first
    more: int = 0  # the number of those that are left out


@dataclass(frozen=True)
class FailureRecord:
    """A rank that failed; times are in seconds since the epoch."""

    node: str  # its node
    rank: int  # its number
    exit_code: int  # exit status of its process, negative for a signal
    time: float  # the time of the failure
    local_rank: int = 0  # its number on the node
    exception: AnyText = ""  # class of the exception that ended it; empty for none
    message: AnyText = ""  # the exception's message
    lines: tuple[AnyText, ...] = ()  # the end of its traceback, or of its output
    ended: float | None = None
    """The time when its process ended, which after an exception takes PyTorch a while."""
    told_to_end: bool | None = None  # true if its launcher or its agent had told it to end by then
    root_cause: bool | None = None  # true if torchrun calls it the first failure that it saw
    variables: tuple[FrameVariables, ...] = ()
    """The variables of the last frames of the user's own code, the innermost frame first."""
    step: dict[str, int | float] = field(default_factory=dict)
    """The numbers of steps and epochs that it was in, by the names of their variables."""
    seeds: dict[str, AnyText] = field(default_factory=dict)
    """The seeds of its random numbers: ``torch``, ``PYTHONHASHSEED``."""


@dataclass(frozen=True)
class Departure:
    """A rank that others may have missed: it had left its process group, or ended well."""

    node: str  # its node
    rank: int  # its number
    time: float  # the time when it left
    goes_on: bool = False  # true if its program had not ended well


@dataclass(frozen=True)
class Vanished:
    """A rank that ended while others went on, with a status that nobody saw."""

    node: str  # its node
    rank: int  # its number
    time: float | None  # the time when it ended


@dataclass(frozen=True)
class LaunchAnswer(Answer, event="launch"):
    """The ranks of a node, or of one task of it, after their end."""

    failures: tuple[FailureRecord, ...] = ()  # the ranks that failed
    tail: tuple[AnyText, ...] = ()  # the last lines of output, after a failure
    sent: dict[str, int] | None = None
    """Bytes of output that were sent, by rank; ``""`` for the launcher's own."""
    stopped: bool = False  # true if the ranks were told to end
    first_rank: float | None = None
    """The time when rank 0 last began here, in seconds since the epoch; None if it never did."""
    left: tuple[Departure, ...] = ()  # the first rank that others may have missed
    vanished: tuple[Vanished, ...] = ()  # ranks that ended unseen
    lingering: tuple[Lingering, ...] = ()
    """Ranks that went on for too long, and still did at the end."""
    joined: tuple[int, ...] = ()  # ranks that have been in a process group of PyTorch's
    alone: tuple[int, ...] = ()  # ranks that have never been in one
    code: CodeAmount | None = None  # the compiled code there; None if it is not brought back


@dataclass(frozen=True)
class NodeCleanup:
    """The result of cleaning one node root; in a dry run, the plan."""

    root: str  # the node root
    removed: tuple[tuple[str, int], ...] = ()
    """Environments: the bundle's id, and the bytes that became free."""
    kept: tuple[tuple[str, str], ...] = ()
    """Everything that stays: the bundle's id or the path in the root, and the reason."""
    left_overs: tuple[tuple[str, int], ...] = ()
    """Everything else that was removed: its path in the root, and the bytes that became free."""
    problems: tuple[Problem, ...] = ()  # the failures to remove something
    gone: bool = False  # true if nothing was left and the root itself was removed
    freed: int = 0  # bytes that became free, without files that other environments share


@dataclass(frozen=True)
class CleanAnswer(Answer, event="clean"):
    """The node roots of one node after a cleaning."""

    roots: tuple[NodeCleanup, ...] = ()  # each node root of this user


@dataclass(frozen=True)
class NodeClock(AgentEvent, event="clock"):
    """A node's clock, as soon as it is asked."""

    clock: float = 0.0  # seconds since the epoch


@dataclass(frozen=True)
class NetworkReport:
    """The network as one node sees it."""

    differs: dict[str, tuple[str, ...]]
    """Names for which it finds other addresses than the driver, and these."""
    missing: tuple[str, ...] | None = None  # on the head: the nodes that did not connect
    seconds: float | None = None  # on every other node: time that connecting to the head took
    problem: Problem | None = None  # the reason why there is neither


@dataclass(frozen=True)
class DeepAnswer(Answer, event="deep"):
    """A node after the thorough check."""

    torch: bool = False  # true if ranks can be started in its environment
    damage: tuple[Problem, ...] | None = None
    """The damage to its environment; None if that is unknown."""
    network: NetworkReport | None = None
    """The network as it sees it; None where all nodes are one machine."""
