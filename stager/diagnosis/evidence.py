"""The lines that show a failure: lines of logs, else of the files that the job's driver keeps."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence

from bundle.protocol.codec import encode
from bundle.protocol.enumerations import FailureClass
from bundle.protocol.events import Event, JobEnds
from bundle.protocol.messages import Answer
from bundle.protocol.problem import Problem
from bundle.protocol.reports import Departure, LaunchAnswer, Lingering, Vanished

from ..catalogue.catalogue import LineRole
from ..logs.job_files import JobFiles
from ..logs.job_record import parse_event
from ..logs.lines import numbered
from .exit_reports import Exit
from .failure import Evidence, FirstFailure
from .log_verdict import LogVerdict
from .scan import Hit, Scanned

_MOST = 5
"""Lines that are shown of one failure."""


def evidence(
    first: FirstFailure, verdict: LogVerdict, seen: Scanned, files: JobFiles
) -> list[Evidence]:
    """Return the lines that show a failure."""
    hits = _of_logs(first, verdict, seen)
    if hits:
        return [_line(hit) for hit in hits]
    if not files.job_id:
        return []
    of_driver = _of_preflight(first, files) or _of_events(first, files)
    return [] if of_driver is None else [of_driver]


def weak_evidence(verdict: LogVerdict) -> tuple[Evidence, ...]:
    """Return errors that programs have printed and survived, where nothing shows a failure."""
    return tuple(map(_line, verdict.weak))


def _line(hit: Hit | Exit) -> Evidence:
    return Evidence(path=hit.log.path, number=hit.number, text=hit.text)


def _of_logs(first: FirstFailure, verdict: LogVerdict, seen: Scanned) -> Sequence[Hit | Exit]:
    """Return the failure's own line, else the first of its entry and those of the verdict."""
    own = [hit for hit in seen.hits if _is_own(hit, first)]
    if own:
        return own[-1:]
    of_entry = [hit for hit in seen.hits if _is_of_entry(hit, first)][:1]
    if not _agrees(verdict, first):
        return of_entry
    others = [hit for hit in verdict.shown if hit not in of_entry]
    return [*of_entry, *others][:_MOST]


def _is_own(hit: Hit, first: FirstFailure) -> bool:
    if hit.rank != first.rank or not hit.text:
        return False
    if hit.text not in (line.strip() for line in first.lines):
        return hit.text in first.cause
    return hit.entry.role == LineRole.PRIMARY or hit.entry.name == first.entry


def _is_of_entry(hit: Hit, first: FirstFailure) -> bool:
    if not first.entry or hit.entry.name != first.entry:
        return False
    return hit.log.node in ("", first.node)


def _agrees(verdict: LogVerdict, first: FirstFailure) -> bool:
    """Return whether the logs alone show the same failure, and of the same rank."""
    if first.kind == FailureClass.HANG:
        return True
    if verdict.first is None or verdict.first.kind != first.kind:
        return False
    return first.exit_code is None or verdict.first.rank in (None, first.rank)


def _of_preflight(first: FirstFailure, files: JobFiles) -> Evidence | None:
    for number, line in numbered(files.preflight):
        node, _, problem = line.partition(" problem: ")
        if node == first.node and _is_first_line(problem, first.problem):
            return Evidence(path=files.preflight, number=number, text=line)
    return None


def _of_events(first: FirstFailure, files: JobFiles) -> Evidence | None:
    """Return what no log shows: a killed rank, a failed node, an end by Slurm."""
    for number, line in numbered(files.events):
        record = parse_event(line)
        text = "" if record is None else _part_of_event(record.event, first)
        if text and text in line:
            return Evidence(path=files.events, number=number, text=text)
    return None


def _part_of_event(event: Event, first: FirstFailure) -> str:
    for part in _PARTS:
        text = part(event, first)
        if text:
            return text
    return ""


def _end_by_slurm(event: Event, first: FirstFailure) -> str:
    if not isinstance(event, JobEnds) or event.ok or first.exit_code is not None:
        return ""
    return f'"ended_by": {json.dumps(event.ended_by)}' if event.ended_by else ""


def _process(event: Event, first: FirstFailure) -> str:
    if first.exit_code or not isinstance(event, (LaunchAnswer, JobEnds)):
        return ""
    lists: tuple[Sequence[Departure | Vanished | Lingering] | None, ...]
    lists = (event.left, event.vanished, event.lingering)
    for processes in lists:
        for process in processes or ():
            if process.rank == first.rank:
                return _members(encode(process, short=True))
    return ""


def _rank_record(event: Event, first: FirstFailure) -> str:
    if not isinstance(event, (LaunchAnswer, JobEnds)):
        return ""
    for record in event.failures or ():
        if (record.rank, record.exit_code) == (first.rank, first.exit_code):
            return f'"exit_code": {record.exit_code}'
    return ""


def _node_problem(event: Event, first: FirstFailure) -> str:
    problems: Sequence[Problem] = ()
    if isinstance(event, JobEnds):
        problems = event.problems.get(first.node, ())
    elif isinstance(event, Answer) and event.node == first.node:
        problems = event.problems
    for problem in problems:
        if problem == first.problem:
            return _members(problem.to_json())
    return ""


def _members(value: Mapping[str, object]) -> str:
    """Return an object as it appears in a line of events, without its braces."""
    return json.dumps(value)[1:-1]


def _launcher_status(event: Event, first: FirstFailure) -> str:
    if not isinstance(event, Answer) or not first.exit_code:
        return ""
    if (event.node, event.exit_code) != (first.node, first.exit_code):
        return ""
    return f'"exit_code": {first.exit_code}'


_PARTS: Sequence[Callable[[Event, FirstFailure], str]] = (
    _end_by_slurm,
    _process,
    _rank_record,
    _node_problem,
    _launcher_status,
)


def _is_first_line(text: str, problem: Problem | None) -> bool:
    return problem is not None and text == str(problem).partition("\n")[0]
