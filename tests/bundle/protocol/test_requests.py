"""Each request is the same after its way to an agent; what is no request is refused."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any

import pytest

from bundle.driver.transports.agent_program import factored
from bundle.protocol.codec import encode
from bundle.protocol.job import Job
from bundle.protocol.messages import (
    REQUESTS,
    VERSION,
    AgentRequest,
    Handover,
    ProbeRequest,
    RequestReader,
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
        message = sent(encode(factored(requests)))
        for node, request in requests.items():
            reader = RequestReader(node)
            assert reader.first(message) == request
            known = factored(requests, PLAIN)
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
    message = encode(factored({"n1": ProbeRequest(PLAIN, "n1", 1, 1, "/r", "/p", "a")}))
    assert "version 2, this program speaks 1" in refusal({**sent(message), "v": 2})
    assert "n1 is not asked" in refusal({**sent(message), "nodes": ["n0"]})


def test_a_job_that_cannot_be_read_is_refused_as_such() -> None:
    raw = ProbeRequest(PLAIN, "n1", 1, 1, "/r", "/p", "10.0.0.1").to_json()
    for job in (None, [], {**raw["job"], "v": 1}):
        with pytest.raises(NodeError, match="the job description cannot be read"):
            RequestReader("").first({**raw, "job": job})
    assert isinstance(RequestReader("").first(sent(raw)).job, Job)
