"""The lines that show a failure: lines of logs, else of the files that the job's driver keeps."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bundle.protocol.problem import Problem

from ..catalogue.catalogue import PRIMARY
from ..logs.files import JobFiles
from .exit_reports import Exit
from .failure import Evidence, FirstFailure
from .log_verdict import LogVerdict
from .scan import Hit, Scanned

_MOST = 5
"""Lines that are shown of one failure."""


def evidence(
    first: FirstFailure, verdict: LogVerdict, seen: Scanned, files: JobFiles
) -> list[Evidence]:
    """Return the lines that show a failure.

    Args:
        first: the failure.
        verdict: the failure as the logs alone tell it.
        seen: all that the logs show.
        files: the job's files.
    """
    hits = _of_logs(first, verdict, seen)
    if hits:
        return [Evidence(path=hit.log.path, number=hit.number, text=hit.text) for hit in hits]
    if not files.job_id:
        return []
    of_driver = _of_preflight(first, files) or _of_events(first, files)
    return [] if of_driver is None else [of_driver]


def _of_logs(first: FirstFailure, verdict: LogVerdict, seen: Scanned) -> Sequence[Hit | Exit]:
    """Return the failure's own line, or those of its entry, or those of the verdict."""
    own = [hit for hit in seen.hits if _is_own(hit, first)]
    if own:
        return own[-1:]
    shown = list(verdict.shown) if first.kind == "hang" or _agrees(verdict, first) else []
    of_entry = next((hit for hit in seen.hits if _is_of_entry(hit, first)), None)
    if of_entry is not None:
        shown = [of_entry, *(hit for hit in shown if hit != of_entry)]
    return shown[:_MOST]


def _is_own(hit: Hit, first: FirstFailure) -> bool:
    """Return whether a rank's line is one of its failure's, or part of the cause."""
    if hit.rank != first.rank or not hit.text:
        return False
    if hit.text not in (line.strip() for line in first.lines):
        return hit.text in first.cause
    return hit.entry is None or hit.entry.role == PRIMARY or hit.entry.name == first.entry


def _is_of_entry(hit: Hit, first: FirstFailure) -> bool:
    if hit.entry is None or not first.entry:
        return False
    return hit.entry.name == first.entry and hit.log.node in ("", first.node)


def _agrees(verdict: LogVerdict, first: FirstFailure) -> bool:
    """Return whether the logs alone tell the same failure, and not the end of another rank."""
    if verdict.first is None or verdict.first.kind != first.kind:
        return False
    return first.exit_code is None or verdict.first.rank in (None, first.rank)


def _of_preflight(first: FirstFailure, files: JobFiles) -> Evidence | None:
    for number, line in _lines(files.preflight):
        node, _, problem = line.partition(" problem: ")
        if node == first.node and _is_first_line(problem, first.problem):
            return Evidence(path=files.preflight, number=number, text=line)
    return None


def _of_events(first: FirstFailure, files: JobFiles) -> Evidence | None:
    """Return what no log shows: a rank that is killed, a node that fails, an end by Slurm."""
    for number, line in _lines(files.events):
        try:
            text = _part_of_event(json.loads(line), first)
        except (ValueError, KeyError, TypeError, AttributeError):
            continue  # damaged, or the last line of a driver that was killed
        if text and text in line:
            return Evidence(path=files.events, number=number, text=text)
    return None


def _part_of_event(event: Mapping[str, Any], first: FirstFailure) -> str:
    """Return the part of an event that shows the failure, as its line has it; empty for none."""
    for part in _PARTS:
        text = part(event, first)
        if text:
            return text
    return ""


def _end_by_slurm(event: Mapping[str, Any], first: FirstFailure) -> str:
    if not event.get("ended_by") or first.exit_code is not None or event.get("ok"):
        return ""
    return f'"ended_by": {json.dumps(event["ended_by"])}'


def _process(event: Mapping[str, Any], first: FirstFailure) -> str:
    if first.exit_code:
        return ""
    for key in ("left", "vanished", "lingering"):
        for process in event.get(key, ()):
            if process["rank"] == first.rank:
                return json.dumps(process)[1:-1]
    return ""


def _rank_record(event: Mapping[str, Any], first: FirstFailure) -> str:
    for record in event.get("failures", ()):
        if record["rank"] == first.rank and record["exit_code"] == first.exit_code:
            return f'"exit_code": {record["exit_code"]}'
    return ""


def _node_problem(event: Mapping[str, Any], first: FirstFailure) -> str:
    """Return the problem of the failure's node: of the result by node, of other events a list."""
    problems = event.get("problems") or []
    if isinstance(problems, dict):
        problems = problems.get(first.node, [])
    elif event.get("node") != first.node:
        return ""
    for raw in problems:
        if Problem.from_json(raw) == first.problem:
            return json.dumps(raw)[1:-1]
    return ""


def _launcher_status(event: Mapping[str, Any], first: FirstFailure) -> str:
    if event.get("node") != first.node or event.get("exit_code") != first.exit_code:
        return ""
    return f'"exit_code": {first.exit_code}' if first.exit_code else ""


_PARTS: Sequence[Callable[[Mapping[str, Any], FirstFailure], str]] = (
    _end_by_slurm,
    _process,
    _rank_record,
    _node_problem,
    _launcher_status,
)


def _is_first_line(text: str, problem: Problem | None) -> bool:
    return problem is not None and text == str(problem).partition("\n")[0]


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        with path.open(encoding="utf-8", errors="replace") as handle:
            for number, line in enumerate(handle, start=1):
                yield number, line.rstrip("\n")
    except OSError:
        return
