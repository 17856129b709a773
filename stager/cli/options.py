"""Options that commands share, as dataclasses; a job's options are made of them."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, cast

import typer
import typer.models

from bundle.protocol.counts import counted
from bundle.protocol.enumerations import Backend, Launcher, Stage, TransferWay

from .application import (
    checked,
    choice,
    each,
    make_console,
    make_reports,
    member_of,
    one_of,
    path_option,
    settings_place,
)

if TYPE_CHECKING:
    from ..building.build import BuildOptions
    from ..config.load import Config
    from ..console.job_result import Console
    from ..console.reports import Reports
    from ..jobs.job_description import JobOptions
    from ..lock.resolver import ResolverName
    from ..logs.job_files import JobFiles


# --- Options that commands share, a file for each noun; `job` makes a job's options of them ------


# --- The amount and the form of a command's output, and the file that it writes ------------------

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="Print only errors and results.")]
Verbose = Annotated[bool, typer.Option("-v", "--verbose", help="Print what is done, and how.")]


def file_option(help_text: str) -> typer.models.OptionInfo:
    """Return the option that names the file a command writes."""
    option: typer.models.OptionInfo = typer.Option(
        "-o", "--output", metavar="FILE", parser=path_option, help=help_text
    )
    return option


@dataclass(frozen=True, kw_only=True)
class Talk:
    """The amount and the form of a command's output."""

    quiet: Quiet = False
    verbose: Verbose = False
    json: Json = False

    def console(self) -> Console:
        """Return the output of a command with a job."""
        return make_console(quiet=self.quiet, verbose=self.verbose, as_json=self.json)

    def reports(self) -> Reports:
        """Return the output of a command without a job."""
        return make_reports(quiet=self.quiet, verbose=self.verbose, as_json=self.json)


# --- Submitting a job, and the batch script it is ------------------------------------------------

DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be done; do nothing.")]


@dataclass(frozen=True, kw_only=True)
class BatchFlags:
    """Submitting a job, waiting for it, or only planning it; and what hears of its failure."""

    panel: ClassVar[str] = "Batch jobs and failures"

    batch: Annotated[bool, typer.Option("--batch", help="Submit with sbatch.")] = False
    wait: Annotated[
        bool, typer.Option("--wait", help="With --batch: follow the job to its end.")
    ] = False
    dry_run: DryRun = False
    on_failure: Annotated[
        str | None,
        typer.Option(
            "--on-failure", metavar="CMD", help="Start CMD if the job fails; it reads JSON."
        ),
    ] = None

    def check(self) -> None:
        """Refuse ``--wait`` alone: a job that is not submitted is always waited for."""
        if self.wait and not self.batch:
            raise typer.BadParameter("it needs --batch", param_hint="--wait")


@dataclass(frozen=True, kw_only=True)
class ScriptFlags:
    """The kind of batch script that is printed."""

    panel: ClassVar[str] = "The script"

    requeue: Annotated[
        bool,
        typer.Option("--requeue", help="Requeue at the time limit; resume from a checkpoint."),
    ] = False
    embed: Annotated[
        bool | None,
        typer.Option(
            "--embed/--no-embed",
            show_default=False,
            help="Put the node program into the script (460 kB), or take it from the bundle, which"
            " nodes must see. Default: from a bundle on a shared file system.",
        ),
    ] = None


# --- The request to Slurm for nodes: the long and the short options are salloc's own -------------


@dataclass(frozen=True, kw_only=True)
class SlurmFlags:
    """The request to Slurm."""

    panel: ClassVar[str] = "Slurm"

    nodes: Annotated[
        str | None, typer.Option("-N", "--nodes", metavar="N|MIN:MAX", help="How many nodes.")
    ] = None
    partition: Annotated[
        str | None, typer.Option("-p", "--partition", metavar="NAME", help="Slurm partition.")
    ] = None
    time: Annotated[
        str | None,
        typer.Option("-t", "--time", metavar="TIME", help="Time limit, as in 00:30:00."),
    ] = None
    exclude: Annotated[
        str | None,
        typer.Option("-x", "--exclude", metavar="NODES", help="Nodes to avoid, as in n02,n05."),
    ] = None
    nodelist: Annotated[
        str | None,
        typer.Option("-w", "--nodelist", metavar="NODES", help="Nodes that must be among them."),
    ] = None
    account: Annotated[
        str | None, typer.Option("-A", "--account", metavar="NAME", help="Slurm account.")
    ] = None
    qos: Annotated[
        str | None, typer.Option("--qos", metavar="NAME", help="Quality of service.")
    ] = None
    constraint: Annotated[
        str | None,
        typer.Option("-C", "--constraint", metavar="LIST", help="Features that nodes must have."),
    ] = None
    reservation: Annotated[
        str | None, typer.Option("--reservation", metavar="NAME", help="Slurm reservation.")
    ] = None
    mem: Annotated[
        str | None, typer.Option("--mem", metavar="SIZE", help="Memory on each node, as in 64G.")
    ] = None
    cpus_per_task: Annotated[
        int | None,
        typer.Option("-c", "--cpus-per-task", metavar="N", help="CPUs on each node."),
    ] = None
    gpus_per_node: Annotated[
        str | None,
        typer.Option("--gpus-per-node", metavar="[TYPE:]N", help="GPUs on each node."),
    ] = None
    salloc_arg: Annotated[
        list[str] | None,
        typer.Option(
            "--salloc-arg", metavar="ARG", help="A further option, passed on; may be repeated."
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class RequestFlags(SlurmFlags):
    """The request to Slurm for nodes that a job runs on."""

    avoid_bad: Annotated[
        bool | None,
        typer.Option(
            "--avoid-bad/--no-avoid-bad",
            show_default=False,
            help="Also avoid nodes that failed lately; `stager nodes` lists them.",
        ),
    ] = None


# --- The bundle that a command uses, and the place of the nodes it is put on ---------------------

Bundle = Annotated[
    Path | None,
    typer.Option(
        "--bundle",
        metavar="FILE",
        parser=path_option,
        help="The bundle; default: the project's newest.",
    ),
]
BundleId = Annotated[
    str | None,
    typer.Option(
        "--id", metavar="ID", help="The id the bundle must have, or 12 or more of its first digits."
    ),
]
Allocation = Annotated[
    str,
    choice(
        ("auto", "slurm", "ssh", "local"),
        "Where nodes come from; local: processes on this machine.",
    ),
]


@dataclass(frozen=True, kw_only=True)
class BundleFlags:
    """The bundle that is used."""

    panel: ClassVar[str] = "The bundle and where it goes"

    bundle: Bundle = None
    id: BundleId = None

    @property
    def asked(self) -> str:
        """The id that the bundle must have, or its first digits; empty for any."""
        return bundle_id(self.id, "--id")


@dataclass(frozen=True, kw_only=True)
class PlaceFlags(BundleFlags):
    """The bundle, and the nodes it is put on."""

    allocation: Allocation = "auto"
    hosts: Annotated[
        str | None,
        typer.Option(
            "--hosts", metavar="HOSTS", help="Hosts to reach over ssh, as in node[01-08],user@gpu9."
        ),
    ] = None
    host_file: Annotated[
        Path | None,
        typer.Option(
            "--host-file",
            metavar="FILE",
            parser=path_option,
            help="A file with one such host in each line.",
        ),
    ] = None


def bundle_id(text: str | None, option: str) -> str:
    """Return an id or its first digits, in lower case; empty for none; else a usage error.

    Other tools write the kind of a digest before it, ``sha256:``.
    """
    if text is None:
        return ""
    digits = text.lower().removeprefix("sha256:")
    if not re.fullmatch(r"[0-9a-f]{12,64}", digits):
        raise typer.BadParameter(
            f"{text!r} cannot be used, allowed: 12 to 64 hexadecimal digits, as `stager verify` "
            "and `stager inspect` show them",
            param_hint=option,
        )
    return digits


# --- The job whose logs a command reads ----------------------------------------------------------

LogDir = Annotated[
    Path | None,
    typer.Option("--log-dir", metavar="DIR", parser=path_option, help="Default: ~/slurm_logs."),
]
JobArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="[JOB|DIR]", help="A job's number or a directory of logs; default: the newest job."
    ),
]


def job_files(job: str | None, log_dir: Path | None) -> JobFiles:
    """Return the files of a job, by default of the newest."""
    from ..logs.job_files import default_folder, find

    return find(job, default_folder(log_dir))


def chosen_files(
    job: str | None, log_dir: Path | None, console: Console, *, named: bool = True
) -> JobFiles:
    """Return a job's files, or the newest's; its project, maybe a secret, is shown if ``named``."""
    files = job_files(job, log_dir)
    if job is None:
        console.say(f"newest job: {files.describe(with_project=named)}")
    if files.other_jobs:
        newest = max(log.job for log in files.logs)
        jobs = counted(len(files.other_jobs) + 1, "job")
        console.say(
            f"newest job: {newest}, of {jobs} in {files.folder}; "
            "--log-dir and a number choose another one"
        )
    return files


# --- The staging of the bundle and the start of the ranks ----------------------------------------

NprocPerNode = Annotated[
    str | None,
    typer.Option("--nproc-per-node", metavar="N|auto|gpu|cpu", help="Ranks on each node."),
]
Command = Annotated[
    list[str] | None,
    typer.Argument(metavar="[-- COMMAND...]", help="A script or -m MODULE, and its arguments."),
]


@dataclass(frozen=True, kw_only=True)
class LaunchFlags:
    """The staging of the bundle and the start of the ranks."""

    panel: ClassVar[str] = "Staging and launching"

    nproc_per_node: NprocPerNode = None
    launcher: Annotated[str | None, choice(Launcher, "What starts the ranks.")] = None
    backend: Annotated[str | None, choice(Backend, "The backend of torch.distributed.")] = None
    interface: Annotated[
        str | None, typer.Option(metavar="NAME", help="auto, or a network interface's name.")
    ] = None
    stage: Annotated[
        str | None,
        choice(Stage, "Whether the bundle is sent."),
    ] = None
    transfer: Annotated[
        str | None,
        choice(TransferWay, "How the nodes get it."),
    ] = None
    min_nodes: Annotated[
        int | None,
        typer.Option("--min-nodes", metavar="N", min=1, help="Leave out bad nodes, but keep N."),
    ] = None
    log_dir: LogDir = None
    outputs: Annotated[
        list[str] | None,
        typer.Option(
            "--outputs",
            metavar="PATH",
            help="What to bring back where nodes do not see this folder; repeatable.",
        ),
    ] = None
    pass_env: Annotated[
        list[str] | None,
        typer.Option("--pass-env", metavar="NAME", help="A secret variable for the ranks."),
    ] = None
    container_image: Annotated[
        str | None,
        typer.Option(
            "--container-image",
            metavar="IMAGE",
            help="Image to run the ranks in: of pyxis, or a .sif or directory for Apptainer.",
        ),
    ] = None
    container_mounts: Annotated[
        list[str] | None,
        typer.Option("--container-mounts", metavar="SRC:DST", help="What the container sees."),
    ] = None


# --- The pinning of the requirements: the options of ``lock`` and ``build`` ----------------------

RESOLVERS = ("auto", "uv", "pip-tools")
Resolver = Annotated[str, choice(RESOLVERS, "What pins the requirements; auto is uv.")]
Offline = Annotated[bool, typer.Option("--offline", help="Fetch nothing.")]
Script = Annotated[
    Path | None,
    typer.Argument(
        metavar="[SCRIPT]",
        parser=path_option,
        help="A script that says itself what it needs (PEP 723); default: the project.",
    ),
]


def settings_for(script: Path | None) -> Config:
    """Return the settings of a script, or of this directory's project."""
    from ..config.inline_script import load_script
    from ..config.load import load

    return load(settings_place()) if script is None else load_script(script)


@dataclass(frozen=True, kw_only=True)
class ResolveFlags:
    """The way requirements are resolved, and the pins of the old lock that are kept."""

    resolver: Resolver = "uv"
    offline: Offline = False
    upgrade: Annotated[
        bool, typer.Option("--upgrade", "-U", help="Take the newest versions; keep no pin.")
    ] = False
    upgrade_package: Annotated[
        list[str] | None,
        typer.Option(
            "--upgrade-package",
            "-P",
            metavar="NAME",
            help="Do not keep this package's pin, or this model's commit.",
        ),
    ] = None
    exclude_newer: Annotated[
        str | None,
        typer.Option(
            "--exclude-newer",
            metavar="DATE",
            help="Ignore files uploaded after DATE. The lock keeps it; none lifts it.",
        ),
    ] = None

    def options(self, options: BuildOptions) -> BuildOptions:
        """Return these options in those of a build; values that cannot be used are usage errors."""
        upgraded = tuple(self.upgrade_package or ())
        for name in upgraded:
            if not _is_name(name):
                raise typer.BadParameter(
                    f"{name!r} is not the name of a package, a model or a data set",
                    param_hint="--upgrade-package",
                )
        if options.locked and (self.upgrade or upgraded):
            raise typer.BadParameter(
                "cannot be used with --locked, which takes the lock as it is",
                param_hint="--upgrade" if self.upgrade else "--upgrade-package",
            )
        return replace(
            options,
            resolver=resolver_name(self.resolver),
            offline=self.offline,
            upgrade=self.upgrade,
            upgrade_packages=upgraded,
            exclude_newer=_cutoff(self.exclude_newer),
        )


def _is_name(text: str) -> bool:
    from packaging.utils import InvalidName, canonicalize_name

    from ..hub.repositories import parse_request

    try:
        canonicalize_name(text, validate=True)
    except InvalidName:
        try:
            parse_request("model", text)
        except ValueError:
            return False
    return True


def _cutoff(text: str | None) -> str | None:
    from ..lock import resolver

    if text is None:
        return None
    try:
        return resolver.checked(text)
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} cannot be used, allowed: {resolver.ALLOWED}", param_hint="--exclude-newer"
        ) from None


def resolver_name(text: str) -> ResolverName:
    """Return a resolver's name, checked."""
    return cast("ResolverName", one_of(RESOLVERS, text, "--resolver"))


# --- The options of a job, as values that the job takes ------------------------------------------

_WAITED_FOR = BatchFlags()


def job_options(
    slurm: SlurmFlags,
    launch: LaunchFlags,
    place: PlaceFlags,
    batch: BatchFlags = _WAITED_FOR,
    *,
    verbose: bool = False,
) -> JobOptions:
    """Return the options of a job; a value that cannot be used is a usage error."""
    from ..config import checks
    from ..config.sections import output
    from ..slurm.request import ALLOCATIONS

    name = checks.matching(checks.VARIABLE)
    batch.check()
    return replace(
        _request(slurm),
        nproc_per_node=ranks(launch.nproc_per_node),
        launcher=member_of(Launcher, launch.launcher, "--launcher"),
        backend=member_of(Backend, launch.backend, "--backend"),
        interface=checked(
            checks.interface_name, launch.interface, "--interface", "an interface's name"
        ),
        stage=member_of(Stage, launch.stage, "--stage"),
        transfer=member_of(TransferWay, launch.transfer, "--transfer"),
        min_nodes=checked(checks.whole(1), launch.min_nodes, "--min-nodes", checks.COUNT),
        log_dir=launch.log_dir,
        outputs=each(output, launch.outputs, "--outputs", "a path or pattern inside this folder"),
        pass_env=each(name, launch.pass_env, "--pass-env", "a name, without a value"),
        container_image=checked(
            checks.word, launch.container_image, "--container-image", "one word"
        ),
        container_mounts=each(
            checks.mount, launch.container_mounts, "--container-mounts", "SOURCE:TARGET"
        ),
        allocation=cast("str", one_of(ALLOCATIONS, place.allocation, "--allocation")),
        hosts=_hosts(place.hosts),
        host_file=place.host_file,
        bundle=place.bundle,
        bundle_id=place.asked,
        batch=batch.batch,
        wait=batch.wait,
        dry_run=batch.dry_run,
        on_failure=checked(checks.command, batch.on_failure, "--on-failure", checks.COMMAND) or (),
        show_all=verbose,
    )


def ranks(text: str | None) -> int | str | None:
    """Return the value of ``--nproc-per-node``; one that cannot be used is a usage error."""
    from ..config import checks

    number = int(text) if text and text.isascii() and text.isdecimal() else text
    return checked(checks.ranks, number, "--nproc-per-node", checks.RANKS)


def _hosts(text: str | None) -> tuple[str, ...]:
    """Return the list of hosts; an empty one is a usage error, not none."""
    from ..config import checks

    listed = 'hosts without blanks, as in "node[01-08],user@gpu9"'
    return () if text is None else (str(checked(checks.word, text, "--hosts", listed)),)


def _request(slurm: SlurmFlags) -> JobOptions:
    from ..config import checks
    from ..jobs.job_description import JobOptions

    nodes = f"N or MIN:MAX, from 1 to {checks.MOST}"
    listed = 'a node list without blanks, as in "node02,node[05-07]"'
    return JobOptions(
        nodes=checked(checks.node_range, slurm.nodes, "--nodes", nodes),
        partition=checked(checks.word, slurm.partition, "--partition", "one word"),
        time=checked(checks.slurm_time, slurm.time, "--time", checks.TIME),
        exclude=checked(checks.node_list, slurm.exclude, "--exclude", listed),
        avoid_bad=slurm.avoid_bad if isinstance(slurm, RequestFlags) else None,
        nodelist=checked(checks.node_list, slurm.nodelist, "--nodelist", listed),
        account=checked(checks.word, slurm.account, "--account", "one word"),
        qos=checked(checks.word, slurm.qos, "--qos", "one word"),
        constraint=checked(checks.word, slurm.constraint, "--constraint", "one word"),
        reservation=checked(checks.word, slurm.reservation, "--reservation", "one word"),
        mem=checked(checks.memory, slurm.mem, "--mem", checks.MEMORY),
        cpus_per_task=checked(
            checks.whole(1), slurm.cpus_per_task, "--cpus-per-task", checks.COUNT
        ),
        gpus_per_node=checked(checks.gpus, slurm.gpus_per_node, "--gpus-per-node", checks.GPUS),
        salloc_args=each(checks.text, slurm.salloc_arg, "--salloc-arg", "an option of salloc"),
    )
