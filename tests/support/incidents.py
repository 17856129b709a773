"""Jobs whose nodes failed, and the events that they leave."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bundle.protocol.enumerations import FailureClass
from bundle.protocol.events import DriverEvent, JobBegins, JobEnds, NodesLeftOut, Record
from bundle.protocol.problem import Problem, ProblemCode
from stager.diagnosis.failure import FirstFailure
from stager.incidents.node_history import Incident, find_incidents
from stager.logs.job_record import JobRecord

ENDED = 1_800_000_000.0  # when these jobs ended
FULL = Problem(ProblemCode.NO_ROOM, "/tmp", {"why": "needs 1.4 GB, 0.2 GB are free"})
LOST = Problem(
    ProblemCode.NO_ANSWER_NODE_FAILURE, "n2", {"phase": "launch", "log_dir": "/logs", "where": "n2"}
)
UNREACHED = Problem(ProblemCode.HEAD_SILENT, "10.0.0.1:61000", {"host": "n2", "seconds": "9"})


def problem(code: ProblemCode, where: str = "") -> Problem:
    return Problem(code, where, dict.fromkeys(code.names, "x"))


def _events(
    problems: Mapping[str, Sequence[Problem]],
    *,
    nodes: Sequence[str] = ("n1", "n2", "n3"),
    left_out: Mapping[str, Sequence[Problem]] | None = None,
    log_dir: str = "/logs",
    **result: Any,
) -> list[DriverEvent]:
    """The events of a job; without a result, of one that still runs."""
    events: list[DriverEvent] = [JobBegins(tuple(nodes), log_dir)]
    if left_out:
        words = {node: tuple(map(str, listed)) for node, listed in left_out.items()}
        out = {node: tuple(listed) for node, listed in left_out.items()}
        events.append(NodesLeftOut(words, out))
    if result:
        listed = {node: tuple(each) for node, each in problems.items()}
        events.append(JobEnds(problems=listed, **result))
    return events


def incidents_of(
    problems: Mapping[str, Sequence[Problem]] | None = None,
    *,
    job_id: str = "4711",
    first: FirstFailure | None = None,
    ended: float = ENDED,
    **job: Any,
) -> list[Incident]:
    record = JobRecord()
    for event in _events(problems or {}, **{"ok": False, **job}):
        record.take(Record(event, time=ended))
    return find_incidents(record, job_id, "demo", first)


def rank_failure(kind: FailureClass, node: str = "n2", **changed: Any) -> FirstFailure:
    said = {"cause": "token=geheim", "hint": "", **changed}
    return FirstFailure(node=node, rank=1, exit_code=1, kind=kind, **said)


def event_log(
    log_dir: Path,
    problems: Mapping[str, Sequence[Problem]],
    *,
    job_id: str = "4711",
    ended: float | None = ENDED,
    **job: Any,
) -> Path:
    """Write the events of a job; ``ended=None`` is a job that still runs."""
    events = _events(problems, log_dir=str(log_dir), **{"ok": not problems, **job})
    if ended is None:
        events = events[:-1]
    log_dir.mkdir(parents=True, exist_ok=True)
    path = log_dir / f"events.{job_id}.jsonl"
    with path.open("a") as file:
        for event in events:
            line = {"v": 1, "job_id": job_id, "time": ended or ENDED, **event.to_json()}
            file.write(json.dumps(line) + "\n")
    return path
