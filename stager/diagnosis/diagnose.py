"""What failed first, why, and what to do: from the files that a job has left."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from bundle.launch.rank_results import CAUSE
from bundle.protocol.job import load
from bundle.protocol.problem import NodeError

from ..catalogue.catalogue import END
from ..logs import events
from ..logs.clock import Clock
from ..logs.files import JobFiles, LogFile
from ..logs.lines import last_lines
from ..logs.refused import Refused
from ..logs.result import sound
from ..slurm import accounting
from . import driver_verdict, slurm_endings, withheld_variables
from .comparison import comparable
from .evidence import evidence
from .failure import Diagnosis, FirstFailure
from .log_verdict import LOG_TELLS, Judged, absent, hang, judge
from .scan import Hit, Scanned, scan, sieve
from .torchrun import Torchruns, torchruns

_LAST = 6
"""Lines that are shown of a rank that hangs."""
_SILENT = (
    "it has printed nothing: let it say how far it is, or have it dump its stack with "
    "faulthandler.dump_traceback_later(60); look for code that only some ranks run"
)


def diagnose(files: JobFiles, result: Mapping[str, Any] | None = None) -> Diagnosis:
    """Find the first failure of a job.

    What the job's driver has told counts most: the records of the ranks, the problems of the nodes,
    how Slurm ended it. Logs explain it, and stand in for it where there was no such driver.

    Args:
        files: the job's files, or a directory of somebody else's logs.
        result: the driver's last event; None takes it from the file of events.
    """
    said = events.told(files.events) if files.job_id else events.Told()
    result = driver_verdict.before_the_interrupt(sound(said.result if result is None else result))
    launched = torchruns(files.logs)
    seen = launched.named(_scan(files, launched))
    nodes = _nodes_of_ranks(files, said, result) | launched.nodes(files.logs)
    judged = judge(seen.hits, seen.lengths, nodes)
    first = driver_verdict.verdict(result, files.job_id)
    ok: bool | None = bool(result["ok"]) if "ok" in result else None
    if first is not None:
        first, judged = _explained(first, judged, seen, result, nodes)
    elif ok is None:
        slurm = accounting.state(files.job_id) if files.job_id else ""
        first = _ended(slurm, files.job_id, judged) or _placed(judged, seen, launched)
        ok = True if slurm == "COMPLETED" and first is None else None if first is None else False
    known = Diagnosis(
        job_id=files.job_id,
        folder=files.folder,
        ok=ok,
        first=first,
        interrupted=bool(result.get("interrupted")),
        read=len(files.logs),
        before_launch=bool(said.begun) and not said.launched and _was_to_launch(files),
    )
    if first is None:
        return known
    if files.ours:
        first = withheld_variables.explained(first, files.job)
    alike = _alike(first, result)
    return replace(
        known,
        first=_with_last_words(first, files),
        evidence=tuple(evidence(first, judged, seen, files)),
        same_failure=alike,
        consequences=_consequences(first, judged, result, alike),
        missing=judged.missing if first.kind == "hang" else (),
    )


def of_refused(refused: Refused, log_dir: Path) -> Diagnosis:
    """Return the diagnosis of a command that failed before its job began."""
    first = FirstFailure(
        node="",
        rank=None,
        exit_code=None,
        kind="environment",
        cause=refused.message,
        hint=refused.hint,
        lines=refused.context,
        time=refused.time,
    )
    launches = refused.command == "run"
    return Diagnosis(
        job_id="",
        folder=log_dir,
        ok=False,
        first=first,
        before_launch=launches,
        command=refused.command,
    )


def _was_to_launch(files: JobFiles) -> bool:
    """Whether a job of stager's was to start ranks; ``verify`` starts none."""
    try:
        return load(str(files.job)).action == "run"
    except NodeError:
        return False


def _scan(files: JobFiles, launched: Torchruns) -> Scanned:
    clock = Clock(files)
    logs = [launched.unnamed(log) for log in files.logs]
    if files.job_id and files.preflight.exists() and not files.events.exists():
        logs.append(LogFile(path=files.preflight))
    texts = sieve()
    return Scanned.of(scan(log, clock, texts) for log in logs)


def _nodes_of_ranks(
    files: JobFiles, said: events.Told, result: Mapping[str, Any]
) -> dict[int, str]:
    """The node of each rank, from the names of logs, and from how ranks are dealt to nodes."""
    nodes = {log.rank: log.node for log in files.logs if log.rank is not None}
    world = int(result.get("world_size") or 0)
    if world and said.nodes and world % len(said.nodes) == 0:
        each = world // len(said.nodes)
        nodes = {rank: said.nodes[rank // each] for rank in range(world)} | nodes
    return nodes


def _ended(slurm: str, job_id: str, judged: Judged) -> FirstFailure | None:
    """What Slurm says that it did to a job; a cause that the logs show comes before it."""
    own = judged.first is not None and judged.first.kind not in ("unknown", "killed", "hang")
    how = accounting.ended_by(slurm)
    return slurm_endings.failure(how, job_id, "") if how and not own else None


def _placed(judged: Judged, seen: Scanned, launched: Torchruns) -> FirstFailure | None:
    """The failure that the logs show, with its node and rank as far as other lines tell them.

    Slurm tells its end of a job through one of the nodes, which is not to blame for it.
    """
    first, hit = judged.first, next(iter(judged.shown), None)
    if first is None or not isinstance(hit, Hit) or hit.entry is None:
        return first
    if hit.entry.tells == END:
        lost = [
            other.groups["node"]
            for other in (hit, *seen.hits)
            if other.entry and other.entry.kind == "node-failure" and other.groups.get("node")
        ]
        node = lost[0] if lost and first.kind == "node-failure" else ""
        return replace(first, node=node, rank=None)
    task = hit.groups.get("tasks", "")
    if first.rank is None and task.isdigit() and not launched.first:
        return replace(first, rank=int(task))
    return first


def _explained(
    first: FirstFailure,
    judged: Judged,
    seen: Scanned,
    result: Mapping[str, Any],
    nodes: Mapping[int, str],
) -> tuple[FirstFailure, Judged]:
    """The driver's verdict, with what only the logs tell: who was missing, what killed a rank."""
    if first.exit_code == 0:  # it has left; whom the logs miss besides followed from that
        return first, replace(judged, missing=())
    records = result.get("failures", [])
    waited = [record for record in records if driver_verdict.stuck(record)]
    if waited and first.kind == "hang" and first.rank in {one["rank"] for one in waited}:
        waiting = seen.stuck()
        here = {int(one["rank"]) for one in waited}
        missing = absent(waiting, nodes) if waiting else ()
        missing = missing or tuple(sorted(set(nodes) - here))
        if waiting:
            judged = replace(judged, shown=tuple(waiting[:3]), missing=missing)
            return hang(waiting[0], missing, nodes), judged
    if first.kind == "killed" and first.exit_code in (-9, 137):
        killer = seen.memory(first.node)
        if killer is not None and killer.entry is not None:
            meaning, hint = killer.entry.said(killer.groups)
            first = replace(first, kind=killer.entry.kind, meaning=meaning, hint=hint)
            first = replace(first, entry=killer.entry.name)
            return first, replace(judged, shown=(killer,))
    return first, judged


def _with_last_words(first: FirstFailure, files: JobFiles) -> FirstFailure:
    """Of a rank that others waited for, what it said last; they are shown as evidence."""
    if first.kind != "hang" or first.exit_code:
        return first
    said = [last_lines(log.path, _LAST) for log in files.logs if log.rank == first.rank]
    lines = tuple(line for part in said for line in part)
    silent = first.hint == LOG_TELLS and first.rank is not None and not lines
    hint = _SILENT if silent else first.hint
    return replace(first, lines=lines, hint=hint)


def _alike(first: FirstFailure, result: Mapping[str, Any]) -> tuple[int, ...]:
    """The ranks that failed in just the same way, by themselves."""
    records = {int(record["rank"]): record for record in result.get("failures", [])}
    own = records.get(first.rank) if first.rank is not None else None
    if own is None or not own["exception"] or driver_verdict.part(own) != CAUSE:
        return ()
    found = (rank for rank, one in records.items() if comparable(one) == comparable(own))
    return tuple(sorted(rank for rank in found if rank != first.rank))


def _consequences(
    first: FirstFailure, judged: Judged, result: Mapping[str, Any], alike: tuple[int, ...]
) -> tuple[int, ...]:
    failed = {int(record["rank"]) for record in result.get("failures", [])} | set(judged.failed)
    return tuple(sorted(failed - {first.rank} - set(judged.missing) - set(alike)))
