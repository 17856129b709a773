"""The diagnosis of a job: its first failure, the reason, and advice, from the files it has left."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bundle.launch.rank_results import CAUSE
from bundle.protocol.enumerations import Action, FailureClass
from bundle.protocol.events import JobEnds
from bundle.protocol.job import load
from bundle.protocol.problem import NodeError
from bundle.protocol.reports import FailureRecord

from ..catalogue.catalogue import LineTells
from ..logs import job_record
from ..logs.job_files import JobFiles, LogFile
from ..logs.job_record import EventSummary, JobResult, Refused, job_result
from ..logs.lines import Clock, last_lines
from ..slurm import messages
from . import driver_verdict, missing_modules, problem_verdict, withheld_variables
from .comparison import comparable
from .evidence import evidence, weak_evidence
from .failure import Diagnosis, FirstFailure
from .log_verdict import LogVerdict, log_verdict
from .rank_verdict import waited_in_vain, weigh
from .scan import Hit, Scanned, prefilter, scan
from .torchrun import Torchruns, torchruns
from .waiting import LOG_TELLS, absent, hang

_LAST_WORDS = 6
"""Lines that are shown of a rank that hangs."""
_SILENT = (
    "it has printed nothing: let it say how far it is, or have it dump its stack with "
    "faulthandler.dump_traceback_later(60); look for code that only some ranks run"
)

_AFTER_SLURM = (FailureClass.UNKNOWN, FailureClass.KILLED, FailureClass.HANG)
"""The classes of failures that may follow from Slurm's end of a job."""


@dataclass(frozen=True, kw_only=True)
class _Case:
    files: JobFiles
    """The job's files, or a directory of somebody else's logs."""
    events: EventSummary
    """The driver's events; empty where there was no such driver."""
    result: JobResult
    """The driver's result, without what followed from an interrupt."""
    launched: Torchruns
    """The logs that are of whole torchruns."""
    seen: Scanned
    """The hits of all logs."""
    nodes: dict[int, str]
    """The node of each rank, as far as it is known."""


def diagnose(files: JobFiles, result: JobEnds | None = None) -> Diagnosis:
    """Find the first failure of a job.

    The driver's result counts most: the records of the ranks, the problems of the nodes, and the
    way Slurm ended the job. Logs explain it, and stand in for it where there was no such driver.
    """
    case = _gather(files, result)
    restarts = max((log.attempt or 0 for log in files.logs), default=0)
    in_logs = log_verdict(case.seen, case.nodes, restarts)
    ok, first = case.result.ok, driver_verdict.verdict(case.result, files.job_id)
    if first is not None:
        first, in_logs = _explained(case, first, in_logs)
    elif ok is None:
        ok, first = _without_result(case, in_logs)
    diagnosis = Diagnosis(
        job_id=files.job_id,
        folder=files.folder,
        ok=ok,
        first=first,
        interrupted=case.result.interrupted,
        read=len(files.logs),
        before_launch=_failed_before_launch(case),
    )
    if first is None:
        return replace(diagnosis, evidence=() if ok else weak_evidence(in_logs))
    if files.ours:
        first = withheld_variables.explained(first, files.job)
        first = missing_modules.explained(first, files.job)
    same_failure = _same_failure(first, case.result)
    return replace(
        diagnosis,
        first=_with_last_words(first, files),
        evidence=tuple(evidence(first, in_logs, case.seen, files)),
        same_failure=same_failure,
        consequences=_consequences(first, in_logs, case.result, same_failure),
        missing=in_logs.missing if first.kind == FailureClass.HANG else (),
    )


def of_refused(refused: Refused, log_dir: Path) -> Diagnosis:
    """Return the diagnosis of a command that failed before its job began."""
    first = FirstFailure(
        node="",
        kind=FailureClass.ENVIRONMENT,
        cause=refused.message,
        hint=refused.hint,
        lines=refused.context,
        time=refused.time,
    )
    return Diagnosis(
        job_id="",
        folder=log_dir,
        ok=False,
        first=first,
        before_launch=refused.command == "run",
        command=refused.command,
    )


def _gather(files: JobFiles, result: JobEnds | None) -> _Case:
    summary = job_record.summarize(files.events) if files.job_id else EventSummary()
    parsed = job_result(summary.result if result is None else result)
    parsed = driver_verdict.before_the_interrupt(parsed)
    files = replace(files, logs=tuple(_of_last_attempt(files.logs)))
    launched = torchruns(files.logs)
    nodes = _nodes_of_ranks(files, summary, parsed) | launched.nodes(files.logs)
    return _Case(
        files=files,
        events=summary,
        result=parsed,
        launched=launched,
        seen=launched.with_ranks(_scan(files, launched)),
        nodes=nodes,
    )


def _of_last_attempt(logs: Sequence[LogFile]) -> Iterator[LogFile]:
    last: dict[Path, int] = {}
    for log in logs:
        if log.attempt is not None:
            last[log.path.parents[2]] = max(log.attempt, last.get(log.path.parents[2], 0))
    for log in logs:
        if log.attempt is None or log.attempt == last[log.path.parents[2]]:
            yield log


def _failed_before_launch(case: _Case) -> bool:
    if not case.events.begun or case.events.launched:
        return False
    try:
        return load(str(case.files.job)).action is Action.RUN
    except NodeError:
        return False


def _scan(files: JobFiles, launched: Torchruns) -> Scanned:
    clock = Clock(files)
    logs = [launched.without_task(log) for log in files.logs]
    if files.job_id and files.preflight.exists() and not files.events.exists():
        logs.append(LogFile(path=files.preflight))
    texts = prefilter()
    return Scanned.joined(scan(log, clock, texts) for log in logs)


def _nodes_of_ranks(files: JobFiles, summary: EventSummary, result: JobResult) -> dict[int, str]:
    """Return the node of each rank: the names of logs win over the order of the nodes."""
    named = {log.rank: log.node for log in files.logs if log.rank is not None}
    return _dealt(result.world_size or 0, summary.nodes) | named


def _dealt(world_size: int, nodes: Sequence[str]) -> dict[int, str]:
    """Return the node of each rank; empty if the nodes cannot have equally many ranks."""
    if not nodes or world_size % len(nodes):
        return {}
    ranks_per_node = world_size // len(nodes)
    return {rank: nodes[rank // ranks_per_node] for rank in range(world_size)}


def _without_result(case: _Case, in_logs: LogVerdict) -> tuple[bool | None, FirstFailure | None]:
    """Return the verdict without a driver's result, from Slurm's accounting and the logs."""
    job_id = case.files.job_id
    state = messages.read_job_state(job_id, begun=case.events.begun) if job_id else ""
    first = _ended_by_slurm(state, job_id, in_logs) or _placed(case, in_logs)
    if first is not None:
        return False, first
    return (True if state == "COMPLETED" else None), None


def _ended_by_slurm(state: str, job_id: str, in_logs: LogVerdict) -> FirstFailure | None:
    """Return the failure for Slurm's end of a job; None if the logs show a cause."""
    ended_by = messages.explain_state(state)
    has_cause = in_logs.first is not None and in_logs.first.kind not in _AFTER_SLURM
    if not ended_by or has_cause:
        return None
    return problem_verdict.of_ending(ended_by, job_id, "")


def _placed(case: _Case, in_logs: LogVerdict) -> FirstFailure | None:
    first, hit = in_logs.first, next(iter(in_logs.shown), None)
    if first is None or not isinstance(hit, Hit):
        return first
    if hit.entry.tells == LineTells.END:
        # Slurm reports the end of a job through one of the nodes, which is not to blame for it.
        failed_node = first.kind == FailureClass.NODE_FAILURE
        node = _lost_node((hit, *case.seen.hits)) if failed_node else ""
        return replace(first, node=node, rank=None)
    if first.rank is not None or case.launched.first:
        return first
    task = hit.groups.get("tasks", "")
    return replace(first, rank=int(task)) if task.isdigit() else first


def _lost_node(hits: tuple[Hit, ...]) -> str:
    for hit in hits:
        if hit.entry.kind == FailureClass.NODE_FAILURE and hit.groups.get("node"):
            return hit.groups["node"]
    return ""


def _explained(
    case: _Case, first: FirstFailure, in_logs: LogVerdict
) -> tuple[FirstFailure, LogVerdict]:
    """Add what only the logs show to the driver's verdict: missing ranks, a kill for memory."""
    if first.exit_code == 0:  # it left early; ranks missing in the logs are a consequence
        return first, replace(in_logs, missing=())
    if first.kind == FailureClass.HANG:
        return _explained_hang(case, first, in_logs)
    killer = case.seen.out_of_memory(first.node)
    if first.kind != FailureClass.KILLED or first.exit_code not in (-9, 137) or killer is None:
        return first, in_logs
    first = first.explained_by(killer.known)
    return first, replace(in_logs, shown=(killer,))


def _explained_hang(
    case: _Case, first: FirstFailure, in_logs: LogVerdict
) -> tuple[FirstFailure, LogVerdict]:
    """Name the ranks missing in a collective, if the blamed rank itself timed out in it."""
    waited = {record.rank for record in case.result.failures if waited_in_vain(record)}
    waiting = case.seen.waiting()
    if first.rank not in waited or not waiting:
        return first, in_logs
    missing = absent(waiting, case.nodes) or tuple(sorted(set(case.nodes) - waited))
    in_logs = replace(in_logs, shown=tuple(waiting[:3]), missing=missing)
    return hang(waiting[0], missing, case.nodes), in_logs


def _with_last_words(first: FirstFailure, files: JobFiles) -> FirstFailure:
    """Add the last lines of the rank that the others waited for to a hang."""
    if first.kind != FailureClass.HANG or first.exit_code:
        return first
    lines: list[str] = []
    for log in files.logs:
        if log.rank == first.rank:
            lines += last_lines(log.path, _LAST_WORDS)
    if lines or first.rank is None or first.hint != LOG_TELLS:
        return replace(first, lines=tuple(lines))
    return replace(first, lines=(), hint=_SILENT)


def _same_failure(first: FirstFailure, result: JobResult) -> tuple[int, ...]:
    records = {record.rank: record for record in result.failures}
    record = None if first.rank is None else records.pop(first.rank, None)
    if record is None or not _raised_by_itself(record):
        return ()
    error = comparable(record)
    return tuple(sorted(rank for rank, other in records.items() if comparable(other) == error))


def _raised_by_itself(record: FailureRecord) -> bool:
    return record.exception != "" and weigh(record) == CAUSE


def _consequences(
    first: FirstFailure, in_logs: LogVerdict, result: JobResult, same_failure: tuple[int, ...]
) -> tuple[int, ...]:
    failed = {record.rank for record in result.failures} | set(in_logs.failed)
    return tuple(sorted(failed - {first.rank} - set(in_logs.missing) - set(same_failure)))
