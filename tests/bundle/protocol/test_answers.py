"""Each event of an agent is the same after its way to the driver."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest

from bundle.protocol import messages
from bundle.protocol.codec import DecodeError, decode, encode
from bundle.protocol.messages import VERSION, AgentEvent, HostFacts, UnpackAnswer
from tests.support.generated import generated


def kinds(base: type[AgentEvent]) -> Iterator[type[AgentEvent]]:
    """The classes of the events that agents send."""
    for kind in base.__subclasses__():
        if kind.__module__ == messages.__name__ and kind.event:
            yield kind
        yield from kinds(kind)


EVENTS = sorted(set(kinds(AgentEvent)), key=lambda kind: kind.event)
each_event = pytest.mark.parametrize("kind", EVENTS, ids=lambda kind: kind.event)


def fields_of(raw: dict[str, Any]) -> dict[str, Any]:
    """The fields of an event as the driver receives it."""
    sent = json.loads(json.dumps(raw))
    return {key: sent[key] for key in sent.keys() - {"v", "event"}}


@each_event
def test_what_is_sent_is_read(kind: type[AgentEvent]) -> None:
    for seed in range(12):
        event = generated(kind, seed)
        raw = event.to_json()
        assert (raw["v"], raw["event"]) == (VERSION, kind.event)
        assert decode(kind, fields_of(raw)) == event
        assert decode(kind, fields_of(encode(event))) == event


def test_each_event_has_a_name_of_its_own() -> None:
    assert len({kind.event for kind in EVENTS}) == len(EVENTS) > 10


@each_event
def test_a_field_that_is_unknown_or_of_another_type_is_named(
    kind: type[AgentEvent],
) -> None:
    raw = fields_of(encode(generated(kind, 1)))
    with pytest.raises(DecodeError, match=r"^at: surplus: unknown$"):
        decode(kind, {**raw, "surplus": 1}, "at")
    for field in fields(kind):
        with pytest.raises(DecodeError, match=rf"^at\.{field.name}"):
            decode(kind, {**raw, field.name: {"of": 0.5}}, "at")


def test_a_phase_that_failed_is_told_by_what_all_answers_have() -> None:
    """So does the shell of a step that finds no Python."""
    raw = {"node": "n1", "ok": False, "seconds": 0, "problems": []}
    assert decode(UnpackAnswer, raw) == UnpackAnswer(node="n1", ok=False)


def test_the_facts_of_a_machine_are_read() -> None:
    for seed in range(12):
        facts = generated(HostFacts, seed)
        assert decode(HostFacts, json.loads(json.dumps(encode(facts)))) == facts
