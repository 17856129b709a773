"""Requests, answers and output are the same after their way; what is none is refused."""

from __future__ import annotations

import json
import os
import zlib
from base64 import b64encode
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import pytest

from bundle.driver.transports.agent_program import factor_requests
from bundle.protocol import messages
from bundle.protocol.codec import DecodeError, decode, encode
from bundle.protocol.events import RankOutput, read_agent_line
from bundle.protocol.job import Job
from bundle.protocol.messages import (
    REQUESTS,
    VERSION,
    AgentEvent,
    AgentRequest,
    Handover,
    HostFacts,
    ProbeRequest,
    RequestReader,
    UnpackAnswer,
)
from bundle.protocol.problem import NodeError
from tests.support.generated import generated
from tests.support.jobs import PLAIN

SEEDS = range(12)
each_request = pytest.mark.parametrize("kind", REQUESTS.values(), ids=lambda kind: kind.phase)


def made(kind: type[AgentRequest], seed: int) -> AgentRequest:
    """A request to the second node of a job."""
    return generated(kind, seed, job=PLAIN, node=PLAIN.nodes[1], node_rank=1)


def sent(value: dict[str, Any]) -> Any:
    return json.loads(json.dumps(value))


def refusal(raw: object) -> str:
    with pytest.raises(NodeError, match="the request cannot be read") as caught:
        RequestReader("n1").first(raw)
    return str(caught.value)


@each_request
def test_what_is_asked_is_read(kind: type[AgentRequest]) -> None:
    for seed in SEEDS:
        request = made(kind, seed)
        assert RequestReader("").first(sent(request.to_json())) == request
        full = {"v": VERSION, "phase": kind.phase, **encode(request)}
        assert RequestReader("").first(sent(full)) == request


@each_request
def test_each_node_of_a_step_reads_its_own(kind: type[AgentRequest]) -> None:
    for seed in SEEDS:
        requests = {
            node: replace(made(kind, seed + rank), node=node, node_rank=rank)
            for rank, node in enumerate(PLAIN.nodes)
        }
        message = sent(encode(factor_requests(requests)))
        for node, request in requests.items():
            reader = RequestReader(node)
            assert reader.first(message) == request
            known = factor_requests(requests, PLAIN)
            assert "job" not in known.common
            assert reader.next(sent(encode(known))) == request
            others = replace(known, nodes=tuple({*PLAIN.nodes} - {node}))
            assert reader.next(sent(encode(others))) is None


@each_request
def test_what_an_agent_hands_over_is_what_it_was_asked(kind: type[AgentRequest]) -> None:
    request = made(kind, 1)
    reader = RequestReader("n1")
    handover = Handover(request.to_json(), in_step=True, frames_sent=7)
    assert reader.first(sent({"handover": encode(handover)})) == request
    assert (reader.handed_over, reader.in_step, reader.frames_sent) == (True, True, 7)


@each_request
def test_a_field_that_is_missing_unknown_or_of_another_type_is_named(
    kind: type[AgentRequest],
) -> None:
    raw = sent({"v": VERSION, "phase": kind.phase, **encode(made(kind, 1))})
    assert "surplus: unknown" in refusal({**raw, "surplus": 1})
    required = {"node", "node_rank", "nodes_here"}
    for name in required:
        assert f"{name}: missing" in refusal({key: raw[key] for key in raw.keys() - {name}})
    for field in fields(kind):
        if field.name != "job":
            assert refusal({**raw, field.name: {"of": 0.5}}).startswith(field.name)


def test_another_version_and_an_unknown_phase_are_refused() -> None:
    raw = ProbeRequest(PLAIN, "n1", 1, 1, "/r", "/p", "10.0.0.1").to_json()
    assert "version 2, this program speaks 1" in refusal({**raw, "v": 2})
    assert "version None" in refusal({key: raw[key] for key in raw.keys() - {"v"}})
    assert "'dance' is none of early, preflight" in refusal({**raw, "phase": "dance"})
    assert "it is not an object" in refusal(["probe"])
    message = encode(factor_requests({"n1": ProbeRequest(PLAIN, "n1", 1, 1, "/r", "/p", "a")}))
    assert "version 2, this program speaks 1" in refusal({**sent(message), "v": 2})
    assert "n1 is not asked" in refusal({**sent(message), "nodes": ["n0"]})


def test_a_job_that_cannot_be_read_is_refused_as_such() -> None:
    raw = ProbeRequest(PLAIN, "n1", 1, 1, "/r", "/p", "10.0.0.1").to_json()
    for job in (None, [], {**raw["job"], "v": 1}):
        with pytest.raises(NodeError, match="the job description cannot be read"):
            RequestReader("").first({**raw, "job": job})
    assert isinstance(RequestReader("").first(sent(raw)).job, Job)


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


REPEATED = b"".join(b"rank 3 step %d: loss is 0.25\n" % step for step in range(3000))


@pytest.mark.parametrize(
    ("data", "key"),
    [
        (b"one line\n", "text"),
        (b"\xff\xfe\n", "base64"),
        (REPEATED, "zlib"),
        (REPEATED + b"\xff", "zlib"),
        (os.urandom(100_000), "base64"),
    ],
)
def test_every_byte_comes_back(data: bytes, key: str) -> None:
    line = messages.make_output_line("n1", 3, data)
    assert key in json.loads(line)
    assert b"\n" not in line
    assert b"\x1e" not in line  # it begins a frame
    assert read_agent_line(line, "n1", "launch") == RankOutput("n1", 3, data, of_ranks=True)


def test_what_repeats_is_short() -> None:
    assert len(messages.make_output_line("n1", 3, REPEATED)) < len(REPEATED) / 3


@pytest.mark.parametrize(
    "packed",
    [
        b"no zlib",
        zlib.compress(REPEATED)[:-30],
        zlib.compress(b"x" * 20_000_000),  # no agent sends as much: the driver's memory is bounded
    ],
)
def test_what_cannot_be_decompressed_is_kept_as_it_came(packed: bytes) -> None:
    event = {"v": 1, "event": "output", "rank": 3, "zlib": b64encode(packed).decode()}
    line = json.dumps(event).encode()
    assert read_agent_line(line, "n1", "launch") == RankOutput("n1", data=line + b"\n")
