"""Events as the driver prints them, read as the login side reads them; and the keys of a file."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

from bundle.protocol.events import JobEnds, Record, read_record


def record(event: str, **fields: Any) -> Record:
    made = read_record({"v": 1, "job_id": "77", "time": 1.0, "event": event, **fields})
    assert made is not None, (event, fields)
    return made


def job_ends(**fields: Any) -> JobEnds:
    event = record("result", **{"ok": False, **fields}).event
    assert isinstance(event, JobEnds)
    return event


def event_keys(path: Path) -> str:
    """The lines of an events file with the kinds of most values; nodes answer in any order."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    ordered: list[object] = []
    for _, run in itertools.groupby(lines, lambda line: "node" in line):
        ordered += sorted(run, key=lambda line: str(line.get("node")))
    return "".join(f"{json.dumps(_kinds(line))}\n" for line in ordered)


def _kinds(value: object, key: str = "") -> object:
    if isinstance(value, dict):
        ranks = all(name.isdigit() for name in value)  # in the order in which they came
        items = sorted(value.items()) if ranks else value.items()
        return {name: _kinds(item, name) for name, item in items}
    if key == "argv":
        return ["text"]  # whoever starts last has the words in which it differs
    if isinstance(value, list):
        items = [_kinds(item) for item in value]
        return [item for number, item in enumerate(items) if item not in items[:number]]
    if value is None or isinstance(value, bool) or key in ("v", "event", "phase", "node", "how"):
        return value
    return "text" if isinstance(value, str) else "number"
