"""The line of an event, as it is printed and kept."""

from __future__ import annotations

import json
from collections.abc import Mapping


def line(job_id: str, time: float, event: Mapping[str, object]) -> str:
    """Return an event as a line of JSON."""
    return json.dumps({"v": 1, "job_id": job_id, "time": round(time, 3), **event})
