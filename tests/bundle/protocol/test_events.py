"""Each event is the same after its way through a line, and a damaged line harms nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bundle.protocol.events import (
    OF_AGENTS,
    OF_DRIVER,
    DriverEvent,
    JobEnds,
    OutputLoss,
    Record,
    TransferPlan,
    read_record,
)
from bundle.protocol.messages import AgentEvent
from tests.support.generated import generated

KINDS: tuple[type[DriverEvent] | type[AgentEvent], ...] = (*OF_DRIVER, *OF_AGENTS)
SEEDS = range(12)


def line_of(kind: type[Any], seed: int) -> dict[str, Any]:
    """The line of a generated event."""
    event = generated(kind, seed)
    record = Record(event, "4711", 12.5, getattr(event, "phase", "launch"))
    made = json.loads(json.dumps(record.to_json()))
    assert read_record(made) == record
    return dict(made)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.event)
def test_what_is_written_is_read_again(kind: type[Any]) -> None:
    assert [other.event for other in KINDS].count(kind.event) == 1
    for seed in SEEDS:
        line = line_of(kind, seed)
        assert (line["v"], line["event"], line["job_id"]) == (1, kind.event, "4711")


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.event)
@pytest.mark.parametrize("wrong", [None, True, -1, 1e300, float("nan"), "\0", [[]], {"a": {}}])
def test_a_damaged_value_leaves_the_others_alone(kind: type[Any], wrong: object) -> None:
    line = line_of(kind, 1)
    for key in line.keys() - {"event"}:
        record = read_record({**line, key: wrong})
        if record is None:
            assert key in ("ok", "phase")  # without these an event says nothing
            continue
        assert isinstance(record.event, kind)
        written = record.to_json()
        others = line.keys() - {key}
        assert {name: written[name] for name in others} == {name: line[name] for name in others}


def test_a_damaged_entry_leaves_the_others_of_its_list() -> None:
    failure = {"node": "n1", "rank": 0, "exit_code": 1, "time": 2.0}
    record = read_record(
        {"event": "result", "ok": False, "failures": [failure, {"rank": "x"}, 7, None]}
    )
    assert record is not None
    assert isinstance(record.event, JobEnds)
    (kept,) = record.event.failures or ()
    assert (kept.node, kept.rank, kept.exception) == ("n1", 0, "")


def test_what_is_no_event_is_none() -> None:
    odd = (None, 7, "job", [], {}, {"event": None}, {"event": []}, {"event": "moonlight"})
    assert [read_record(raw) for raw in odd] == [None] * len(odd)


def test_words_and_nested_values() -> None:
    assert str(OutputLoss("n1", 3, bytes=1)) == "rank 3 (1 byte)"
    assert str(OutputLoss("n1", None, frames=2)) == "the node's ranks (2 frames of messages)"
    line = JobEnds(ok=True, plan=TransferPlan(why="so")).to_json()
    assert line["plan"]["why"] == "so"
    assert "event" not in line["plan"]
