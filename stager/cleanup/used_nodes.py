"""The nodes on which a user's jobs have left environments, as the logs of the jobs say."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from bundle.protocol.counts import counted
from bundle.protocol.messages import UnpackAnswer
from bundle.protocol.reports import CleanAnswer
from bundle.system.hostlist import fold

from ..core.files import opened
from ..jobs.job_description import JobOptions
from ..logs.job_record import parse_event
from ..slurm.request import PartitionNode

_TELLING = (b'"unpack"', b'"clean"')
"""What a line has that tells of an environment on a node."""


def used_nodes(log_dir: Path) -> list[str]:
    """Return the nodes with environments, in the order of the jobs that made or used them last."""
    used: dict[str, None] = {}
    logs = []
    for path in log_dir.glob("events.*.jsonl"):
        with suppress(OSError):
            logs.append((path.lstat().st_mtime, path))
    for _, path in sorted(logs):
        with suppress(OSError), opened(path) as handle:
            for line in handle:
                record = parse_event(line) if any(map(line.__contains__, _TELLING)) else None
                event = record.event if record else None
                if isinstance(event, UnpackAnswer) and event.ok:
                    used.pop(event.node, None)
                    used[event.node] = None
                elif isinstance(event, CleanAnswer) and not any(root.kept for root in event.roots):
                    used.pop(event.node, None)
    return list(used)


def choose_nodes(
    options: JobOptions, used: Sequence[str], listing: Collection[PartitionNode]
) -> tuple[JobOptions, list[str]]:
    """Return the options that ask Slurm for the nodes with environments, and what to say of it."""
    up = {node.name for node in listing if node.is_up}
    known = {node.name for node in listing}
    chosen = [node for node in used if node in up]
    away = [node for node in used if node in known - up]
    notes = []
    if away:
        notes.append(f"not cleaned: {fold(away)}, which Slurm has down or reserved at the moment")
    if options.nodes or options.nodelist or not chosen:
        if options.nodes and not options.nodelist and len(chosen) > options.nodes[0]:
            count, names = counted(len(chosen), "node"), fold(chosen)
            notes.append(f"the logs tell of environments on {count}: --nodelist {names}")
        return options, notes
    notes.append(
        f"asking for {fold(chosen)}, where your jobs have left environments, as their logs say; "
        "--nodelist names other nodes"
    )
    number = len(chosen)
    return replace(options, nodes=(number, number), nodelist=fold(chosen)), notes
