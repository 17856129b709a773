"""The settings of a job, one row each: ``[project]``, ``[cluster]``, ``[launch]``, and options.

From a row follow how the key is read and checked, the option and its help, how an option changes a
setting, ``stager config``, the JSON Schema, and Slurm's options. ``--help`` imports this.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import field
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from bundle.protocol.dataclass import dataclass
from bundle.protocol.enumerations import (
    Backend,
    CompileCache,
    Launcher,
    LogMode,
    Stage,
    TransferWay,
)

from . import checks

ALLOCATIONS = ("auto", "slurm", "ssh", "local")

# The headings of options on a help page.
BUNDLE = "The bundle and where it goes"
SLURM = "Slurm"
LAUNCH = "Staging and launching"
BATCH = "Batch jobs and failures"


class SettingRow(NamedTuple):
    """A row: a key of ``stager.toml``, an option of the command line, or both."""

    check: Callable[..., Any]
    """Its check; of a path, the function that makes it for a folder."""
    allowed: str = ""
    default: object = None
    """The value of an absent key, as its user would write it; None and ``()`` for no value."""
    starts_at_root: bool = False  # whether it has paths, which start at the project's folder
    flag: str = ""  # the option's names, and the word for its value: ``-p --partition NAME``
    help: str = ""
    panel: str = ""
    option_allowed: str = ""  # the allowed values of the option, where they differ from the key's
    merge: Callable[[Any, Any], object] | None = None
    """Combines the key's value with the option's; None if the option replaces it."""
    variable: str = ""  # of Slurm, which has its value inside an allocation

    @property
    def option(self) -> str:
        """The option's long name."""
        return next(word for word in self.flag.split() if word.startswith("--"))

    def make_check(self, root: Path) -> Callable[[object], Any]:
        """Return the check of the key of a project in a folder."""
        return self.check(root) if self.starts_at_root else self.check


def setting(check: Callable[..., Any], allowed: str = "", **row: Any) -> Any:  # noqa: ANN401
    """Return a dataclass's field with its row; the type of its value is the field's."""
    made = SettingRow(check, allowed or getattr(check, "allowed", ""), **row)
    is_final = made.starts_at_root or made.default in (None, (), "")
    default = made.default if is_final else check(made.default)
    return field(default=default, metadata={"row": made})


def _option(panel: str, check: Callable[..., Any], flag: str, help: str, **row: Any) -> Any:  # noqa: ANN401
    return setting(check, panel=panel, flag=flag, help=help, **row)


_bundle = partial(_option, BUNDLE)
_slurm = partial(_option, SLURM)
_NODES = 'a node list without blanks, as in "node02,node[05-07]"'
_slurm_nodes = partial(
    _slurm, checks.node_list, option_allowed=_NODES, variable="SLURM_JOB_NODELIST"
)
_launch = partial(_option, LAUNCH)
_batch = partial(_option, BATCH)


def _slurm_name(flag: str, help: str, thing: str, variable: str) -> Any:  # noqa: ANN401
    allowed = f"the name of {thing}"
    return _slurm(checks.word, flag, help, allowed=allowed, variable=variable)


def _join(setting: tuple[str, ...], option: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*setting, *option)))


def join_nodes(*lists: str | None) -> str | None:
    """Return node lists as one; None for none."""
    return ",".join(filter(None, lists)) or None


# Only classes that derive from it are made.
@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class SlurmOptions:
    """Options of Slurm by their names there; None leaves one to Slurm, or to the settings."""

    nodes: tuple[int, int] | None = _slurm(
        checks.node_range,
        "-N --nodes N|MIN:MAX",
        "How many nodes.",
        default=1,
        option_allowed=f"N or MIN:MAX, from 1 to {checks.MOST}",
    )
    """Fewest and most nodes; equal if the number is fixed."""
    cpus_per_task: int | None = _slurm(checks.count, "-c --cpus-per-task N", "CPUs on each node.")
    gpus_per_node: str | None = _slurm(
        checks.gpus,
        "--gpus-per-node [TYPE:]N",
        "GPUs on each node.",
        variable="SLURM_GPUS_PER_NODE",
    )
    """GPUs on each node, as Slurm writes it: ``4``, ``a100:4`` or ``v100:4,a100:2``."""
    partition: str | None = _slurm_name(
        "-p --partition NAME", "Slurm partition.", "a partition", "SLURM_JOB_PARTITION"
    )
    account: str | None = _slurm_name(
        "-A --account NAME", "Slurm account.", "an account", "SLURM_JOB_ACCOUNT"
    )
    time: str | None = _slurm(checks.slurm_time, "-t --time TIME", "Time limit, as in 00:30:00.")
    exclude: str | None = _slurm_nodes(
        "-x --exclude NODES",
        "Nodes to avoid, as in n02,n05.",
        allowed='nodes, for example "node0[1-3],node07" or a list',
        merge=join_nodes,
    )
    nodelist: str | None = _slurm_nodes(
        "-w --nodelist NODES",
        "Nodes that must be among them.",
        allowed='nodes, for example "node0[1-3]" or a list',
    )
    qos: str | None = _slurm_name(
        "--qos NAME", "Quality of service.", "a quality of service", "SLURM_JOB_QOS"
    )
    constraint: str | None = _slurm(
        checks.word,
        "-C --constraint LIST",
        "Features that nodes must have.",
        allowed='features of nodes, for example "a100&nvlink"',
    )
    reservation: str | None = _slurm_name(
        "--reservation NAME", "Slurm reservation.", "a reservation", "SLURM_JOB_RESERVATION"
    )
    mem: str | None = _slurm(
        checks.memory,
        "--mem SIZE",
        "Memory on each node, as in 64G.",
        variable="SLURM_MEM_PER_NODE",
    )
    salloc_args: tuple[str, ...] = _slurm(
        checks.texts,
        "--salloc-arg ARG",
        "A further option, passed on; may be repeated.",
        allowed="a list of strings, one for each argument",
        default=(),
        option_allowed="an option of salloc",
        merge=operator.add,
    )


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
        "--outputs PATH",
        "What to bring back where nodes do not see this folder; repeatable.",
        default=(),
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
        checks.count, "--min-nodes N", "Leave out bad nodes, but keep N."
    )
    """Unusable nodes are left out while this many remain; None: every node must be usable."""
    spares: int = _launch(
        checks.make_number_check(0),
        "--spares K",
        "Ask for K more nodes, to take the places of bad ones.",
        default=0,
    )
    avoid_bad: bool = _slurm(
        checks.boolean,
        "--avoid-bad/--no-avoid-bad",
        "Also avoid nodes that failed lately; `stager nodes` lists them.",
        default=False,
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
        checks.make_enum_check(Stage), "--stage", "Whether the bundle is sent.", default="auto"
    )
    transfer: TransferWay = _launch(
        checks.make_enum_check(TransferWay), "--transfer", "How the nodes get it.", default="auto"
    )
    log_mode: LogMode = setting(checks.make_enum_check(LogMode), default="private")
    container_image: str | None = _launch(
        checks.word,
        "--container-image IMAGE",
        "Image to run the ranks in: of pyxis, or a .sif or directory for Apptainer.",
        allowed="the name of an image, or the path of one",
    )
    container_mounts: tuple[str, ...] = _launch(
        checks.make_list_check(checks.mount),
        "--container-mounts SRC:DST",
        "What the container sees.",
        allowed='a list of mounts, for example ["/scratch:/scratch"]',
        default=(),
        option_allowed="SOURCE:TARGET",
        merge=_join,
    )


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """``[launch]``: the settings for starting ranks."""

    nproc_per_node: int | None = _launch(
        checks.ranks, "--nproc-per-node N|auto|gpu|cpu", "Ranks on each node.", default="auto"
    )
    """Ranks on each node; None for one a GPU, else 1; ``ONE_A_CPU``."""
    launcher: Launcher = _launch(
        checks.make_enum_check(Launcher), "--launcher", "What starts the ranks.", default="torchrun"
    )
    backend: Backend = _launch(
        checks.make_enum_check(Backend),
        "--backend",
        "The backend of torch.distributed.",
        allowed='"auto", "nccl" or "gloo"',
        default="auto",
    )
    interface: str | tuple[tuple[str, str], ...] = _launch(
        checks.interface,
        "--interface NAME",
        "auto, or a network interface's name.",
        allowed='"auto", a name like "ens1f1", or a table { "node0[1-3]" = "ens1f1" }',
        default="auto",
        option_allowed="an interface's name",
    )
    """``auto``, one interface's name, or pairs of a node pattern and an interface's name."""
    omp_num_threads: int | None = setting(checks.count_or_auto, default="auto")
    """Threads a rank, 1 or more; None for the task's CPUs divided by its ranks."""
    max_restarts: int = setting(checks.make_number_check(0), default=0)
    retries: int = _launch(
        checks.make_number_check(0),
        "--retries N",
        "Start all ranks again, if it makes sense, up to N times.",
        default=0,
    )
    # Short, since Slurm kills remaining processes KillWait (30 s by default) after it ended a job.
    grace_seconds: int = setting(checks.count, default=7)
    """Grace period of ranks after SIGTERM, in seconds."""
    watch: bool = setting(checks.boolean, default=True)
    """Watch for a job whose ranks are all silent, and find out where each of them is."""
    compile_cache: CompileCache = _launch(
        checks.make_enum_check(CompileCache),
        "--compile-cache",
        "Whether jobs share what torch.compile makes.",
        default="auto",
    )
    compile_cache_limit: int = setting(checks.size, default="2GB")
    """Most bytes of compiled code that are kept in the offline root."""
    hang_timeout: float = _launch(
        checks.seconds_or_never,
        "--hang-timeout TIME",
        "End the job once no rank prints for TIME, as in 00:30:00; 0: never.",
        default=0,
    )
    """Seconds of silence after which the job is ended; 0 for never."""
    pass_env: tuple[str, ...] = _launch(
        checks.make_list_check(checks.make_pattern_check(checks.VARIABLE)),
        "--pass-env NAME",
        "A secret variable for the ranks.",
        allowed='a list of names of variables, without their values: ["HF_TOKEN"]',
        default=(),
        option_allowed="a name, without a value",
        merge=_join,
    )
    on_failure: tuple[str, ...] = _batch(
        checks.command, "--on-failure CMD", "Start CMD if the job fails; it reads JSON.", default=()
    )


@dataclass(frozen=True, kw_only=True)
class JobOptions(SlurmOptions):
    """The options of a job in the order of the help page; None and ``()`` leave it to the settings.

    An option with the name of a setting is read as it is; the others have a row of their own.
    """

    nodes: tuple[int, int] | None = None
    bundle: Path | None = _bundle(
        Path, "--bundle FILE", "The bundle; default: the project's newest."
    )
    bundle_id: str = _bundle(
        checks.bundle_id,
        "--id ID",
        "The id the bundle must have, or 12 or more of its first digits.",
        allowed="12 to 64 hexadecimal digits, as `stager verify` and `stager inspect` show them",
        default="",
    )
    allocation: str = _bundle(
        checks.make_choice_check(ALLOCATIONS),
        "--allocation",
        "Where nodes come from; local: processes on this machine.",
        default="auto",
    )
    hosts: tuple[str, ...] = _bundle(
        lambda value: (checks.word(value),),
        "--hosts HOSTS",
        "Hosts to reach over ssh, as in node[01-08],user@gpu9.",
        allowed='hosts without blanks, as in "node[01-08],user@gpu9"',
        default=(),
    )
    host_file: Path | None = _bundle(
        Path, "--host-file FILE", "A file with one such host in each line."
    )
    avoid_bad: bool | None = None
    nproc_per_node: int | str | None = None
    launcher: Launcher | None = None
    backend: Backend | None = None
    interface: str | None = None
    stage: Stage | None = None
    transfer: TransferWay | None = None
    min_nodes: int | None = None
    spares: int | None = None
    retries: int | None = None
    log_dir: Path | None = _launch(Path, "--log-dir DIR", "Default: ~/slurm_logs.")
    outputs: tuple[str, ...] = ()
    hang_timeout: float | None = None
    compile_cache: CompileCache | None = None
    pass_env: tuple[str, ...] = ()
    container_image: str | None = None
    container_mounts: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    deep: bool = _option(
        "",
        checks.boolean,
        "--deep",
        "Read every file, try the network between all nodes.",
        default=False,
    )
    batch: bool = _batch(checks.boolean, "--batch", "Submit with sbatch.", default=False)
    wait: bool = _batch(
        checks.boolean, "--wait", "With --batch: follow the job to its end.", default=False
    )
    dry_run: bool = _batch(
        checks.boolean, "--dry-run", "Say what would be done; do nothing.", default=False
    )
    on_failure: tuple[str, ...] = ()
    show_all: bool = False


def list_rows(kind: type) -> Mapping[str, SettingRow]:
    """Return the rows of a section, by the names of its fields; a subclass keeps those it has."""
    fields = [getattr(base, "__dataclass_fields__", {}).values() for base in kind.__mro__[::-1]]
    rows = (one for one in chain(*fields) if "row" in one.metadata)
    return {one.name: one.metadata["row"] for one in rows}


@cache
def list_option_rows() -> Mapping[str, SettingRow]:
    """Return the rows of all options of a job, by the names of their fields in JobOptions."""
    sections = (ProjectConfig, ClusterConfig, LaunchConfig, JobOptions)
    rows = {name: row for kind in sections for name, row in list_rows(kind).items()}
    names = JobOptions.__dataclass_fields__
    return {name: rows[name] for name in names if name in rows and rows[name].flag}


def list_slurm_rows() -> dict[str, SettingRow]:
    """Return the rows of the options that Slurm has by the same name."""
    return {name: row for name, row in list_rows(SlurmOptions).items() if name != "salloc_args"}


def make_key(name: str) -> str:
    """Return the key, and Slurm's long option, of a field: ``cpus-per-task``."""
    return name.replace("_", "-")
