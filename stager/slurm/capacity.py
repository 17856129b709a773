"""Requests that no partition could ever satisfy: Slurm would let them wait forever."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bundle.protocol.counts import counted
from bundle.protocol.problem import NodeError
from bundle.system.hostlist import expand_hostlist

from ..config.load import Config
from ..core.errors import StagerError
from ..core.processes import CommandError, Runner, feed, run
from .request import Request

_SECONDS = 60
"""Time limit for each command; where Slurm does not answer, nothing is refused here."""
LISTING = ("sinfo", "--all", "--Node", "--noheader", "--format=%P %N %c %T")
"""The command that lists each node of each partition."""
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


@dataclass(frozen=True, kw_only=True)
class PartitionNode:
    """One node of one partition, in whatever state it is."""

    partition: str
    """The partition's name."""
    default: bool
    """Whether jobs that name no partition go there."""
    name: str
    """The node's name."""
    cpus: int
    """Its number of CPUs."""
    state: str = ""
    """Its state in Slurm's words; empty where it was not asked for."""

    @property
    def is_up(self) -> bool:
        """Return whether jobs may get it, now or once others have ended."""
        return not self.state.startswith(_DOWN)


def read_nodes(listed: str) -> list[PartitionNode]:
    """Read what ``sinfo --Node --noheader --format "%P %N %c %T"`` prints, or without ``%T``."""
    nodes = []
    for line in listed.splitlines():
        words = line.split()
        if len(words) not in (3, 4) or not words[2].isdigit():
            continue
        partition, name, cpus, *state = words
        nodes.append(
            PartitionNode(
                partition=partition.rstrip("*"),
                default=partition.endswith("*"),
                name=name,
                cpus=int(cpus),
                state="".join(state).lower(),
            )
        )
    return nodes


def shortage(asked: Request, nodes: Sequence[PartitionNode], ranks: int | None) -> str:
    """Return why these nodes, up or down, could never satisfy a request; empty where they could."""
    usable = usable_nodes(asked, nodes)
    if not usable:
        return ""  # nothing is known: the nodes of a cloud show only while they run
    least, cpus = asked.nodes[0], asked.cpus_per_task or 1
    where = f"partition {', '.join(sorted({node.partition for node in usable}))}"
    source = f"{counted(ranks, 'rank')} of 1 CPU" if ranks else "cluster.cpus-per-task"
    largest = max(node.cpus for node in usable)
    if cpus > largest:
        request = f"the job asks for {counted(cpus, 'CPU')} a node ({source})"
        return f"{request}, the largest node of {where} has {largest}"
    large_enough = sum(node.cpus >= cpus for node in usable)
    if large_enough >= least:
        return ""
    request = f"the job asks for {counted(least, 'node')}"
    if large_enough == len(usable):
        besides = f" besides the excluded {asked.exclude}" if asked.exclude else ""
        return f"{request}, {where} has {large_enough}{besides}"
    each = f"with {counted(cpus, 'CPU')} each ({source})"
    return f"{request} {each}, {where} has {large_enough} of that size"


def usable_nodes(asked: Request, nodes: Sequence[PartitionNode]) -> list[PartitionNode]:
    """Return the nodes of the request's partitions that it does not exclude, each once."""
    partitions = asked.partition.split(",") if asked.partition else []
    excluded = excluded_nodes(asked)
    usable: dict[str, PartitionNode] = {}
    for node in nodes:
        in_partition = node.partition in partitions if partitions else node.default
        if in_partition and node.name not in excluded:
            usable[node.name] = node
    return list(usable.values())


def listed_nodes(runner: Runner = run) -> list[PartitionNode] | None:
    """Return Slurm's nodes: an empty list where it does not answer, None without ``sinfo``."""
    if shutil.which(LISTING[0]) is None:
        return None
    try:
        return read_nodes(runner(LISTING, timeout=_SECONDS).stdout)
    except StagerError:
        return []


def current_cluster(runner: Runner = run) -> str:
    """Return the name of the cluster; empty where Slurm does not answer."""
    try:
        shown = runner(["scontrol", "show", "config"], timeout=_SECONDS).stdout
    except StagerError:
        return ""
    name = re.search(r"(?m)^ClusterName\s*=\s*(\S+)$", shown)
    return name[1] if name else ""


def refuse_impossible(config: Config, asked: Request, environment: Mapping[str, str]) -> None:
    """Refuse a request that the partition's nodes could never satisfy.

    Both must say so: the nodes that ``sinfo`` lists, which may be too few where some only show
    while they run; and ``sbatch --test-only``, which also refuses while nodes are down.

    Raises:
        StagerError: it could never be satisfied.
    """
    if is_overridden(asked, environment):
        return
    ranks = None if config.cluster.cpus_per_task else config.launch.nproc_per_node
    try:
        nodes = read_nodes(run(LISTING, timeout=_SECONDS).stdout)
    except StagerError:
        return  # Slurm says itself what is wrong with it
    why = shortage(asked, nodes, ranks)
    if why and _slurm_refuses(asked, environment):
        raise StagerError(
            f"Slurm can never satisfy this request: {why}",
            hint="ask for less: --nodes, --nproc-per-node, cluster.cpus-per-task (it may be less "
            "than the ranks of a node); or name another --partition; `sinfo -N -l` shows what "
            "there is",
        )


def is_overridden(asked: Request, environment: Mapping[str, str]) -> bool:
    """Return whether options or variables make the request another one than the settings say."""
    if any(arg.startswith(_OVERRIDING) for arg in asked.args):
        return True
    return any(_OVERRIDING_VARIABLE.match(name) for name in environment)


def _slurm_refuses(asked: Request, environment: Mapping[str, str]) -> bool:
    argv = ("sbatch", "--test-only", *asked.options(), *asked.args)
    try:
        feed(argv, "#!/bin/sh\n", environment=environment, timeout=_SECONDS)
    except CommandError as exc:
        return bool(_REFUSED.search(exc.completed.stderr))
    return False


def excluded_nodes(asked: Request) -> list[str]:
    """Return the nodes that a request excludes."""
    try:
        return expand_hostlist(asked.exclude) if asked.exclude else []
    except NodeError:
        return []  # Slurm refuses it
