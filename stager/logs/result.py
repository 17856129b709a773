"""The result of a job as its file of events has it, with nothing left that cannot be true."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bundle.protocol.problem import Problem

from . import json_fields


def sound(raw: Mapping[str, Any]) -> dict[str, Any]:
    """A ``result`` event in which every field that a diagnosis reads is of its own type.

    The file may be damaged, or somebody's who means no good: what does not fit is left out. An
    event without a verdict is none.
    """
    if not isinstance(raw.get("ok"), bool):
        return {}
    found = dict(raw)
    found["failures"] = [
        record
        for one in json_fields.listing(raw, "failures")
        if (record := _record(one)) is not None
    ]
    found["problems"] = {
        str(node): [problem for one in listed if (problem := _problem(one)) is not None]
        for node, listed in json_fields.table(raw, "problems").items()
        if isinstance(listed, list)
    }
    for key in ("left", "vanished", "lingering"):
        ranks = [_rank(one) for one in json_fields.listing(raw, key)]
        timed = key != "lingering"
        found[key] = [one for one in ranks if one and not (timed and one["time"] is None)]
    found["stopped"] = list(json_fields.texts(raw, "stopped"))
    codes, tails = json_fields.table(raw, "exit_codes"), json_fields.table(raw, "tails")
    known = ((node, json_fields.whole(codes, node)) for node in codes)
    found["exit_codes"] = {node: code for node, code in known if code is not None}
    found["tails"] = {node: list(json_fields.texts(tails, node)) for node in tails}
    found["world_size"] = json_fields.whole(raw, "world_size")
    found["ended_by"] = json_fields.text(raw, "ended_by")
    return found


def _record(raw: object) -> dict[str, Any] | None:
    """A rank's failure, see :data:`bundle.launch.rank_results.RECORD_KEYS`."""
    if not isinstance(raw, dict):
        return None
    rank, code = json_fields.whole(raw, "rank"), json_fields.whole(raw, "exit_code")
    time = json_fields.number(raw, "time")
    if rank is None or code is None or time is None or rank < 0:
        return None
    more: dict[str, Any] = {
        key: bool(raw[key]) for key in ("told_to_end", "root_cause") if key in raw
    }
    if (ended := json_fields.number(raw, "ended")) is not None:
        more["ended"] = ended
    return {
        **more,
        "node": json_fields.text(raw, "node"),
        "rank": rank,
        "local_rank": json_fields.whole(raw, "local_rank") or 0,
        "exit_code": code,
        "exception": json_fields.text(raw, "exception"),
        "message": json_fields.text(raw, "message"),
        "lines": list(json_fields.texts(raw, "lines")),
        "time": time,
    }


def _rank(raw: object) -> dict[str, Any] | None:
    """A rank that had ended well, or went on for too long."""
    if not isinstance(raw, dict):
        return None
    rank = json_fields.whole(raw, "rank")
    if rank is None or rank < 0:
        return None
    return {
        "node": json_fields.text(raw, "node"),
        "rank": rank,
        "time": json_fields.number(raw, "time"),
        "finished": json_fields.number(raw, "finished"),
        "left": json_fields.number(raw, "left"),
        "goes_on": raw.get("goes_on") is True,
        "waits_for": list(json_fields.texts(raw, "waits_for")),
    }


def _problem(raw: object) -> dict[str, str] | None:
    if not isinstance(raw, dict) or not json_fields.text(raw, "what"):
        return None
    told = (json_fields.text(raw, key) for key in ("what", "where", "why", "fix"))
    return Problem(*told).to_json()
