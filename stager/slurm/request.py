"""The request for nodes: where they come from, and whether a partition could satisfy it."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Literal, NamedTuple

from bundle.protocol.counts import format_count
from bundle.protocol.dataclass import dataclass
from bundle.protocol.problem import NodeError
from bundle.system.hostlist import expand_hostlist

from ..config.job_settings import ALLOCATIONS, SlurmOptions, list_slurm_rows, make_key
from ..config.load import Config
from ..core.errors import ConfigError, StagerError
from ..core.processes import CommandError, Runner, run, run_with_input

COMMANDS = ("salloc", "sbatch", "srun", "sbcast", "scontrol", "squeue")
"""What must be on PATH to use Slurm from here."""
INSIDE = ("srun", "sbcast", "scontrol", "squeue")  # what must be on PATH inside an allocation

GivenOption = tuple[str, str, list[str]]
"""An option's long name, its value, and the words that give it."""

Source = Literal["local", "ssh", "inside", "salloc", "sbatch"]
"""Processes on this machine; hosts; the allocation this runs in; a new allocation; a batch job."""


@dataclass(frozen=True, kw_only=True)
class Request(SlurmOptions):
    """A request for nodes; None leaves an option to Slurm's own default.

    Those of ``salloc_args`` that exclude nodes are part of ``exclude``.
    """

    name: str
    nodes: tuple[int, int]
    comment: str | None = None  # for ``squeue`` and the accounting: which bundle the job runs

    def make_named_options(self) -> dict[str, str | None]:
        """Return the values of the options that jobs of all kinds share, by long name."""
        least, most = self.nodes
        exact = least == most
        options = {"job-name": self.name, "nodes": str(least) if exact else f"{least}-{most}"}
        # With a range, it would have Slurm give the fewest of the nodes (seen with 22.05).
        shared: dict[str, str | None] = {**options, "ntasks-per-node": "1" if exact else None}
        for name in list_slurm_rows():
            value = getattr(self, name)
            shared.setdefault(make_key(name), None if value is None else str(value))
        return {**shared, "comment": self.comment}

    def options(self) -> list[str]:
        """Return the options that ``salloc`` and ``sbatch`` share, without ``salloc_args``."""
        options = self.make_named_options().items()
        return [f"--{key}={value}" for key, value in options if value is not None]


def choose_source(
    asked: str,
    *,
    nodes: int,
    batch: bool,
    inside: str,
    found: Collection[str],
    hosts_from: str = "",
) -> Source:
    """Decide where the nodes come from.

    Args:
        asked: one of :data:`ALLOCATIONS`.
        nodes: the least number of nodes for the job.
        batch: True for a batch job.
        inside: ``SLURM_JOB_ID``; empty outside of an allocation.
        found: those of :data:`COMMANDS` that are on PATH.
        hosts_from: the place that names hosts, such as ``--hosts``; empty if none are named.
    """
    if asked not in ALLOCATIONS:
        allowed = f"--allocation {asked} is not one of {', '.join(ALLOCATIONS)}"
        raise ConfigError(allowed, hint="auto uses Slurm where it is available")
    has_option = hosts_from.startswith("--")
    # The hosts of a file count less than an allocation of Slurm.
    is_over_ssh = has_option or asked == "ssh" or (asked == "auto" and hosts_from and not inside)
    _refuse_source(asked, hosts_from, batch=batch, is_over_ssh=bool(is_over_ssh))
    if asked == "local":
        return "local"
    if is_over_ssh:
        return "ssh"
    return _choose_slurm_source(asked, nodes, batch=batch, inside=inside, found=found)


def _refuse_source(asked: str, hosts_from: str, *, batch: bool, is_over_ssh: bool) -> None:
    hint = "leave one of the two out"
    if asked in ("slurm", "local") and hosts_from.startswith("--"):
        why = f"{hosts_from} and --allocation {asked}: hosts are reached over ssh"
    elif asked == "ssh" and not hosts_from:
        why = "--allocation ssh: no hosts are named"
        hint = "name them: --hosts node[01-08], --host-file FILE, or [cluster] hosts in stager.toml"
    elif batch and is_over_ssh:
        why = f"--batch and hosts over ssh ({hosts_from}): a batch job needs Slurm"
        hint = "leave --batch out; to go on after you log out, start it with nohup or in tmux"
    elif batch and asked == "local":
        why = "--batch and --allocation local: a batch job needs Slurm"
    else:
        return
    raise ConfigError(why, hint=hint)


def _choose_slurm_source(
    asked: str, nodes: int, *, batch: bool, inside: str, found: Collection[str]
) -> Source:
    source: Source = "sbatch" if batch else "inside" if inside else "salloc"
    commands = {"inside": INSIDE}.get(source, COMMANDS)
    missing = [name for name in commands if name not in found]
    if not missing:
        return source
    if asked == "auto" and nodes == 1 and source == "salloc":
        return "local"
    reason = f"--allocation {asked}" if asked == "slurm" else f"the job needs {nodes} nodes"
    needed_by = {"sbatch": "--batch", "inside": f"job {inside}"}.get(source, reason)
    raise ConfigError(
        f"{needed_by}: Slurm is not available here (not on PATH: {', '.join(missing)})",
        hint="go to a login node of the cluster, or load its module; without Slurm name the hosts "
        "with --hosts, or try the job with --allocation local, on this machine",
    )


def make_request(config: Config, env: Mapping[str, str], bundle_id: str = "") -> Request:
    """Return the request for a job's nodes.

    The settings come first, then the user's own ``$SALLOC_OPTS``; nodes to avoid are joined.
    """
    cluster = config.cluster
    given = list(_read_options(cluster.salloc_args, "cluster.salloc-args, --salloc-arg"))
    own = list(_read_options(_split_salloc_opts(env), "SALLOC_OPTS"))
    excluded = [cluster.exclude, *(value for name, value, _ in (*given, *own) if name == "exclude")]
    further = [words for name, _, words in (*given, *own) if name != "exclude"]
    least, most = cluster.nodes
    options = {
        **{name: getattr(cluster, name) for name in list_slurm_rows()},
        "nodes": (least + cluster.spares, most + cluster.spares),
        "exclude": ",".join(dict.fromkeys(filter(None, excluded))) or None,
        # Where nothing is said, each rank gets at least a CPU; Slurm's default is one a node.
        "cpus_per_task": cluster.cpus_per_task or config.launch.nproc_per_node or None,
    }
    asked = Request(
        **options,
        salloc_args=tuple(chain.from_iterable(further)),
        name=config.name,
        comment=f"stager:{bundle_id[:12]}" if bundle_id else None,
    )
    _refuse_contradictions(given, asked)
    _refuse_fixed(own, asked, config)
    return asked


def _split_salloc_opts(env: Mapping[str, str]) -> list[str]:
    try:
        return shlex.split(env.get("SALLOC_OPTS", ""))
    except ValueError as exc:
        hint = "close the quote in that variable"
        raise ConfigError(f"SALLOC_OPTS cannot be read: {exc}", hint=hint) from exc


def _refuse_fixed(own: Sequence[GivenOption], asked: Request, config: Config) -> None:
    """Refuse options of ``SALLOC_OPTS`` that change what the site has fixed."""
    named = asked.make_named_options()
    for name, value, words in own:
        if config.is_fixed(f"cluster.{name}") and value != named.get(name):
            what = f"SALLOC_OPTS: {' '.join(words)}: cluster.{name} is fixed by your site"
            raise ConfigError(what, hint="leave it out of that variable")


def make_salloc_argv(asked: Request) -> tuple[str, ...]:
    """Return the beginning of a command that runs the rest inside a new allocation."""
    # A command whose allocation is revoked can still report; and when a node is lost the driver
    # ends the job itself, and collects the results of the other nodes.
    fixed = ("--kill-command=TERM", "--no-kill")
    return ("salloc", *asked.options(), *fixed, *asked.salloc_args)


def _read_options(words: Sequence[str], place: str) -> Iterator[GivenOption]:
    long_names = {row.flag[1]: make_key(name) for name, row in list_slurm_rows().items()}
    long_names |= {"J": "job-name", "n": "ntasks", "q": "qos"}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("-"):
            hint = f"options begin with dashes: --{word}"
            raise ConfigError(f"{place}: {word} is not an option of Slurm", hint=hint)
        name, equals, value = word[2:].partition("=")
        if not word.startswith("--"):
            name, value = long_names.get(word[1:2], word[1:2]), word[2:].removeprefix("=")
        given = [word]
        if not (equals or value) and rest and not rest[0].startswith("-"):
            value = rest.pop(0)
            given.append(value)
        yield name, value, given


def _refuse_contradictions(given: Sequence[GivenOption], asked: Request) -> None:
    """Refuse options of the settings that would override what the job relies on."""
    free = ("exclude", "comment")  # joined; and the user's own wins
    own = {name: value for name, value in asked.make_named_options().items() if name not in free}
    own |= {"job-name": None, "ntasks-per-node": "1"}
    for name, value, words in given:
        if name in ("ntasks", "ntasks-per-node") and value != own.get(name):
            why, instead = "one task is started on each node", "--nproc-per-node for ranks"
        elif own.get(name) not in (None, value):
            why, instead = f"the job has --{name}={own[name]}", f"cluster.{name}"
        else:
            continue
        what = f"cluster.salloc-args, --salloc-arg: {' '.join(words)} contradicts the job: {why}"
        raise ConfigError(what, hint=f"leave it out, and use {instead}")


# --- The command that runs a build from source on a node: ``stager build --on-node`` -------------


def make_build_launcher(config: Config, env: Mapping[str, str]) -> tuple[str, ...]:
    """Return the beginning of a command that runs the rest on a node; nothing without Slurm.

    It is a step of the allocation that this runs in, else a job of its own.
    """
    if shutil.which("srun", path=env.get("PATH")) is None:
        return ()
    if env.get("SLURM_JOB_ID"):
        cpus = env.get("SLURM_CPUS_ON_NODE", "")
        share = [f"--cpus-per-task={cpus}"] if cpus.isdigit() else []
        shape = ("--job-name=stager-build", "--nodes=1", "--ntasks=1")
        return ("srun", *shape, *share, "--overlap", "--mpi=none")
    asked = replace(make_request(config, env), name="stager-build", nodes=(1, 1))
    return ("srun", *asked.options(), "--mpi=none", *asked.salloc_args)


# --- Requests that no partition could ever satisfy: Slurm would let them wait forever ------------

_SECONDS = 60  # time limit for each command; where Slurm does not answer, nothing is refused here
LISTING = ("sinfo", "--all", "--Node", "--noheader", "--format=%P %N %c %T")
_DOWN = ("down", "drain", "fail", "error", "inval", "unknown", "power", "reboot", "maint", "future")
"""Beginnings of the states of nodes that no job gets for the time being (man sinfo)."""
_REFUSED = re.compile(r"not available|[Nn]ode count specification|More processors requested")
_OVERRIDING = (
    *("-p", "--part", "-M", "--clu", "-c", "--cpu", "-N", "--nodes", "-n", "--ntask", "-O"),
    *("--over", "--res", "--tasks"),
)
"""Beginnings of options after which the request is not what the settings say."""
_OVERRIDING_VARIABLE = re.compile(
    r"(SALLOC|SBATCH|SLURM)_(PARTITION|CLUSTERS|RESERVATION|OVERCOMMIT)$"
)


class PartitionNode(NamedTuple):
    """One node of one partition, in whatever state it is."""

    partition: str
    default: bool  # jobs that name no partition go there
    name: str
    cpus: int
    state: str = ""  # in Slurm's words; empty where it was not asked for

    @property
    def is_up(self) -> bool:
        """Return whether jobs may get it, now or once others have ended."""
        return not self.state.startswith(_DOWN)


def read_nodes(listed: str) -> list[PartitionNode]:
    """Read what ``sinfo --Node --noheader --format "%P %N %c %T"`` prints, or without ``%T``."""
    nodes = []
    for words in map(str.split, listed.splitlines()):
        if len(words) in (3, 4) and words[2].isdigit():
            partition, name, cpus, *state = words
            place, is_default = partition.rstrip("*"), partition.endswith("*")
            nodes.append(PartitionNode(place, is_default, name, int(cpus), "".join(state).lower()))
    return nodes


def explain_shortage(asked: Request, nodes: Sequence[PartitionNode]) -> str:
    """Return why these nodes, up or down, could never satisfy a request; empty where they could."""
    usable = list_usable_nodes(asked, nodes)
    if not usable:
        return ""  # nothing is known: the nodes of a cloud show only while they run
    least, cpus = asked.nodes[0], asked.cpus_per_task or 1
    large_enough = sum(node.cpus >= cpus for node in usable)
    if large_enough >= least:
        return ""
    where = f"partition {', '.join(sorted({node.partition for node in usable}))}"
    each = f" with {format_count(cpus, 'CPU')} each" if large_enough < len(usable) else ""
    largest = max(node.cpus for node in usable)
    there = f"has {large_enough}" if large_enough else f"has nodes of up to {largest}"
    besides = f" besides the excluded {asked.exclude}" if asked.exclude else ""
    return f"the job asks for {format_count(least, 'node')}{each}, {where} {there}{besides}"


def list_usable_nodes(asked: Request, nodes: Sequence[PartitionNode]) -> list[PartitionNode]:
    """Return the nodes of the request's partitions that it does not exclude, each once."""
    partitions = asked.partition.split(",") if asked.partition else []
    try:
        excluded = expand_hostlist(asked.exclude) if asked.exclude else []
    except NodeError:  # Slurm refuses it
        excluded = []
    usable = {
        node.name: node
        for node in nodes
        if (node.partition in partitions or (node.default and not partitions))
        and node.name not in excluded
    }
    return list(usable.values())


def query_nodes(runner: Runner = run) -> list[PartitionNode] | None:
    """Return Slurm's nodes: an empty list where it does not answer, None without ``sinfo``."""
    if shutil.which(LISTING[0]) is None:
        return None
    try:
        return read_nodes(runner(LISTING, timeout=_SECONDS).stdout)
    except StagerError:
        return []


def query_cluster_name(runner: Runner = run) -> str:
    """Return the name of the cluster; empty where Slurm does not answer."""
    try:
        shown = runner(["scontrol", "show", "config"], timeout=_SECONDS).stdout
    except StagerError:
        return ""
    name = re.search(r"(?m)^ClusterName\s*=\s*(\S+)$", shown)
    return name[1] if name else ""


def refuse_impossible(asked: Request, environment: Mapping[str, str]) -> None:
    """Refuse a request that the partition's nodes could never satisfy.

    Both must say so: the nodes that ``sinfo`` lists, which may be too few where some only show
    while they run; and ``sbatch --test-only``, which also refuses while nodes are down.
    """
    if is_changed_elsewhere(asked, environment):
        return
    # Where there is no answer, Slurm says itself what is wrong with it.
    why = explain_shortage(asked, query_nodes() or [])
    if why and _slurm_refuses(asked, environment):
        raise StagerError(
            f"Slurm can never satisfy this request: {why}",
            hint="ask for less: --nodes, --nproc-per-node, cluster.cpus-per-task; or name another "
            "--partition; `sinfo -N -l` shows what there is",
        )


def is_changed_elsewhere(asked: Request, environment: Mapping[str, str]) -> bool:
    """Return whether options or variables make the request another one than the settings say."""
    if any(arg.startswith(_OVERRIDING) for arg in asked.salloc_args):
        return True
    return any(_OVERRIDING_VARIABLE.match(name) for name in environment)


def _slurm_refuses(asked: Request, environment: Mapping[str, str]) -> bool:
    argv = ("sbatch", "--test-only", *asked.options(), *asked.salloc_args)
    try:
        run_with_input(argv, "#!/bin/sh\n", environment=environment, timeout=_SECONDS)
    except CommandError as exc:
        return bool(_REFUSED.search(exc.completed.stderr))
    return False
