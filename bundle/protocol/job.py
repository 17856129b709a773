"""The job as it travels: ``job.json``, version 5, has the fields of :class:`Job`.

A job for Slurm has neither an id nor nodes until an allocation stands:
``slurm_text.bind_allocation`` fills them in.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, replace

from .codec import decode, encode, shorten
from .dataclass import dataclass
from .digest import Digest
from .enumerations import Action, Allocation, Backend, Launcher, LogMode, Stage, TransferWay
from .problem import NodeError, Problem, ProblemCode


@dataclass(frozen=True)
class Rates:
    """The speed of a cluster, in seconds unless said otherwise.

    The defaults were measured on one machine of 2 cores, with nodes in memory, or are taken from
    publications. Unpacking to a disk may take twice as long.
    """

    link: float = 600e6  # bytes a second of one sender, for all it serves
    exchange: float = 0.013
    """For a block to be acknowledged, on each level of the tree, whose width it decides. Both fit
    334 MB to 1, 3 and 6 nodes on one machine, in 1.2, 2.0 and 4.4 s."""
    broadcast: float = 0.15  # for ``sbcast`` to start, and to ask the controller once
    relay: float = 0.3  # for the nodes of a relay to learn of each other, and to connect
    relay_level: float = 0.06  # for each level of its trees; both fit 40 MB to 16 nodes in 2.3 s
    received: float = 0.3e-9  # CPU time for a byte that a node takes in, beside the unpacking
    byte: float = 1.2e-9  # CPU time for a byte that is unpacked: decompressed, checked and written
    file: float = 45e-6  # CPU time for a file that is made; 34,928 files of 1.39 GB took 3.2 s
    link_file: float = 15e-6  # for a hard link to a file of an older environment; as for ``cp -rl``
    environment: float = 0.3  # for an environment besides: indexes, directories, publishing
    step: float = 0.25  # for a step of Slurm's to start and to end, beside the agents' own time
    node: float = 0.007  # CPU time of the driver, of all phases, for each node (docs/scale.md)
    agent: float = 0.25  # CPU time of an agent's start on its node, most of it for imports
    probe: float = 0.3  # CPU time of the check, without imports
    torchrun: float = 1.7  # for an import of torch; nothing where ``srun`` starts the ranks

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():  # the model divides and multiplies by them
            if not 0 < value < math.inf:
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


_PYTHON = re.compile(r"3\.\d{1,3}")
_LIBC_VERSION = re.compile(r"(?:\d{1,4}(?:\.\d{1,4}){0,3})?")


@dataclass(frozen=True)
class Requires:
    """Requirements of a bundle on a node."""

    python: str  # version of CPython as ``major.minor``
    machine: str  # processor architecture as ``uname -m`` prints it
    libc: str  # ``glibc`` or ``musl``
    libc_version: str  # the lowest version of it that all inside accepts, ``2.28``
    libc_needed_by: str = ""  # the file or tag that needs that version; empty for none
    bundled_python: bool = False  # true if the bundle brings that Python

    def __post_init__(self) -> None:
        for value in (self.machine, self.libc, self.libc_version, self.libc_needed_by):
            require_printable(value, "requires")
        if not _LIBC_VERSION.fullmatch(self.libc_version):
            raise ValueError(f"requires.libc_version is {self.libc_version[:20]!r}")
        if not _PYTHON.fullmatch(require_printable(self.python, "requires.python")):
            raise ValueError(f"requires.python is {self.python[:20]!r}")


def require_printable(value: object, what: str) -> str:
    """Return a value; ValueError if it is no text that can be printed."""
    if not isinstance(value, str) or not value.isprintable():
        raise ValueError(f"{what} holds {value!r}")
    return value


VERSION = 5
NAME_BYTES = 200  # of job name, id and node together: a file's name has 255
ONE_A_CPU = 0  # as a number of ranks: one for each CPU that the node gives the job


@dataclass(frozen=True)
class Launch:
    """The settings by which the ranks are started."""

    command: tuple[str, ...]  # a script or ``-m MODULE``, and its arguments; empty for none
    nproc_per_node: int | None  # ranks on each node; None: one for each GPU, or one; ``ONE_A_CPU``
    launcher: Launcher
    backend: Backend
    interface: str | dict[str, str]  # ``auto``, a name, or names by node pattern
    omp_num_threads: int | None  # CPU threads of one rank; None for its share of the CPUs
    max_restarts: int
    elastic: tuple[int, int] | None = None  # minimum and maximum of nodes to go on with; None: all
    pass_env: tuple[str, ...] = ()  # names of secret variables that the ranks get
    container_image: str | None = None  # image for Slurm's pyxis plugin, or one of Apptainer's
    container_mounts: tuple[str, ...] = ()  # ``SOURCE:TARGET`` pairs for it, besides the node root
    grace_seconds: int = 7  # grace period of the ranks after SIGTERM, in seconds
    watch: bool = True  # true to ask silent ranks where they are, so that a hang is named
    hang_timeout: float = 0.0  # seconds of silence after which the ranks are ended; 0: never
    retries: int = 0  # how often all ranks are started again after a failure

    @property
    def is_run_by_apptainer(self) -> bool:
        """True if Apptainer starts the image: a ``.sif``, or a directory, named with a slash."""
        return (self.container_image or "").endswith((".sif", "/"))


@dataclass(frozen=True)
class Trust:
    """The signature of the job's bundle, accepted by the login side, for nodes to check."""

    signers: str  # the keys that may sign: the content of an ``allowed_signers`` file
    signer: str  # the principal there whose key has signed
    signature: str  # the signature of the bundle's id, as ``ssh-keygen -Y sign`` writes it


@dataclass(frozen=True)
class CodeStore:
    """The place of the code that earlier jobs have compiled, as seen from where the driver runs."""

    path: str  # a directory of this user alone
    software: Digest  # digest of what such code depends on in a bundle: torch, Triton, Python
    limit: int  # most bytes to keep there; 0 to bring nothing back
    caches: tuple[str, ...] = ()  # variables with other libraries' directories for such code


@dataclass(frozen=True)
class Job:
    """Everything that the far side needs to know."""

    id: str  # the allocation's id, or one made up for a local job
    name: str  # the job's name, first part of every log's name
    allocation: Allocation
    nodes: tuple[str, ...]  # names of the nodes; the first one is the head
    bundle: str  # path of the bundle as seen from where the driver runs
    bundle_id: Digest
    requires: Requires
    room: tuple[int, int]  # bytes and inodes that a fresh environment takes
    packages: tuple[str, ...]  # packages that the probe reports
    imports: tuple[str, ...]  # modules that the probe looks for
    node_root: str  # ``auto``, or the directory under which the node root is made
    run_dir: str  # directory that ranks run in, if the node sees it
    log_dir: str
    action: Action
    import_modules: bool  # true if the probe imports the modules; else it only looks for them
    python_hints: tuple[str, ...]  # interpreters to try first on a node
    launch: Launch
    attempt: int = 0  # times that Slurm has started the job before (a requeue)
    wanted: tuple[int, int] | None = None  # minimum and maximum of nodes; None: all there are
    min_nodes: int | None = None  # nodes that fail are left out while as many remain; None: none is
    spares: int = 0  # nodes that get no ranks until they take the place of one that fails
    stage: Stage = Stage.AUTO
    transfer: TransferWay = TransferWay.AUTO
    cpus_per_task: int | None = None  # CPUs of each node's part; None for all of the allocation
    outputs: tuple[str, ...] = ()  # paths below the run directory that come back if not shared
    tracked: tuple[str, ...] = ()  # those of them that trackers may write, and that nobody misses
    resume_limit: int = 0  # most bytes of earlier results that are sent to such nodes
    dry_run: bool = False  # true to stop after the plan
    keep: tuple[str, ...] = ()  # ids of the bundles whose environments a ``clean`` leaves alone
    deep: bool = False  # true if ``verify`` also reads every file again and tries the network
    rates: Rates | None = None  # speed of the cluster in earlier jobs; None for the assumed one
    run_subdir: str | None = None  # the run directory's path in the project; None if it is outside
    log_mode: LogMode = LogMode.PRIVATE
    trusted_bundle: bool = False  # true if its sender built the bundle; else each file is compared
    show_all: bool = False  # true to print the output of all nodes, not only the first one's
    trust: Trust | None = None  # given where each node must check the bundle's signature, too
    code_store: CodeStore | None = None  # given where earlier jobs' compiled code may be used

    @property
    def can_launch_in_session_step(self) -> bool:
        """True if the Slurm step that runs the other phases may launch the ranks, too."""
        settings = self.launch  # Slurm's own tasks, secrets and changing nodes need a step
        return not (settings.launcher is Launcher.SRUN or settings.pass_env or settings.elastic)

    def to_json(self) -> dict[str, object]:
        """Return the job as a JSON object."""
        return {"v": VERSION, **encode(self)}

    @classmethod
    def from_json(cls, raw: object) -> Job:
        """Read :meth:`to_json`'s output; NodeError for another version, or a wrong field."""
        try:
            fields = dict(raw) if isinstance(raw, Mapping) else {}
            version = fields.pop("v", None)
            if version != VERSION:
                raise ValueError(f"version {version!r}, this program speaks {VERSION}")
            job = decode(cls, fields)
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
    """Read a job from a file; NodeError if it cannot be read."""
    try:
        with open(path, encoding="utf-8") as handle:
            raw = json.load(handle)
    except (OSError, ValueError, RecursionError) as exc:
        raise NodeError(Problem(ProblemCode.JOB_UNREADABLE, path, {"why": str(exc)})) from exc
    return Job.from_json(raw)


def check_job(job: Job) -> None:
    """Refuse a job with a value that could not name a file, or start no rank, by a ValueError."""
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
    longest = f"{job.name}.{job.id}.{max(job.nodes, key=lambda node: len(os.fsencode(node)))}"
    size = len(os.fsencode(longest))
    if size > NAME_BYTES:
        raise ValueError(
            f"name, id and node have {size} bytes together ({shorten(longest)}): the names of "
            f"logs begin with them, and have room for {NAME_BYTES}"
        )


def _check_file_names(field: str, *names: str) -> None:
    for name in names:
        if not name.isprintable() or not name.strip(".") or "/" in name:
            raise ValueError(f"{field} {shorten(name)} cannot be part of a file's name")
