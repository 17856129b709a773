"""The nodes that failed before, in one job: avoided, pointed out, and remembered for the next."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from time import time
from typing import Protocol

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
)
from . import incident_files, pending_jobs
from .avoidance import avoid, remarks
from .ended_jobs import ended_job
from .node_history import DAYS, NodeHistory, histories, named, of_cluster
from .pending_jobs import PendingJob


class RemarkListener(Protocol):
    """Hears what a person should know."""

    def note(self, line: str) -> None:
        """Report something the user should know."""

    def warn(self, line: str) -> None:
        """Report something the user must know."""


def failed_nodes(store: Store) -> tuple[NodeHistory, ...]:
    """Return the nodes that failed lately, the worst first; batch jobs that are over count, too."""
    now = time()
    pending_jobs.settle(store, now)
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
    pending_jobs.drop(store, job.id)


def expect(store: Store, prepared: Prepared, job_id: str) -> None:
    """Leave a note of a batch job, so that a later command reads what became of it."""
    job, bundle = prepared.job, prepared.bundle
    mark(store, bundle, job_id)
    pending_jobs.note(
        store,
        PendingJob(
            job_id=job_id,
            log_dir=job.log_dir,
            project=job.name,
            submitted=time(),
            bundle=str(bundle),
        ),
    )
