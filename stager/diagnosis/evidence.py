"""The lines that show a failure: of what was written, else of what the job's driver has noted."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bundle.protocol.problem import Problem

from ..catalogue.catalogue import PRIMARY
from ..logs.files import JobFiles
from .exit_reports import Exit
from .failure import Evidence, FirstFailure
from .log_verdict import Judged
from .scan import Hit, Scanned

_MOST = 5
"""Proofs of one failure."""


def evidence(first: FirstFailure, judged: Judged, seen: Scanned, files: JobFiles) -> list[Evidence]:
    """The lines that show a failure.

    Args:
        first: the failure.
        judged: what the logs tell by themselves.
        seen: all that they show.
        files: the job's files.
    """
    shown = _of_logs(first, judged, seen)
    if shown:
        return [
            Evidence(path=one.log.path, number=one.number, text=one.text) for one in shown[:_MOST]
        ]
    return [] if not files.job_id else _of_driver(first, files)


def _of_logs(first: FirstFailure, judged: Judged, seen: Scanned) -> list[Hit | Exit]:
    """Its own lines, or those of its entry, or those that it was judged by."""
    own: list[Hit | Exit] = [
        hit for hit in seen.hits if hit.rank == first.rank and hit.text and _same(hit, first)
    ]
    if own:
        return own[-1:]
    agree = judged.first is not None and judged.first.kind == first.kind
    if first.exit_code is not None and judged.first is not None:
        agree = agree and judged.first.rank in (None, first.rank)  # else another one's end
    shown = list(judged.shown) if agree or first.kind == "hang" else []
    if first.entry:
        of_entry = [
            hit
            for hit in seen.hits
            if hit.entry and hit.entry.name == first.entry and hit.log.node in ("", first.node)
        ]
        shown = [*of_entry[:1], *(one for one in shown if one not in of_entry[:1])]
    return shown


def _same(hit: Hit, first: FirstFailure) -> bool:
    if hit.text in (line.strip() for line in first.lines):
        return not hit.entry or hit.entry.role == PRIMARY or hit.entry.name == first.entry
    return hit.text in first.cause


def _of_driver(first: FirstFailure, files: JobFiles) -> list[Evidence]:
    """What leaves no line in a log: a rank that is killed, a node that fails, what Slurm ends."""
    for path, number, line in _lines(files.preflight):
        node, _, problem = line.partition(" problem: ")
        if problem and node == first.node and _tells(problem, first):
            return [Evidence(path=path, number=number, text=line)]
    for path, number, line in _lines(files.events):
        try:
            text = _part(json.loads(line), first)
        except (ValueError, KeyError, TypeError):
            continue  # the last one of a driver that was killed
        if text and text in line:
            return [Evidence(path=path, number=number, text=text)]
    return []


def _part(event: Mapping[str, Any], first: FirstFailure) -> str:
    """The part of an event that tells the failure, as it stands in its line; empty for none."""
    if event.get("ended_by") and first.exit_code is None and not event.get("ok"):
        return f'"ended_by": {json.dumps(event["ended_by"])}'
    for key in ("left", "vanished", "lingering"):
        for one in event.get(key, ()) if not first.exit_code else ():
            if one["rank"] == first.rank:
                return json.dumps(one)[1:-1]
    for record in event.get("failures", ()):
        if record["rank"] == first.rank and record["exit_code"] == first.exit_code:
            return f'"exit_code": {record["exit_code"]}'
    listed = event.get("problems") or []
    raws = listed.get(first.node, []) if isinstance(listed, dict) else listed
    if isinstance(listed, dict) or event.get("node") == first.node:
        for raw in raws:
            if _tells(str(Problem.from_json(raw)), first):
                return json.dumps(raw)[1:-1]
    if event.get("node") == first.node and event.get("exit_code") == first.exit_code:
        return f'"exit_code": {first.exit_code}' if first.exit_code else ""
    return ""


def _tells(problem: str, first: FirstFailure) -> bool:
    """Whether a problem in words is the failure, whose cause has the same parts."""
    return first.hint in problem and problem.partition(";")[0] in first.cause


def _lines(path: Path) -> Iterator[tuple[Path, int, str]]:
    try:
        with path.open(encoding="utf-8", errors="replace") as handle:
            for number, line in enumerate(handle, start=1):
                yield path, number, line.rstrip("\n")
    except OSError:
        return
