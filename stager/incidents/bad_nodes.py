"""Nodes that failed before, in one job: left out of its request, named, and remembered."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from time import time

from bundle.protocol.counts import format_count
from bundle.protocol.enumerations import Allocation
from bundle.protocol.events import JobBegins, Record
from bundle.system.hostlist import fold_hosts

from ..core.store import Store
from ..jobs.driver import JobListener
from ..jobs.outcome import Outcome
from ..jobs.preparation import Prepared
from ..pack.bundle_file import mark
from ..slurm.batch_script import make_submit_environment
from ..slurm.request import (
    PartitionNode,
    Request,
    is_changed_elsewhere,
    list_usable_nodes,
    make_request,
    query_cluster_name,
    query_nodes,
)
from .node_history import (
    DAYS,
    NodeHistory,
    find_incidents,
    keep_incidents,
    list_histories,
    name_first,
    read_incidents,
    select_cluster,
)
from .pending_jobs import PendingJob, drop_note, note_job, settle_notes

_NAMING = ("-w", "--nodel", "-F", "--nodef")  # begin options that name the nodes of a request


def choose_avoided(
    nodes: Sequence[NodeHistory], asked: Request, listing: Sequence[PartitionNode] | None
) -> tuple[list[str], list[str], list[str]]:
    """Return the nodes to avoid, the worst first while enough others are up; notes; warnings."""
    if any(arg.startswith(_NAMING) for arg in asked.salloc_args):
        return [], [], ["the request names its nodes, so none of them is avoided"]
    if not listing:  # a node that Slurm does not know would have the whole request refused
        return [], [], ["sinfo lists no nodes here, so no node that failed is avoided"]
    avoided, kept = _divide(nodes, asked, listing)
    notes = name_first([f"avoiding {node.summary(DAYS)}" for node in avoided])
    warnings = []
    if kept:
        need = format_count(asked.nodes[0], "node")
        warnings.append(
            f"not avoiding {fold_hosts(kept)}, which failed lately: the job needs {need}, and too "
            "few others are up"
        )
    unknown = {node.node for node in nodes} - {node.name for node in listing}
    if unknown:
        notes.append(f"not avoiding {fold_hosts(sorted(unknown))}: Slurm has no such node")
    return [node.node for node in avoided], notes, warnings


def _divide(
    nodes: Sequence[NodeHistory], asked: Request, listing: Sequence[PartitionNode]
) -> tuple[list[NodeHistory], list[str]]:
    cpus = asked.cpus_per_task or 1
    usable = {node.name: node for node in list_usable_nodes(asked, listing) if node.cpus >= cpus}
    left = sum(node.is_up for node in usable.values())
    avoided, kept = [], []
    for node in nodes:
        if node.node not in usable:
            continue
        is_up = usable[node.node].is_up
        if is_up and left <= asked.nodes[0]:
            kept.append(node.node)
        else:
            avoided.append(node)
            left -= is_up
    return avoided, kept


def find_failed_nodes(store: Store) -> tuple[NodeHistory, ...]:
    """Return the nodes that failed lately, the worst first; batch jobs that are over count, too."""
    now = time()
    settle_notes(store, now)
    return list_histories(read_incidents(store, DAYS, now))


def exclude_bad_nodes(
    prepared: Prepared,
    nodes: tuple[NodeHistory, ...],
    listener: JobListener,
    listing: Callable[[], list[PartitionNode] | None] = query_nodes,
) -> Prepared:
    """Return a job whose request also excludes nodes that failed, if that is asked for."""
    cluster = prepared.config.cluster
    if not cluster.avoid_bad or not nodes or prepared.source not in ("salloc", "sbatch"):
        return prepared
    has_clusters = any(node.cluster for node in nodes)
    nodes = select_cluster(nodes, query_cluster_name() if has_clusters else "")
    listed = listing()
    asked = _make_request(prepared, listed or ())
    avoided, notes, warnings = choose_avoided(nodes, asked, listed)
    for line in notes:
        listener.note(line)
    for line in warnings:
        listener.warn(line)
    if not avoided:
        return prepared
    exclude = ",".join(filter(None, (cluster.exclude, fold_hosts(avoided))))
    config = replace(prepared.config, cluster=replace(cluster, exclude=exclude))
    return prepared._replace(config=config)


def _make_request(prepared: Prepared, listed: Sequence[PartitionNode]) -> Request:
    asked = make_request(prepared.config, os.environ)
    if not listed or not is_changed_elsewhere(asked, make_submit_environment(os.environ)):
        return asked
    # Options make it a request for other partitions than the settings: any may be meant.
    return replace(asked, partition=",".join({node.partition: 1 for node in listed}))


def point_out_bad_nodes(
    on_event: Callable[[Record], None],
    nodes: tuple[NodeHistory, ...],
    prepared: Prepared,
    listener: JobListener,
) -> Callable[[Record], None]:
    """Return a listener that also names the nodes of the job that failed before."""
    is_late = prepared.config.cluster.avoid_bad and prepared.source == "inside"

    def listen(record: Record) -> None:
        on_event(record)
        if isinstance(record.event, JobBegins):
            by_name = {node.node: node for node in select_cluster(nodes, record.event.cluster)}
            here = list(filter(None, map(by_name.get, record.event.nodes)))
            for line in name_first([node.summary(DAYS) for node in here]):
                listener.note(line)
            if here and is_late:
                names = fold_hosts([node.node for node in here])
                listener.warn(f"{names} cannot be avoided: this allocation stands already")

    return listen if nodes else on_event


def remember_bad_nodes(store: Store, outcome: Outcome) -> None:
    """Keep what the nodes of a job that is over are to blame for."""
    job, result = outcome.job, outcome.result
    if job.allocation is Allocation.LOCAL or job.dry_run or result is None:
        return
    first = outcome.first_failure if result.exit_codes else None
    keep_incidents(store, find_incidents(outcome, job.id, job.name, first), time())
    drop_note(store, job.id)


def expect_job(store: Store, prepared: Prepared, job_id: str) -> None:
    """Leave a note of a batch job, so that a later command reads what became of it."""
    job, bundle = prepared.job, prepared.bundle
    mark(store, bundle, job_id)
    place = {"log_dir": job.log_dir, "project": job.name, "bundle": str(bundle)}
    note_job(store, PendingJob(job_id=job_id, submitted=time(), **place))
