"""The options that commands share, their checks, and the values they become."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar, cast

import typer

from bundle.protocol.enumerations import Backend, Launcher, Stage, TextEnum, TransferWay

from .program import make_console, make_reports

if TYPE_CHECKING:
    from ..console.job_result import Console
    from ..console.reports import Reports
    from ..jobs.job import JobOptions
    from ..lock.resolver import ResolverName
    from ..logs.files import JobFiles
    from ..pipeline import CleanOptions

T = TypeVar("T")
EnumT = TypeVar("EnumT", bound=TextEnum)


def path_option(text: str) -> Path:
    """Return an option's value as a path; an empty one is a usage error, not this folder."""
    if not text:
        raise typer.BadParameter("it is empty: is a shell variable unset?")
    return Path(text)


RESOLVERS = ("auto", "uv", "pip-tools")

LogDir = Annotated[
    Path | None,
    typer.Option("--log-dir", metavar="DIR", parser=path_option, help="Default: ~/slurm_logs."),
]
NprocPerNode = Annotated[
    int | None, typer.Option("--nproc-per-node", metavar="N", min=1, help="Ranks on each node.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="Print only errors and results.")]
Verbose = Annotated[bool, typer.Option("-v", "--verbose", help="Print what is done, and how.")]
Resolver = Annotated[str, typer.Option(metavar="NAME", help="auto, uv or pip-tools.")]
Offline = Annotated[bool, typer.Option("--offline", help="Fetch nothing.")]
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
    typer.Option(metavar="NAME", help="auto, slurm, or local: nodes as processes on this machine."),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be done; do nothing.")]
Command = Annotated[
    list[str] | None,
    typer.Argument(metavar="[-- COMMAND...]", help="A script or -m MODULE, and its arguments."),
]

JobArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="[JOB|DIR]", help="A job's number or a directory of logs; default: the newest job."
    ),
]


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


@dataclass(frozen=True, kw_only=True)
class BundleFlags:
    """The bundle that is used."""

    bundle: Bundle = None
    id: BundleId = None

    @property
    def asked(self) -> str:
        """The id that the bundle must have, or its first digits; empty for any."""
        return _bundle_id(self.id)


@dataclass(frozen=True, kw_only=True)
class PlaceFlags(BundleFlags):
    """The bundle, and the nodes it is put on."""

    allocation: Allocation = "auto"


@dataclass(frozen=True, kw_only=True)
class SlurmFlags:
    """The request to Slurm."""

    nodes: Annotated[
        str | None, typer.Option("--nodes", metavar="N|MIN:MAX", help="How many nodes.")
    ] = None
    partition: Annotated[str | None, typer.Option(metavar="NAME", help="Slurm partition.")] = None
    time: Annotated[
        str | None, typer.Option(metavar="TIME", help="Time limit, as in 00:30:00.")
    ] = None
    exclude: Annotated[
        str | None, typer.Option(metavar="NODES", help="Nodes to avoid, as in node02,node05.")
    ] = None
    account: Annotated[str | None, typer.Option(metavar="NAME", help="Slurm account.")] = None


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


@dataclass(frozen=True, kw_only=True)
class LaunchFlags:
    """The staging of the bundle and the start of the ranks."""

    nproc_per_node: NprocPerNode = None
    launcher: Annotated[
        str | None, typer.Option(metavar="NAME", help="What starts the ranks: torchrun or srun.")
    ] = None
    backend: Annotated[str | None, typer.Option(metavar="NAME", help="auto, gloo or nccl.")] = None
    interface: Annotated[
        str | None, typer.Option(metavar="NAME", help="auto, or a network interface's name.")
    ] = None
    stage: Annotated[
        str | None,
        typer.Option(metavar="WHEN", help="auto, always or never: whether to send the bundle."),
    ] = None
    transfer: Annotated[
        str | None,
        typer.Option(metavar="WAY", help="auto, relay, sbcast or shared: how nodes get it."),
    ] = None
    min_nodes: Annotated[
        int | None,
        typer.Option("--min-nodes", metavar="N", min=1, help="Leave out bad nodes, but keep N."),
    ] = None
    log_dir: LogDir = None
    pass_env: Annotated[
        list[str] | None,
        typer.Option("--pass-env", metavar="NAME", help="A secret variable for the ranks."),
    ] = None
    container_image: Annotated[
        str | None,
        typer.Option(
            "--container-image", metavar="IMAGE", help="Image for pyxis to run the ranks in."
        ),
    ] = None
    container_mounts: Annotated[
        list[str] | None,
        typer.Option("--container-mounts", metavar="SRC:DST", help="What the container sees."),
    ] = None


@dataclass(frozen=True, kw_only=True)
class BatchFlags:
    """Submitting a job, waiting for it, or only planning it; and what hears of its failure."""

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

    requeue: Annotated[
        bool,
        typer.Option("--requeue", help="Requeue at the time limit; resume from a checkpoint."),
    ] = False
    no_embed: Annotated[
        bool,
        typer.Option("--no-embed", help="Take the node program from the bundle, which nodes see."),
    ] = False


@dataclass(frozen=True, kw_only=True)
class CleanFlags:
    """The parts that are cleaned, and how thoroughly."""

    nodes_only: Annotated[
        bool, typer.Option("--nodes-only", help="Leave the offline root alone.")
    ] = False
    store_only: Annotated[bool, typer.Option("--store-only", help="Leave the nodes alone.")] = False
    everything: Annotated[
        bool, typer.Option("--all", help="Remove every project's newest bundle as well.")
    ] = False
    wheels: Annotated[
        bool,
        typer.Option(
            "--wheels",
            help="Remove wheels that no lock names, too.",
        ),
    ] = False
    dry_run: DryRun = False

    def options(self, job: JobOptions) -> CleanOptions:
        """Return the options of a removal; two that leave nothing to clean are a usage error."""
        from ..pipeline import CleanOptions

        if self.nodes_only and self.store_only:
            raise typer.BadParameter("cannot be used with --store-only", param_hint="--nodes-only")
        return CleanOptions(
            nodes=not self.store_only,
            store=not self.nodes_only,
            everything=self.everything,
            wheels=self.wheels,
            dry_run=self.dry_run,
            job=job,
        )


def job_options(
    slurm: SlurmFlags,
    launch: LaunchFlags,
    place: PlaceFlags,
    batch: BatchFlags = BatchFlags(),
    *,
    verbose: bool = False,
) -> JobOptions:
    """Return the options of a job; a value that cannot be used is a usage error."""
    from ..config import checks
    from ..jobs.job import JobOptions
    from ..slurm.request import ALLOCATIONS

    name = checks.matching(checks.VARIABLE)
    nodes = f"N or MIN:MAX, from 1 to {checks.MOST}"
    excluded = 'a node list without blanks, as in "node02,node[05-07]"'
    batch.check()
    return JobOptions(
        nodes=_checked(checks.node_range, slurm.nodes, "--nodes", nodes),
        partition=_checked(checks.word, slurm.partition, "--partition", "one word"),
        time=_checked(checks.slurm_time, slurm.time, "--time", "minutes, 00:30:00, 1-12:00"),
        exclude=_checked(checks.node_list, slurm.exclude, "--exclude", excluded),
        avoid_bad=slurm.avoid_bad if isinstance(slurm, RequestFlags) else None,
        account=_checked(checks.word, slurm.account, "--account", "one word"),
        nproc_per_node=_checked(
            checks.whole(1), launch.nproc_per_node, "--nproc-per-node", checks.COUNT
        ),
        launcher=member_of(Launcher, launch.launcher, "--launcher"),
        backend=member_of(Backend, launch.backend, "--backend"),
        interface=_checked(
            checks.interface_name, launch.interface, "--interface", "an interface's name"
        ),
        stage=member_of(Stage, launch.stage, "--stage"),
        transfer=member_of(TransferWay, launch.transfer, "--transfer"),
        min_nodes=_checked(checks.whole(1), launch.min_nodes, "--min-nodes", checks.COUNT),
        log_dir=launch.log_dir,
        pass_env=_each(name, launch.pass_env, "--pass-env", "a name, without a value"),
        container_image=_checked(
            checks.word, launch.container_image, "--container-image", "one word"
        ),
        container_mounts=_each(
            checks.mount, launch.container_mounts, "--container-mounts", "SOURCE:TARGET"
        ),
        allocation=cast("str", one_of(ALLOCATIONS, place.allocation, "--allocation")),
        bundle=place.bundle,
        bundle_id=place.asked,
        batch=batch.batch,
        wait=batch.wait,
        dry_run=batch.dry_run,
        on_failure=_checked(checks.command, batch.on_failure, "--on-failure", checks.COMMAND) or (),
        show_all=verbose,
    )


def _bundle_id(text: str | None) -> str:
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
            param_hint="--id",
        )
    return digits


def job_files(job: str | None, log_dir: Path | None) -> JobFiles:
    """Return the files of a job, by default of the newest."""
    from ..logs.files import default_folder, find

    return find(job, default_folder(log_dir))


def chosen_files(
    job: str | None, log_dir: Path | None, console: Console, *, named: bool = True
) -> JobFiles:
    """Return the files of a job; without a number, of the newest, and say which one that is.

    Args:
        job: the job's number, or a directory.
        log_dir: the directory for the logs of jobs.
        console: shows which job was chosen.
        named: False to leave out the project's name, which may be a secret.
    """
    files = job_files(job, log_dir)
    if job is None:
        summary = files.summary
        console.say(f"newest job: {summary if named else replace(summary, project='')}")
    return files


def resolver_name(text: str) -> ResolverName:
    """Return a resolver's name, checked."""
    return cast("ResolverName", one_of(RESOLVERS, text, "--resolver"))


def one_of(allowed: tuple[str, ...], text: str | None, option: str) -> str | None:
    """Return an option's value; one that is not allowed is a usage error."""
    if text is None or text in allowed:
        return text
    raise typer.BadParameter(f"{text!r} is not one of {', '.join(allowed)}", param_hint=option)


def member_of(kind: type[EnumT], text: str | None, option: str) -> EnumT | None:
    """Return an option's value as a word of an enumeration; another one is a usage error."""
    chosen = one_of(tuple(str(word) for word in kind), text, option)
    return None if chosen is None else kind(chosen)


def _checked(
    check: Callable[[object], T], value: str | int | None, option: str, allowed: str
) -> T | None:
    """Return an option's value, read as the same key of the settings is."""
    if value is None:
        return None
    try:
        return check(value)
    except ValueError:
        raise typer.BadParameter(
            f"{value!r} cannot be used, allowed: {allowed}", param_hint=option
        ) from None


def _each(
    check: Callable[[object], str], texts: list[str] | None, option: str, allowed: str
) -> tuple[str, ...]:
    values = (_checked(check, text, option, allowed) for text in texts or ())
    return tuple(value for value in values if value is not None)


def node_counts(texts: list[str] | None, most: int) -> tuple[int, ...]:
    """Return numbers of nodes, each once, the fewest first; another value is a usage error.

    Args:
        texts: each one number, or several with commas between.
        most: the largest that is allowed.
    """
    words = [word.strip() for text in texts or () for word in text.split(",")]
    return tuple(sorted({_node_count(word, most) for word in words}))


def _node_count(word: str, most: int) -> int:
    count = int(word) if word.isascii() and word.isdigit() else 0
    if not 1 <= count <= most:
        raise typer.BadParameter(
            f"{word!r} cannot be used, allowed: 1 to {most}, as in 1,8,64",
            param_hint="--nodes",
        )
    return count
