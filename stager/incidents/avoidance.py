"""The nodes that a request to Slurm avoids because they failed. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bundle.protocol.counts import counted
from bundle.system.hostlist import fold

from ..slurm.request import PartitionNode, Request, usable_nodes
from .node_history import NodeHistory, named

_NAMING = ("-w", "--nodel", "-F", "--nodef")
"""Beginnings of options that name the nodes of a request."""


@dataclass(frozen=True, kw_only=True)
class Avoidance:
    """The decision which nodes a request avoids."""

    avoided: tuple[NodeHistory, ...] = ()
    """Nodes that are excluded."""
    kept: tuple[NodeHistory, ...] = ()
    """Nodes that are not, as too few would be left."""
    unknown: tuple[str, ...] = ()
    """Nodes that are not, as Slurm does not know them."""
    remark: str = ""
    """What else there is to say; empty for nothing."""


def avoid(
    nodes: Sequence[NodeHistory], asked: Request, listing: Sequence[PartitionNode] | None
) -> Avoidance:
    """Return which nodes to avoid: the worst first, as long as enough others are left."""
    if any(arg.startswith(_NAMING) for arg in asked.args):
        return Avoidance(remark="the request names its nodes, so none of them is avoided")
    if not listing:
        # One that Slurm does not know would have the whole request refused.
        why = "sinfo is missing here" if listing is None else "sinfo does not list any nodes"
        return Avoidance(remark=f"{why}, so no node that failed is avoided" if nodes else "")
    known = {node.name for node in listing}
    avoided, kept = _divided(nodes, _usable(asked, listing), asked.nodes[0])
    return Avoidance(
        avoided=tuple(avoided),
        kept=tuple(kept),
        unknown=tuple(node.node for node in nodes if node.node not in known),
    )


def _divided(
    nodes: Sequence[NodeHistory], usable: Mapping[str, PartitionNode], needed: int
) -> tuple[list[NodeHistory], list[NodeHistory]]:
    """Divide nodes that failed into those to avoid, and those without which too few are up."""
    left = sum(node.is_up for node in usable.values())
    avoided, kept = [], []
    for node in nodes:
        if node.node not in usable:
            continue
        is_up = usable[node.node].is_up
        if is_up and left <= needed:
            kept.append(node)
        else:
            avoided.append(node)
            left -= is_up
    return avoided, kept


def _usable(asked: Request, listing: Sequence[PartitionNode]) -> Mapping[str, PartitionNode]:
    cpus = asked.cpus_per_task or 1
    nodes = usable_nodes(asked, listing)
    return {node.name: node for node in nodes if node.cpus >= cpus}


def remarks(avoidance: Avoidance, asked: Request, days: int) -> tuple[list[str], list[str]]:
    """Return a decision in words: what is avoided and why, and what its user must know."""
    notes = named([f"avoiding {node.summary(days)}" for node in avoidance.avoided])
    warnings = [avoidance.remark] if avoidance.remark else []
    if avoidance.kept:
        names = fold([node.node for node in avoidance.kept])
        need = counted(asked.nodes[0], "node")
        warnings.append(
            f"not avoiding {names}, which failed lately: the job needs {need}, and too few others "
            "are up"
        )
    if avoidance.unknown:
        notes.append(f"not avoiding {fold(avoidance.unknown)}: Slurm has no such node")
    return notes, warnings
