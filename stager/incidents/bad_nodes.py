"""Nodes that failed before: excluded from a request, reported, remembered."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import time
from typing import Protocol

from bundle.protocol.counts import counted
from bundle.protocol.enumerations import Allocation
from bundle.protocol.events import JobBegins, Record
from bundle.system.hostlist import fold

from ..core.store import Store
from ..jobs.outcome import Outcome
from ..jobs.preparation import Prepared
from ..pack.bundle_file import mark
from ..slurm.batch_script import submit_environment
from ..slurm.request import (
    PartitionNode,
    Request,
    current_cluster,
    is_overridden,
    listed_nodes,
    request,
    usable_nodes,
)
from . import incident_files
from .incident_files import PendingJob, ended_job
from .node_history import DAYS, NodeHistory, histories, named, of_cluster

# --- The nodes that a request to Slurm avoids because they failed. Pure functions ----------------

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
    if any(arg.startswith(_NAMING) for arg in asked.salloc_args):
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


# --- The nodes that failed before, in one job: avoided, pointed out, and remembered for the next


class RemarkListener(Protocol):
    """Hears what a person should know."""

    def note(self, line: str) -> None:
        """Report something the user should know."""

    def warn(self, line: str) -> None:
        """Report something the user must know."""


def failed_nodes(store: Store) -> tuple[NodeHistory, ...]:
    """Return the nodes that failed lately, the worst first; batch jobs that are over count, too."""
    now = time()
    incident_files.settle_notes(store, now)
    return histories(incident_files.read(store, DAYS, now))


def avoiding(
    prepared: Prepared,
    nodes: tuple[NodeHistory, ...],
    listener: RemarkListener,
    listing: Callable[[], list[PartitionNode] | None] = listed_nodes,
) -> Prepared:
    """Return a job whose request also excludes nodes that failed, if that is asked for.

    Raises:
        ConfigError: ``SALLOC_OPTS`` cannot be read.
    """
    cluster = prepared.config.cluster
    if not cluster.avoid_bad or not nodes or prepared.source not in ("salloc", "sbatch"):
        return prepared
    nodes = of_cluster(nodes, current_cluster() if any(node.cluster for node in nodes) else "")
    asked, listed = request(prepared.config, os.environ), listing()
    if listed:
        asked = _anywhere(asked, listed, submit_environment(os.environ))
    avoidance = avoid(nodes, asked, listed)
    notes, warnings = remarks(avoidance, asked, DAYS)
    for line in notes:
        listener.note(line)
    for line in warnings:
        listener.warn(line)
    if not avoidance.avoided:
        return prepared
    names = fold([node.node for node in avoidance.avoided])
    exclude = ",".join(filter(None, (cluster.exclude, names)))
    config = replace(prepared.config, cluster=replace(cluster, exclude=exclude))
    return replace(prepared, config=config)


def _anywhere(asked: Request, listed: list[PartitionNode], env: Mapping[str, str]) -> Request:
    """Return a request for all partitions where options make it one for others than the settings.

    It is only used to decide which nodes are avoided.
    """
    if not is_overridden(asked, env):
        return asked
    return replace(asked, partition=",".join({node.partition: 1 for node in listed}))


def pointing_out(
    on_event: Callable[[Record], None],
    nodes: tuple[NodeHistory, ...],
    prepared: Prepared,
    listener: RemarkListener,
) -> Callable[[Record], None]:
    """Return a listener that also names the nodes of the job that failed before, once it has them.

    Where such nodes were to be avoided, in an allocation that stands, that is a warning.
    """
    is_late = prepared.config.cluster.avoid_bad and prepared.source == "inside"

    def listen(record: Record) -> None:
        on_event(record)
        if isinstance(record.event, JobBegins):
            by_name = {node.node: node for node in of_cluster(nodes, record.event.cluster)}
            here = [by_name[name] for name in record.event.nodes if name in by_name]
            for line in named([node.summary(DAYS) for node in here]):
                listener.note(line)
            if here and is_late:
                names = fold([node.node for node in here])
                listener.warn(f"{names} cannot be avoided: this allocation stands already")

    return listen if nodes else on_event


def remember(store: Store, outcome: Outcome) -> None:
    """Keep what the nodes of a job that is over are to blame for."""
    job, result = outcome.job, outcome.result
    if job.allocation is Allocation.LOCAL or job.dry_run or result is None:
        return
    ended = ended_job(Path(job.log_dir), job.id, job.name)
    if ended is not None:
        # The result may know better than the driver's last event why the job ended.
        first = outcome.first_failure if result.exit_codes else None
        incident_files.keep(store, replace(ended, result=result, first=first), time())
    incident_files.drop_note(store, job.id)


def expect(store: Store, prepared: Prepared, job_id: str) -> None:
    """Leave a note of a batch job, so that a later command reads what became of it."""
    job, bundle = prepared.job, prepared.bundle
    mark(store, bundle, job_id)
    incident_files.note_job(
        store,
        PendingJob(
            job_id=job_id,
            log_dir=job.log_dir,
            project=job.name,
            submitted=time(),
            bundle=str(bundle),
        ),
    )
