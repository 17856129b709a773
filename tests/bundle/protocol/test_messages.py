"""Requests, answers and output are the same after their way; what is none is refused."""

from __future__ import annotations

import json
import os
import zlib
from base64 import b64encode
from dataclasses import replace
from typing import Any

import pytest

from bundle.driver.transports.agent_program import factor_requests
from bundle.protocol import messages
from bundle.protocol.codec import decode, encode
from bundle.protocol.events import OF_AGENTS, RankOutput, read_agent_line
from bundle.protocol.job import Job
from bundle.protocol.messages import (
    REQUESTS,
    AgentEvent,
    AgentRequest,
    Handover,
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


def test_what_is_none_of_this_versions_requests_is_refused() -> None:
    raw = sent(ProbeRequest(PLAIN, "n1", 1, 1, "/r", "/p", "10.0.0.1").to_json())
    assert "surplus: unknown" in refusal({**raw, "surplus": 1})
    assert "node_rank: missing" in refusal({key: raw[key] for key in raw.keys() - {"node_rank"}})
    assert refusal({**raw, "nodes_here": {"of": 0.5}}).startswith("nodes_here")
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


@pytest.mark.parametrize("kind", OF_AGENTS[:-1], ids=lambda kind: kind.event)
def test_what_an_agent_sends_is_read(kind: type[AgentEvent]) -> None:
    for seed in SEEDS:
        event = generated(kind, seed, node="n1")
        line = json.dumps(event.to_json()).encode()
        assert read_agent_line(line, "n1", kind.event) == event
        surplus = json.dumps({**event.to_json(), "surplus": 1}).encode()
        assert read_agent_line(surplus, "n1", kind.event) == RankOutput("n1", data=surplus + b"\n")


def test_a_phase_that_failed_is_told_by_what_all_answers_have() -> None:
    """So does the shell of a step that finds no Python."""
    raw = {"node": "n1", "ok": False, "seconds": 0, "problems": []}
    assert decode(UnpackAnswer, raw) == UnpackAnswer(node="n1", ok=False)


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
    assert key != "zlib" or len(line) < len(data) / 3


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
