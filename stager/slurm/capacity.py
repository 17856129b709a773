"""Requests that no partition could ever satisfy: refused here, as Slurm lets them wait for ever."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bundle.protocol.counts import counted
from bundle.protocol.problem import NodeError
from bundle.system.hostlist import expand_hostlist

from ..config.load import Config
from ..core.errors import StagerError
from ..core.processes import CommandError, feed, run
from .request import Request

_SECONDS = 60
"""How long Slurm may take to answer; where it does not, nothing is refused here."""
_REFUSED = re.compile(r"not available|[Nn]ode count specification|More processors requested")
_OTHERWISE = (
    *("-p", "--part", "-M", "--clu", "-c", "--cpu", "-N", "--nodes", "-n", "--ntask", "-O"),
    *("--over", "--res", "--tasks"),
)
"""Beginnings of options after which the request is not what the settings say."""
_ELSEWHERE = re.compile(r"(SALLOC|SBATCH|SLURM)_(PARTITION|CLUSTERS|RESERVATION|OVERCOMMIT)$")


@dataclass(frozen=True, kw_only=True)
class PartitionNode:
    """One node of one partition, in whatever state it is."""

    partition: str
    """The partition's name."""
    default: bool
    """Whether jobs go there that name none."""
    name: str
    """The node's name."""
    cpus: int
    """How many CPUs it has."""


def read_nodes(listed: str) -> list[PartitionNode]:
    """Read what ``sinfo --Node --noheader --format "%P %N %c"`` prints."""
    nodes = []
    for line in listed.splitlines():
        words = line.split()
        if len(words) == 3 and words[2].isdigit():
            partition = words[0].rstrip("*")
            default = words[0].endswith("*")
            nodes.append(
                PartitionNode(
                    partition=partition, default=default, name=words[1], cpus=int(words[2])
                )
            )
    return nodes


def shortage(asked: Request, nodes: Sequence[PartitionNode], ranks: int | None) -> str:
    """Return why these nodes could never satisfy a request; empty where they could.

    Args:
        asked: the request.
        nodes: all nodes of all partitions, also those that are down at the moment.
        ranks: the ranks of a node where their number alone decides how many CPUs are asked for.
    """
    named = asked.partition.split(",") if asked.partition else []
    avoided = _names(asked.exclude or "")
    there = {
        node.name: node
        for node in nodes
        if (node.partition in named if named else node.default) and node.name not in avoided
    }
    if not there:
        return ""  # nothing is known: the nodes of a cloud show only while they run
    least, cpus = asked.nodes[0], asked.cpus_per_task or 1
    where = f"partition {', '.join(sorted({node.partition for node in there.values()}))}"
    largest = max(node.cpus for node in there.values())
    source = f"{counted(ranks, 'rank')} of 1 CPU" if ranks else "cluster.cpus-per-task"
    if cpus > largest:
        each = f"the job asks for {counted(cpus, 'CPU')} a node ({source})"
        return f"{each}, the largest node of {where} has {largest}"
    fitting = sum(node.cpus >= cpus for node in there.values())
    if fitting >= least:
        return ""
    if fitting == len(there):
        return f"the job asks for {counted(least, 'node')}, {where} has {fitting}"
    each = f"the job asks for {counted(least, 'node')} with {counted(cpus, 'CPU')} each ({source})"
    return f"{each}, {where} has {fitting} of that size"


def refuse_impossible(config: Config, asked: Request, environment: Mapping[str, str]) -> None:
    """Refuse a request that the partition's nodes could never satisfy.

    Both must say so: the nodes that ``sinfo`` lists, which may be too few where some only show
    while they run; and ``sbatch --test-only``, which also refuses while nodes are down.

    Args:
        config: the settings.
        asked: what would be asked for.
        environment: all variables that it would be asked with.

    Raises:
        StagerError: it could never be satisfied.
    """
    if any(arg.startswith(_OTHERWISE) for arg in asked.args):
        return
    if any(_ELSEWHERE.match(name) for name in environment):
        return
    ranks = None if config.cluster.cpus_per_task else config.launch.nproc_per_node
    try:
        listing = ("sinfo", "--all", "--Node", "--noheader", "--format=%P %N %c")
        nodes = read_nodes(run(listing, timeout=_SECONDS).stdout)
    except StagerError:
        return  # Slurm says itself what is wrong with it
    why = shortage(asked, nodes, ranks)
    if why and _slurm_refuses(asked, environment):
        raise StagerError(
            f"Slurm can never give these nodes: {why}",
            hint="ask for less: --nodes, --nproc-per-node, cluster.cpus-per-task (it may be less "
            "than the ranks of a node); or name another --partition; `sinfo -N -l` shows what "
            "there is",
        )


def _slurm_refuses(asked: Request, environment: Mapping[str, str]) -> bool:
    argv = ("sbatch", "--test-only", *asked.options(), *asked.args)
    try:
        feed(argv, "#!/bin/sh\n", environment=environment, timeout=_SECONDS)
    except CommandError as exc:
        return bool(_REFUSED.search(exc.completed.stderr))
    return False


def _names(hostlist: str) -> list[str]:
    try:
        return expand_hostlist(hostlist) if hostlist else []
    except NodeError:
        return []  # Slurm refuses it
