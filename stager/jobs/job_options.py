"""The options of a job, and the settings as they change them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bundle.protocol.counts import counted
from bundle.protocol.enumerations import Backend, Launcher, Stage, TransferWay
from bundle.protocol.job import ONE_A_CPU

from ..config.load import Config
from ..config.sections import LaunchConfig, ranks_on_node
from ..core.errors import ConfigError
from ..core.files import expanded


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """The options of a job; None leaves a value to the settings."""

    nodes: tuple[int, int] | None = None
    """Fewest and most nodes."""
    min_nodes: int | None = None
    """Nodes that must be able to run the job."""
    nproc_per_node: int | str | None = None
    """Ranks on each node: a number, ``auto``, ``gpu`` or ``cpu``."""
    launcher: Launcher | None = None
    """The program that starts the ranks."""
    backend: Backend | None = None
    """The backend of torch.distributed."""
    interface: str | None = None
    """``auto`` or a network interface's name."""
    stage: Stage | None = None
    """The rule by which the bundle is sent to the nodes."""
    transfer: TransferWay | None = None
    """The way in which it is sent."""
    partition: str | None = None
    """Slurm partition."""
    account: str | None = None
    """Slurm account."""
    time: str | None = None
    """Time limit, as Slurm writes it."""
    exclude: str | None = None
    """Nodes to avoid, besides those of the settings."""
    nodelist: str | None = None
    """Nodes that must be among them, as a Slurm node list."""
    qos: str | None = None
    """Quality of service."""
    constraint: str | None = None
    """Features that nodes must have, in Slurm's notation."""
    reservation: str | None = None
    """Slurm reservation."""
    mem: str | None = None
    """Memory on each node: megabytes, or a number with K, M, G or T."""
    cpus_per_task: int | None = None
    """CPUs on each node."""
    gpus_per_node: str | None = None
    """GPUs on each node, as Slurm writes it."""
    salloc_args: tuple[str, ...] = ()
    """Further options of Slurm, after those of the settings."""
    avoid_bad: bool | None = None
    """True to avoid nodes that failed lately as well; None leaves it to the settings."""
    container_image: str | None = None
    """Image that the ranks run in."""
    container_mounts: tuple[str, ...] = ()
    """Folders of the node in the container, besides those of the settings."""
    pass_env: tuple[str, ...] = ()
    """Names of secret variables for the ranks, besides those of the settings."""
    log_dir: Path | None = None
    """The directory for logs."""
    command: tuple[str, ...] = ()
    """The command of each rank."""
    outputs: tuple[str, ...] = ()
    """What is brought back, besides the outputs of the settings."""
    allocation: str = "auto"
    """The source of the nodes: ``auto``, ``slurm``, ``ssh`` or ``local``."""
    hosts: tuple[str, ...] = ()
    """Hosts that are reached over ``ssh``, each as a list in Slurm's notation."""
    host_file: Path | None = None
    """A file that names them, a host in each line."""
    bundle: Path | None = None
    """The bundle's file; None for the project's newest."""
    bundle_id: str = ""
    """The id that the bundle must have, or 12 or more of its first digits; empty for any."""
    batch: bool = False
    """Submit the job with ``sbatch``."""
    wait: bool = False
    """Follow a submitted job to its end."""
    dry_run: bool = False
    """Stop after the plan."""
    deep: bool = False
    """Let ``verify`` read every file and try the network."""
    on_failure: tuple[str, ...] = ()
    """The command that the command line starts when the job has failed."""
    show_all: bool = False
    """Report the output of every node, and not of the first only."""


def settle(config: Config, options: JobOptions) -> Config:
    """Return the settings as the command line changes them.

    Raises:
        ConfigError: more nodes must do than there are.
    """
    own, own_launch = config.cluster, config.launch
    if options.stage and not options.transfer:  # an option counts more than a setting
        own = replace(own, transfer=TransferWay.AUTO)
    if options.transfer and not options.stage:
        own = replace(own, stage=Stage.AUTO)
    cluster = _given(
        nodes=options.nodes,
        min_nodes=options.min_nodes,
        partition=options.partition,
        account=options.account,
        time=options.time,
        exclude=all_excluded(config.cluster.exclude, options.exclude),
        nodelist=options.nodelist,
        qos=options.qos,
        constraint=options.constraint,
        reservation=options.reservation,
        mem=options.mem,
        cpus_per_task=options.cpus_per_task,
        gpus_per_node=options.gpus_per_node,
        salloc_args=(*own.salloc_args, *options.salloc_args),
        stage=options.stage,
        transfer=options.transfer,
        container_image=_image(options.container_image, Path.cwd())
        or _image(own.container_image, config.root),
        container_mounts=joined(config.cluster.container_mounts, options.container_mounts),
    )
    if options.avoid_bad is not None:  # false is a value, too
        cluster["avoid_bad"] = options.avoid_bad
    launch = _given(
        launcher=options.launcher,
        backend=options.backend,
        interface=options.interface,
        pass_env=joined(own_launch.pass_env, options.pass_env),
        on_failure=options.on_failure,
    )
    if options.nproc_per_node is not None:
        launch.update(_choose_ranks(options.nproc_per_node, options.backend, own_launch))
    settled = replace(
        config,
        project=replace(
            config.project,
            outputs=joined(config.project.outputs, options.outputs),
            **_given(command=options.command),
        ),
        cluster=replace(own, **cluster),
        launch=replace(own_launch, **launch),
    )
    most, min_nodes = settled.cluster.nodes[1], settled.cluster.min_nodes
    if min_nodes is not None and min_nodes > most:
        raise ConfigError(
            f"min-nodes: {min_nodes} must work, and the job asks for {counted(most, 'node')}",
            hint="ask for more nodes with --nodes, or for fewer with --min-nodes",
        )
    return settled


def _choose_ranks(nproc: int | str, backend: Backend | None, own: LaunchConfig) -> dict[str, Any]:
    # The setting "cpu" has chosen a backend, which another number takes back.
    is_chosen = own.nproc_per_node != ONE_A_CPU
    return ranks_on_node(nproc, backend or (own.backend if is_chosen else Backend.AUTO))


def _image(named: str | None, folder: Path) -> str | None:
    """Make an image's path absolute; end a directory's in a slash, see ``Launch.in_apptainer``."""
    if named is None or "://" in named:
        return named
    path = folder / expanded(Path(named))
    if "/" in named and path.is_dir():
        return f"{Path(*path.parts)}/"
    return str(path) if named.endswith(".sif") else named


def _given(**options: object) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value}


def all_excluded(setting: str | None, option: str | None) -> str:
    """Return the nodes to avoid, those of the settings and those of the command line."""
    return ",".join(nodes for nodes in (setting, option) if nodes)


def joined(first: tuple[str, ...], second: tuple[str, ...]) -> tuple[str, ...]:
    """Return both, one after the other, each entry once."""
    return tuple(dict.fromkeys((*first, *second)))
