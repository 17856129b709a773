"""The job as it travels: one frozen value, JSON on the way, parsed once at the edge.

``job.json``, version 5, has the fields of :class:`Job`. The driver reads it from a file; an agent
gets it as ``{"job": ..., ...}`` together with what its phase needs. A job for Slurm has neither an
id nor nodes until an allocation stands: ``bind_allocation`` of
:mod:`bundle.driver.transports.slurm_text` fills them in.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from .codec import decode, encode, shorten
from .digest import Digest
from .enumerations import Action, Allocation, Backend, Launcher, LogMode, Stage, TransferWay
from .problem import NodeError, Problem, ProblemCode

# --- The speed of a cluster, from which the model of ``forecast`` computes seconds ---------------

# Once earlier jobs have measured the rates, they travel in a job as JSON.


@dataclass(frozen=True)
class Rates:
    """The speed of a cluster, in seconds unless said otherwise.

    The defaults are assumed: measured on one machine of 2 cores, with nodes in memory (tmpfs) and
    a bridge between them, or taken from publications. Unpacking to a disk may take twice as long.
    """

    link: float = 600e6
    """Bytes a second of one sender, for all it serves."""
    exchange: float = 0.013
    """For a block to be taken in and acknowledged, on each level of the tree. These two fit 334 MB
    to 1, 3 and 6 nodes on one machine, in 1.2, 2.0 and 4.4 s, and decide how wide a tree is; not
    measured on a large cluster."""
    broadcast: float = 0.15
    """For ``sbcast`` to start, and to ask the controller once."""
    relay: float = 0.3
    """For the nodes of a relay to learn of each other, and to connect."""
    relay_level: float = 0.06
    """For each level of a relay's trees. These two fit 40 MB over links of 200 Mbit/s to 16 nodes
    in 2.3 s; not measured on a large cluster."""
    received: float = 0.3e-9
    """CPU time for a byte that a node takes in, beside the unpacking."""
    byte: float = 1.2e-9
    """CPU time for a byte that is unpacked: decompressed, checked and written."""
    file: float = 45e-6
    """CPU time for a file that is made. 34,928 files of 1.39 GB: 3.2 s of CPU time in all."""
    link_file: float = 15e-6
    """For a hard link to a file of an older environment; ``cp -rl`` needs as long."""
    environment: float = 0.3
    """For an environment besides: reading the indexes, directories, publishing."""
    step: float = 0.25
    """For a step of Slurm's to start and to end, beside the agents' own time."""
    node: float = 0.007
    """CPU time of the driver for each node, of all phases together: measured on up to 64 nodes
    (docs/scale.md), and assumed to be the same on more."""
    agent: float = 0.25
    """CPU time of an agent's start on its node; 0.24 s were measured, most of them imports."""
    probe: float = 0.3
    """CPU time of the check, without imports."""
    torchrun: float = 1.7
    """For the launcher to start: an import of torch. Nothing where ``srun`` starts the ranks."""

    def __post_init__(self) -> None:
        """Refuse rates that are not above zero: the model divides and multiplies by them."""
        for name, value in asdict(self).items():
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not is_number or not 0 < value < math.inf:
                raise ValueError(f"rates.{name} is {value!r}")

    def scale_rates(self, *, send: float = 1.0, unpack: float = 1.0, step: float = 1.0) -> Rates:
        """Return the rates of a cluster on which these take so many times as long."""
        factors = {
            **dict.fromkeys(("exchange", "broadcast", "relay", "relay_level"), send),
            **dict.fromkeys(("received", "byte", "file", "link_file", "environment"), unpack),
            **dict.fromkeys(("step", "node", "agent"), step),
        }
        changed = {name: getattr(self, name) * factor for name, factor in factors.items()}
        return replace(self, link=self.link / send, **changed)


ASSUMED = Rates()


# --- The requirements that a node must meet to run a bundle --------------------------------------

_PYTHON = re.compile(r"3\.\d{1,3}")
_LIBC_VERSION = re.compile(r"(?:\d{1,4}(?:\.\d{1,4}){0,3})?")


@dataclass(frozen=True)
class Requires:
    """Requirements of a bundle on a node."""

    python: str
    """Version of CPython as ``major.minor``."""
    machine: str
    """Processor architecture as ``uname -m`` prints it."""
    libc: str
    """``glibc`` or ``musl``."""
    libc_version: str
    """The lowest version of the C library that all that is inside accepts, ``2.28``."""
    libc_needed_by: str = ""
    """What needs that version, with the file or tag that says so; empty for nothing."""
    bundled_python: bool = False
    """True if the bundle has that Python, and a node needs none of this version."""

    def __post_init__(self) -> None:
        for value in (self.machine, self.libc, self.libc_version, self.libc_needed_by):
            require_printable(value, "requires")
        if not _LIBC_VERSION.fullmatch(self.libc_version):
            raise ValueError(f"requires.libc_version is {self.libc_version[:20]!r}")
        if not _PYTHON.fullmatch(require_printable(self.python, "requires.python")):
            raise ValueError(f"requires.python is {self.python[:20]!r}")


def require_printable(value: object, what: str) -> str:
    """Return a value that is printable text.

    Raises:
        ValueError: it is of another type, or holds what cannot be printed.
    """
    if not isinstance(value, str) or not value.isprintable():
        raise ValueError(f"{what} holds {value!r}")
    return value


VERSION = 5
NAME_BYTES = 200
"""Bytes that a job's name, its id and a node may have together: a file's name has 255."""
ONE_A_CPU = 0
"""As a number of ranks: one for each CPU that the node gives the job."""


@dataclass(frozen=True)
class Launch:
    """The settings by which the ranks are started."""

    command: tuple[str, ...]
    """A script or ``-m MODULE``, and its arguments; empty when nothing is launched."""
    nproc_per_node: int | None
    """Ranks on each node; None for one for each GPU, or one; ``ONE_A_CPU``."""
    launcher: Launcher
    backend: Backend
    interface: str | dict[str, str]
    """``auto``, a name, or names by node pattern."""
    omp_num_threads: int | None
    """CPU threads of one rank; None for its share of the CPUs."""
    max_restarts: int
    elastic: tuple[int, int] | None = None
    """Minimum and maximum of nodes that the ranks go on with; None: all of them, or they end."""
    pass_env: tuple[str, ...] = ()
    """Names of secret variables that the ranks get; only names ever travel in a job."""
    container_image: str | None = None
    """Image that the ranks run in: one for Slurm's pyxis plugin, or one of Apptainer's."""
    container_mounts: tuple[str, ...] = ()
    """``SOURCE:TARGET`` pairs for it, besides the node root."""
    grace_seconds: int = 7
    """Grace period of the ranks after SIGTERM, in seconds."""
    watch: bool = True
    """True to ask silent ranks where they are, so that a hang is named."""
    hang_timeout: float = 0.0
    """Seconds of silence after which the ranks are ended; 0: never. It needs ``watch``."""
    retries: int = 0
    """How often all ranks are started again after a failure that may not come again."""

    @property
    def is_run_by_apptainer(self) -> bool:
        """True if Apptainer starts the image: a ``.sif``, or a directory, named with a slash."""
        return (self.container_image or "").endswith((".sif", "/"))


@dataclass(frozen=True)
class Trust:
    """The signature of the job's bundle that the login side has accepted, for nodes to check."""

    signers: str
    """The keys that may sign: the content of an ``allowed_signers`` file."""
    signer: str
    """The principal there whose key has signed."""
    signature: str
    """The signature of the bundle's id, as ``ssh-keygen -Y sign`` writes it."""


@dataclass(frozen=True)
class CodeStore:
    """The place of the code that earlier jobs have compiled, as seen from where the driver runs."""

    path: str
    """A directory of this user alone."""
    software: Digest
    """Digest of what such code depends on in a bundle: torch, Triton, Python."""
    limit: int
    """Most bytes to keep there; 0 to bring nothing back."""
    caches: tuple[str, ...] = ()
    """Variables of other libraries that say where they keep what they compile."""


@dataclass(frozen=True)
class Job:
    """Everything that the far side needs to know."""

    id: str
    """The allocation's id, or one made up for a local job."""
    name: str
    """The job's name, first part of every log's name."""
    allocation: Allocation
    nodes: tuple[str, ...]
    """Names of the nodes; the first one is the head."""
    bundle: str
    """Path of the bundle as seen from where the driver runs."""
    bundle_id: Digest
    requires: Requires
    room: tuple[int, int]
    """Bytes and inodes that a fresh environment takes."""
    packages: tuple[str, ...]
    """Packages that the probe reports."""
    imports: tuple[str, ...]
    """Modules that the probe looks for."""
    node_root: str
    """``auto``, or the directory under which the node root is made."""
    run_dir: str
    """Directory that ranks run in, if the node sees it."""
    log_dir: str
    action: Action
    import_modules: bool
    """True if the probe imports the modules; else it only looks for them."""
    python_hints: tuple[str, ...]
    """Interpreters to try first on a node."""
    launch: Launch
    attempt: int = 0
    """Times that Slurm has started the job before (a requeue)."""
    wanted: tuple[int, int] | None = None
    """Minimum and maximum of nodes to take from an allocation; None: all that it has."""
    min_nodes: int | None = None
    """Nodes that fail are left out while at least this many remain; None: all must do."""
    spares: int = 0
    """How many of the nodes get no ranks until they take the place of a node that fails."""
    stage: Stage = Stage.AUTO
    transfer: TransferWay = TransferWay.AUTO
    cpus_per_task: int | None = None
    """CPUs of each node's part; None for all that the allocation has there."""
    outputs: tuple[str, ...] = ()
    """Paths below the run directory that come back where nodes do not share it."""
    tracked: tuple[str, ...] = ()
    """Those of them that trackers may write, and that nobody misses."""
    resume_limit: int = 0
    """Most bytes of earlier results that are sent to nodes that do not share the run directory."""
    dry_run: bool = False
    """True to stop after the plan."""
    keep: tuple[str, ...] = ()
    """Ids of the bundles whose environments a ``clean`` leaves alone."""
    deep: bool = False
    """True if ``verify`` also reads every file again and tries the network."""
    rates: Rates | None = None
    """Speed of the cluster as earlier jobs have shown it; None for the assumed one."""
    run_subdir: str | None = None
    """The run directory's path in the project; empty for the project itself, None if outside."""
    log_mode: LogMode = LogMode.PRIVATE
    trusted_bundle: bool = False
    """True if the offline root that sends the bundle also built it; else each of its files is
    compared with its digest while it is unpacked."""
    show_all: bool = False
    """True to print every node's output as it comes, not only the first node's; logs have all."""
    trust: Trust | None = None
    """Given where the settings require a signature: each node then checks it, too."""
    code_store: CodeStore | None = None
    """Given where code that earlier jobs have compiled may be used."""

    @property
    def can_launch_in_session_step(self) -> bool:
        """True if the Slurm step that runs the other phases may launch the ranks, too.

        Ranks that Slurm starts are tasks of their own; secret variables are for the ranks' own
        step alone; and nodes cannot come and go in the step of all phases.
        """
        settings = self.launch
        return not (settings.launcher is Launcher.SRUN or settings.pass_env or settings.elastic)

    def to_json(self) -> dict[str, object]:
        """Return the job as a JSON object."""
        return {"v": VERSION, **encode(self)}

    @classmethod
    def from_json(cls, raw: object) -> Job:
        """Read :meth:`to_json`'s output; see :func:`parse_job`."""
        return parse_job(raw)


def parse_job(raw: object) -> Job:
    """Read a job.

    Raises:
        NodeError: it is of another version, or a field is missing, unknown or wrong.
    """
    try:
        fields = dict(raw) if isinstance(raw, Mapping) else {}
        version = fields.pop("v", None)
        if version != VERSION:
            raise ValueError(f"version {version!r}, this program speaks {VERSION}")
        job = decode(Job, fields)
        check_job(job)
    except ValueError as exc:
        why = {"why": f"{type(exc).__name__}: {exc}"}
        raise NodeError(Problem(ProblemCode.JOB_OF_OTHER_VERSION, "job.json", why)) from exc
    return job


def redact_job(job: Job) -> Job:
    """Return the job as it may be kept and shown, without the secrets among its arguments."""
    from ..redaction.secrets import mask_arguments, strip_url_secrets

    image = job.launch.container_image
    launch = replace(
        job.launch,
        command=tuple(mask_arguments(job.launch.command)),
        container_image=image and strip_url_secrets(image),
    )
    return replace(job, launch=launch, trust=None)  # it names people


def load_job(path: str) -> Job:
    """Read a job from a file.

    Raises:
        NodeError: it cannot be read.
    """
    try:
        with open(path, encoding="utf-8") as handle:
            raw = json.load(handle)
    except (OSError, ValueError, RecursionError) as exc:
        raise NodeError(Problem(ProblemCode.JOB_UNREADABLE, path, {"why": str(exc)})) from exc
    return parse_job(raw)


def check_job(job: Job) -> None:
    """Refuse a job with a value that could not name a file, or start no rank.

    Call it again when values are filled in later, as those of an allocation are.

    Raises:
        ValueError: a field cannot be used; the message names it.
    """
    if job.allocation is Allocation.SLURM and not job.id and not job.nodes:
        # To be bound to an allocation first; slurm_text.bind_allocation then checks it again.
        job = replace(job, id="unbound", nodes=("unbound",), spares=0)
    _check_file_names("id", job.id)
    _check_file_names("name", job.name)
    _check_file_names("node", *job.nodes)
    if not job.nodes or len(set(job.nodes)) != len(job.nodes):
        raise ValueError("the nodes must be one or more, and different")
    if not 0 <= job.spares < len(job.nodes) or job.launch.retries < 0:
        raise ValueError(
            f"{job.spares} spare nodes of {len(job.nodes)}, {job.launch.retries} retries"
        )
    longest = f"{job.name}.{job.id}.{max(job.nodes, key=_count_bytes)}"
    size = _count_bytes(longest)
    if size > NAME_BYTES:
        raise ValueError(
            f"name, id and node have {size} bytes together ({shorten(longest)}): the names of "
            f"logs begin with them, and have room for {NAME_BYTES}"
        )


def _count_bytes(name: str) -> int:
    return len(os.fsencode(name))


def _check_file_names(field: str, *names: str) -> None:
    for name in names:
        if not name.isprintable() or not name.strip(".") or "/" in name:
            raise ValueError(f"{field} {shorten(name)} cannot be part of a file's name")
