"""Events as the driver prints them, read as the login side reads them."""

from __future__ import annotations

from typing import Any

from bundle.protocol.events import JobEnds
from bundle.protocol.records import Record, read_record


def record(event: str, **fields: Any) -> Record:
    """The event of a line with these fields."""
    made = read_record({"v": 1, "job_id": "77", "time": 1.0, "event": event, **fields})
    assert made is not None, (event, fields)
    return made


def job_ends(**fields: Any) -> JobEnds:
    """The last event of a job that failed, unless the fields say something else."""
    event = record("result", **{"ok": False, **fields}).event
    assert isinstance(event, JobEnds)
    return event
