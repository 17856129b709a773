"""The settings of a job, one row each: ``[project]``, ``[cluster]``, ``[launch]``, and options.

A row is the metadata of a dataclass's field. From it follow how the key is read and checked, the
option of the command line and its help, how an option changes a setting, ``stager config``, the
JSON Schema, and the options that Slurm gets. Nothing here is slow to import: ``--help`` needs it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

from bundle.protocol.enumerations import Backend, Launcher, LogMode, Stage, TransferWay

from . import checks

ALLOCATIONS = ("auto", "slurm", "ssh", "local")

# The headings of options on a help page.
BUNDLE = "The bundle and where it goes"
SLURM = "Slurm"
LAUNCH = "Staging and launching"
BATCH = "Batch jobs and failures"


# Nobody compares or prints a row: methods for that would cost each start some time.
@dataclass(frozen=True, eq=False, repr=False)
class SlurmOption:
    """What Slurm calls a setting, besides ``--KEY``."""

    short: str = ""
    variable: str = ""
    """The variable that has its value inside an allocation; empty where none has."""
    has_default: bool = False
    """Whether users and sites set it in variables, such as ``SBATCH_PARTITION``."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class SettingRow:
    """A row: a key of ``stager.toml``, an option of the command line, or both."""

    check: Callable[..., Any]
    """Its check; of a path, the function that makes it for a folder."""
    allowed: str = ""
    default: object = None
    """The value of an absent key, as its user would write it; None and ``()`` for no value."""
    starts_at_root: bool = False
    """Whether it has paths, which start at the project's folder."""
    flag: str = ""
    """The option's names, and the word for its value: ``-p --partition NAME``; empty for none."""
    help: str = ""
    panel: str = ""
    option_allowed: str = ""
    """The allowed values of the option, in words, where they differ from the key's."""
    merge: Callable[[Any, Any], object] | None = None
    """Combines the key's value with the option's; None if the option replaces it."""
    slurm: SlurmOption | None = None

    @property
    def option(self) -> str:
        """The option's long name."""
        return next(word for word in self.flag.split() if word.startswith("--"))

    def make_check(self, root: Path) -> Callable[[object], Any]:
        """Return the check of the key of a project in a folder."""
        return self.check(root) if self.starts_at_root else self.check


def setting(check: Callable[..., Any], allowed: str = "", **row: Any) -> Any:  # noqa: ANN401
    """Return a dataclass's field with its row; the type of its value is the field's."""
    made = SettingRow(check=check, allowed=allowed or getattr(check, "allowed", ""), **row)
    if made.starts_at_root:
        return field(default=made.default, metadata={"row": made})
    default = made.default if made.default in (None, (), "") else check(made.default)
    return field(default=default, metadata={"row": made})


_slurm = partial(setting, panel=SLURM)
_launch = partial(setting, panel=LAUNCH)


def _join(setting: tuple[str, ...], option: tuple[str, ...]) -> tuple[str, ...]:
    """Return both, one after the other, each entry once."""
    return tuple(dict.fromkeys((*setting, *option)))


def join_nodes(*lists: str | None) -> str | None:
    """Return node lists as one; None for none."""
    return ",".join(filter(None, lists)) or None


# --- The options that Slurm's commands share: settings, options of a job, and a request for nodes


_NODES = 'a node list without blanks, as in "node02,node[05-07]"'


# Only classes that derive from it are made.
@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class SlurmOptions:
    """Options of Slurm by their names there; None leaves one to Slurm, or to the settings."""

    nodes: tuple[int, int] | None = _slurm(
        checks.node_range,
        default=1,
        flag="-N --nodes N|MIN:MAX",
        help="How many nodes.",
        option_allowed=f"N or MIN:MAX, from 1 to {checks.MOST}",
        slurm=SlurmOption("N"),
    )
    """Fewest and most nodes; equal if the number is fixed."""
    cpus_per_task: int | None = _slurm(
        checks.count,
        flag="-c --cpus-per-task N",
        help="CPUs on each node.",
        slurm=SlurmOption("c"),
    )
    gpus_per_node: str | None = _slurm(
        checks.gpus,
        flag="--gpus-per-node [TYPE:]N",
        help="GPUs on each node.",
        slurm=SlurmOption(variable="SLURM_GPUS_PER_NODE", has_default=True),
    )
    """GPUs on each node, as Slurm writes it: ``4``, ``a100:4`` or ``v100:4,a100:2``."""
    partition: str | None = _slurm(
        checks.word,
        "the name of a partition",
        flag="-p --partition NAME",
        help="Slurm partition.",
        slurm=SlurmOption("p", "SLURM_JOB_PARTITION", has_default=True),
    )
    account: str | None = _slurm(
        checks.word,
        "the name of an account",
        flag="-A --account NAME",
        help="Slurm account.",
        slurm=SlurmOption("A", "SLURM_JOB_ACCOUNT", has_default=True),
    )
    time: str | None = _slurm(
        checks.slurm_time,
        flag="-t --time TIME",
        help="Time limit, as in 00:30:00.",
        slurm=SlurmOption("t", has_default=True),
    )
    """Time limit in one of Slurm's forms: minutes, ``HH:MM:SS``, ``UNLIMITED``..."""
    exclude: str | None = _slurm(
        checks.node_list,
        'nodes, for example "node0[1-3],node07" or a list',
        flag="-x --exclude NODES",
        help="Nodes to avoid, as in n02,n05.",
        option_allowed=_NODES,
        merge=join_nodes,
        slurm=SlurmOption("x", "SLURM_JOB_NODELIST"),
    )
    nodelist: str | None = _slurm(
        checks.node_list,
        'nodes, for example "node0[1-3]" or a list',
        flag="-w --nodelist NODES",
        help="Nodes that must be among them.",
        option_allowed=_NODES,
        slurm=SlurmOption("w", "SLURM_JOB_NODELIST"),
    )
    qos: str | None = _slurm(
        checks.word,
        "the name of a quality of service",
        flag="--qos NAME",
        help="Quality of service.",
        slurm=SlurmOption("q", "SLURM_JOB_QOS", has_default=True),
    )
    constraint: str | None = _slurm(
        checks.word,
        'features of nodes, for example "a100&nvlink"',
        flag="-C --constraint LIST",
        help="Features that nodes must have.",
        slurm=SlurmOption("C", has_default=True),
    )
    reservation: str | None = _slurm(
        checks.word,
        "the name of a reservation",
        flag="--reservation NAME",
        help="Slurm reservation.",
        slurm=SlurmOption(variable="SLURM_JOB_RESERVATION", has_default=True),
    )
    mem: str | None = _slurm(
        checks.memory,
        flag="--mem SIZE",
        help="Memory on each node, as in 64G.",
        slurm=SlurmOption(variable="SLURM_MEM_PER_NODE", has_default=True),
    )
    """Memory on each node: megabytes, or a number with K, M, G or T; 0 for all."""
    salloc_args: tuple[str, ...] = _slurm(
        checks.texts,
        "a list of strings, one for each argument",
        default=(),
        flag="--salloc-arg ARG",
        help="A further option, passed on; may be repeated.",
        option_allowed="an option of salloc",
        merge=operator.add,
    )


# --- ``[project]``, ``[cluster]`` and ``[launch]`` -----------------------------------------------

_LONGEST_NAME = 100
"""A file's name has 255 bytes; a log's also has the job's id, a node's name and a task's number."""


@dataclass(frozen=True, kw_only=True)
class ProjectConfig:
    """``[project]``: the user's own code."""

    name: str = setting(
        checks.make_pattern_check(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{_LONGEST_NAME - 1}}}"),
        f"up to {_LONGEST_NAME} letters, digits, dots, dashes and underscores, a letter or digit "
        "first, since files are named by it",
    )
    """Names the bundle's file and the job; by default after the project's folder."""
    path: Path | None = setting(
        checks.path_or_false, "a path, or false", default=".", starts_at_root=True
    )
    """The folder that is shipped; None (``path = false``) ships none."""
    exclude: tuple[str, ...] = setting(checks.texts, default=())
    outputs: tuple[str, ...] = _launch(
        checks.outputs,
        default=(),
        flag="--outputs PATH",
        help="What to bring back where nodes do not see this folder; repeatable.",
        option_allowed="a path or pattern inside this folder",
        merge=_join,
    )
    resume_limit: int = setting(checks.size, default="2GB")
    """Most bytes of them that are sent before a job to nodes that do not see that directory."""
    command: tuple[str, ...] = setting(
        checks.texts, 'a list of strings, for example ["train.py", "--epochs"]', default=()
    )


def make_project_name(folder: str) -> str:
    """Return a project's name that is like its folder's."""
    import re

    return re.sub(r"[^A-Za-z0-9._-]+", "-", folder).strip("-._")[:_LONGEST_NAME] or "project"


@dataclass(frozen=True, kw_only=True)
class ClusterConfig(SlurmOptions):
    """``[cluster]``: the nodes, from Slurm or as hosts, and how the bundle gets there."""

    nodes: tuple[int, int] = (1, 1)
    min_nodes: int | None = _launch(
        checks.count,
        flag="--min-nodes N",
        help="Leave out bad nodes, but keep N.",
    )
    """Unusable nodes are left out while this many remain; None: every node must be usable."""
    avoid_bad: bool = setting(
        checks.boolean,
        default=False,
        flag="--avoid-bad/--no-avoid-bad",
        help="Also avoid nodes that failed lately; `stager nodes` lists them.",
        panel=SLURM,
    )
    hosts: tuple[str, ...] = setting(
        checks.make_list_check(checks.word),
        'hosts, for example ["node[01-08]", "user@gpu9"]',
        default=(),
    )
    """Hosts that are reached over ``ssh`` where there is no Slurm, in its notation."""
    node_root: str = setting(
        checks.node_path,
        'an absolute path, a path with a $VARIABLE of the node first, "auto" or "auto-memory"',
        default="auto",
    )
    """Directory on each node under which the node root is made; ``auto`` looks for a local one."""
    stage: Stage = _launch(
        checks.make_enum_check(Stage),
        default="auto",
        flag="--stage",
        help="Whether the bundle is sent.",
    )
    transfer: TransferWay = _launch(
        checks.make_enum_check(TransferWay),
        default="auto",
        flag="--transfer",
        help="How the nodes get it.",
    )
    log_mode: LogMode = setting(checks.make_enum_check(LogMode), default="private")
    container_image: str | None = _launch(
        checks.word,
        "the name of an image, or the path of one",
        flag="--container-image IMAGE",
        help="Image to run the ranks in: of pyxis, or a .sif or directory for Apptainer.",
    )
    container_mounts: tuple[str, ...] = _launch(
        checks.make_list_check(checks.mount),
        'a list of mounts, for example ["/scratch:/scratch"]',
        default=(),
        flag="--container-mounts SRC:DST",
        help="What the container sees.",
        option_allowed="SOURCE:TARGET",
        merge=_join,
    )


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """``[launch]``: the settings for starting ranks."""

    nproc_per_node: int | None = _launch(
        checks.ranks,
        default="auto",
        flag="--nproc-per-node N|auto|gpu|cpu",
        help="Ranks on each node.",
    )
    """Ranks on each node; None for one a GPU, else 1; ``ONE_A_CPU``."""
    launcher: Launcher = _launch(
        checks.make_enum_check(Launcher),
        default="torchrun",
        flag="--launcher",
        help="What starts the ranks.",
    )
    backend: Backend = _launch(
        checks.make_enum_check(Backend),
        '"auto", "nccl" or "gloo"',
        default="auto",
        flag="--backend",
        help="The backend of torch.distributed.",
    )
    interface: str | tuple[tuple[str, str], ...] = _launch(
        checks.interface,
        '"auto", a name like "ens1f1", or a table { "node0[1-3]" = "ens1f1" }',
        default="auto",
        flag="--interface NAME",
        help="auto, or a network interface's name.",
        option_allowed="an interface's name",
    )
    """``auto``, one interface's name, or pairs of a node pattern and an interface's name."""
    omp_num_threads: int | None = setting(checks.count_or_auto, default="auto")
    """Threads a rank, 1 or more; None for the task's CPUs divided by its ranks."""
    max_restarts: int = setting(checks.make_number_check(0), default=0)
    # Short, since Slurm kills remaining processes KillWait (30 s by default) after it ended a job.
    grace_seconds: int = setting(checks.count, default=7)
    """Grace period of ranks after SIGTERM, in seconds."""
    pass_env: tuple[str, ...] = _launch(
        checks.make_list_check(checks.make_pattern_check(checks.VARIABLE)),
        'a list of names of variables, without their values: ["HF_TOKEN"]',
        default=(),
        flag="--pass-env NAME",
        help="A secret variable for the ranks.",
        option_allowed="a name, without a value",
        merge=_join,
    )
    on_failure: tuple[str, ...] = setting(
        checks.command,
        default=(),
        flag="--on-failure CMD",
        help="Start CMD if the job fails; it reads JSON.",
        panel=BATCH,
    )


# --- The options of a job ------------------------------------------------------------------------


def _read_hosts(value: object) -> tuple[str, ...]:
    return (checks.word(value),)


@dataclass(frozen=True, kw_only=True)
class JobOptions(SlurmOptions):
    """The options of a job; None and ``()`` leave a value to the settings.

    An option with the name of a setting changes it, and is read as it is. The others have a row of
    their own. The order is that of the help page.
    """

    nodes: tuple[int, int] | None = None
    bundle: Path | None = setting(
        Path, flag="--bundle FILE", help="The bundle; default: the project's newest.", panel=BUNDLE
    )
    bundle_id: str = setting(
        checks.bundle_id,
        "12 to 64 hexadecimal digits, as `stager verify` and `stager inspect` show them",
        default="",
        flag="--id ID",
        help="The id the bundle must have, or 12 or more of its first digits.",
        panel=BUNDLE,
    )
    allocation: str = setting(
        checks.make_choice_check(ALLOCATIONS),
        default="auto",
        flag="--allocation",
        help="Where nodes come from; local: processes on this machine.",
        panel=BUNDLE,
    )
    hosts: tuple[str, ...] = setting(
        _read_hosts,
        'hosts without blanks, as in "node[01-08],user@gpu9"',
        default=(),
        flag="--hosts HOSTS",
        help="Hosts to reach over ssh, as in node[01-08],user@gpu9.",
        panel=BUNDLE,
    )
    host_file: Path | None = setting(
        Path,
        flag="--host-file FILE",
        help="A file with one such host in each line.",
        panel=BUNDLE,
    )
    avoid_bad: bool | None = None
    nproc_per_node: int | str | None = None
    launcher: Launcher | None = None
    backend: Backend | None = None
    interface: str | None = None
    stage: Stage | None = None
    transfer: TransferWay | None = None
    min_nodes: int | None = None
    log_dir: Path | None = setting(
        Path, flag="--log-dir DIR", help="Default: ~/slurm_logs.", panel=LAUNCH
    )
    outputs: tuple[str, ...] = ()
    pass_env: tuple[str, ...] = ()
    container_image: str | None = None
    container_mounts: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    deep: bool = setting(
        checks.boolean,
        default=False,
        flag="--deep",
        help="Read every file, try the network between all nodes.",
    )
    batch: bool = setting(
        checks.boolean, default=False, flag="--batch", help="Submit with sbatch.", panel=BATCH
    )
    wait: bool = setting(
        checks.boolean,
        default=False,
        flag="--wait",
        help="With --batch: follow the job to its end.",
        panel=BATCH,
    )
    dry_run: bool = setting(
        checks.boolean,
        default=False,
        flag="--dry-run",
        help="Say what would be done; do nothing.",
        panel=BATCH,
    )
    on_failure: tuple[str, ...] = ()
    show_all: bool = False


# --- The rows ------------------------------------------------------------------------------------


def list_rows(kind: type) -> Mapping[str, SettingRow]:
    """Return the rows of a section, by the names of its fields; a subclass keeps those it has."""
    found = {}
    for base in reversed(kind.__mro__):
        for one in getattr(base, "__dataclass_fields__", {}).values():
            if "row" in one.metadata:
                found[one.name] = one.metadata["row"]
    return found


@cache
def list_option_rows() -> Mapping[str, SettingRow]:
    """Return the rows of all options of a job, by the names of their fields in JobOptions."""
    known = {**list_rows(ProjectConfig), **list_rows(ClusterConfig), **list_rows(LaunchConfig)}
    rows = {**known, **list_rows(JobOptions)}
    names = JobOptions.__dataclass_fields__
    return {name: rows[name] for name in names if name in rows and rows[name].flag}


def list_slurm_rows() -> dict[str, SettingRow]:
    """Return the rows of the options that Slurm has by the same name."""
    return {name: row for name, row in list_rows(SlurmOptions).items() if row.slurm}


def make_key(name: str) -> str:
    """Return the key, and Slurm's long option, of a field: ``cpus-per-task``."""
    return name.replace("_", "-")
