"""Nodes that are processes on this machine: their places, their agents, and how those end."""

from __future__ import annotations

import fcntl
import os
import stat
import struct
import sys
import termios
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import pytest

from bundle.driver.transports import local
from bundle.driver.transports.local import LocalTransport
from bundle.driver.transports.transport import Ended
from bundle.protocol.events import RankOutput, read_agent_line
from bundle.protocol.job import Job
from bundle.protocol.messages import PreflightRequest, TidyRequest
from bundle.protocol.problem import NodeError, ProblemCode
from bundle.system import processes
from stager.pack.bundle import Packed
from tests.support.jobs import job_for
from tests.support.processes import living, until

ENDED = Ended(ProblemCode.NO_ANSWER, {"why": "exit status 0"}, 0)
OWN = f"stager-{os.geteuid()}"


@pytest.fixture
def job(single: Packed, tmp_path: Path) -> Job:
    return job_for(single, tmp_path)


@pytest.fixture
def transport(job: Job, program: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalTransport]:
    """The real one; agents are started from the program that the driver was started from."""
    monkeypatch.setattr(sys, "argv", [str(program), "drive"])
    made = LocalTransport(job)
    yield made
    made.close()
    assert living(program) == []


def requests(job: Job) -> dict[str, PreflightRequest]:
    return {node: PreflightRequest(job, node, rank, 2) for rank, node in enumerate(job.nodes)}


def test_each_node_has_a_place_of_its_own(transport: LocalTransport, job: Job) -> None:
    events: dict[str, Any] = {}
    ended = transport.run(
        "preflight", requests(job), lambda event: events.update({event.node: event})
    )
    assert ended == dict.fromkeys(("local1", "local2"), ENDED)
    for node, event in events.items():
        assert event.root == f"{os.environ['STAGER_NODE_ROOT']}/{OWN}/nodes/{node}/{OWN}"
        assert stat.S_IMODE(os.stat(event.root).st_mode) == 0o700
    assert len(events) == transport.nodes_here == 2


def test_one_agent_a_node_does_one_phase_after_the_other(
    transport: LocalTransport, job: Job
) -> None:
    events: list[Any] = []
    transport.run("preflight", requests(job), events.append)
    agents = {node: agent.pid for node, agent in transport._agents.items()}
    root = {event.node: event.root for event in events}
    asked = {
        node: TidyRequest(job, node, rank, 2, root[node], "") for rank, node in enumerate(job.nodes)
    }
    transport.run("tidy", asked, events.append)
    assert {node: agent.pid for node, agent in transport._agents.items()} == agents
    transport._agents["local1"].kill()
    transport._agents["local1"].wait()
    ended = transport.run("tidy", asked, events.append)
    assert [*ended.values()] == [ENDED, ENDED]
    assert transport._agents["local1"].pid != agents["local1"]
    assert [event.event for event in events] == ["preflight"] * 2 + ["tidy"] * 4


def test_every_nodes_answer_arrives_though_one_fails(transport: LocalTransport, job: Job) -> None:
    asked = requests(job)
    other = replace(job, requires=replace(job.requires, machine="pdp11"))
    asked["local2"] = replace(asked["local2"], job=other)
    events: list[Any] = []
    ended = transport.run("preflight", asked, events.append)
    assert {node: end.code for node, end in ended.items()} == {"local1": 0, "local2": 3}
    assert {event.node: event.ok for event in events} == {"local1": True, "local2": False}


def test_an_agent_that_cannot_be_started_is_a_problem_of_its_node(
    transport: LocalTransport, job: Job
) -> None:
    asked = {"local2": TidyRequest(job, "local2", 1, 2, "/r", "/no/such/python")}
    with pytest.raises(NodeError) as caught:
        transport.run("tidy", asked, print)
    problem = caught.value.problem
    assert (problem.code, problem.where) == (ProblemCode.AGENT_NOT_STARTED, "local2")
    assert problem.why.startswith("/no/such/python: ")


def test_room_is_asked_for_all_nodes_that_have_no_environment(job: Job) -> None:
    """One of them may fit where two do not; what is there already needs no room."""
    free = os.statvfs(os.environ["STAGER_NODE_ROOT"])
    bytes_free = free.f_bavail * free.f_frsize
    large = replace(job, room=(bytes_free * 2 // 3, 10))
    with pytest.raises(NodeError, match="are free"):
        LocalTransport(large)
    for node in job.nodes:
        envs = Path(os.environ["STAGER_NODE_ROOT"], OWN, "nodes", node, OWN, "envs")
        (envs / job.bundle_id).mkdir(parents=True)
        if node == "local1":
            LocalTransport(large)  # one is left
    LocalTransport(replace(job, room=(bytes_free * 2, 10)))


def agent(code: str) -> processes.Process:
    return processes.start(
        [sys.executable, "-c", code], stdout=processes.PIPE, stderr=processes.STDOUT
    )


def test_what_is_no_event_is_output() -> None:
    """A traceback of an agent, or what a library prints."""
    odd = ["plain", "7", "[]", '{"v": 2, "event": "x"}', '{"v": 1}', "{"]
    odd += ['{"v": 1, "event": "real"}', '{"v": 1, "event": "tidy", "node": "a", "ok": 1}']
    for rank in ("1e999", "true", '"0"', "[]"):
        odd += [f'{{"v": 1, "event": "output", "node": "a", "text": "x", "rank": {rank}}}']
    for line in map(str.encode, odd):
        assert read_agent_line(line, "a", "") == RankOutput("a", data=line + b"\n")


def test_a_last_line_without_an_end_counts() -> None:
    events: list[Any] = []
    local._follow_agents({"a": agent("import sys; sys.stdout.write('cut of')")}, events.append)
    assert [event.data for event in events] == [b"cut of\n"]


@pytest.mark.parametrize(
    ("phase", "grace", "code"), [("launch", 0.5, -15), ("launch", 300, 4), ("preflight", 0.1, 4)]
)
def test_a_rank_that_fails_takes_others_along_unless_they_end_by_themselves_first(
    monkeypatch: pytest.MonkeyPatch, phase: str, grace: float, code: int
) -> None:
    """A rank that lost its peers has something to say, too, and every node's problem counts."""
    monkeypatch.setattr(local, "FAILURE_GRACE", grace)
    well = agent("raise SystemExit(0)")
    os.waitid(os.P_PID, well.pid, os.WEXITED | os.WNOWAIT)  # it has ended before one fails
    other = agent(f"import time; time.sleep({600 if code < 0 else 0.5}); raise SystemExit(4)")
    running = {"a": agent("raise SystemExit(3)"), "b": other, "c": well}
    started = time.monotonic()
    ended = local._follow_agents(running, lambda event: None, phase)
    assert ended == {"a": 3, "b": code, "c": 0}
    if code < 0:
        assert time.monotonic() - started >= grace


def test_whatever_ends_the_driver_ends_the_agents(
    transport: LocalTransport, job: Job, program: Path
) -> None:
    def fail(event: dict[str, Any]) -> None:
        raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        transport.run("preflight", requests(job), fail)
    assert living(program) == []


def is_full(pipe: IO[bytes] | None) -> bool:
    """Whether a pipe takes no more; one page of it may be free, as lines are written whole."""
    assert pipe is not None
    (count,) = struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)))
    return int(count) >= fcntl.fcntl(pipe, 1032) - 10_000  # F_GETPIPE_SZ


def test_an_agent_that_nobody_listens_to_is_ended_all_the_same() -> None:
    """It is stuck in writing; its output is closed first, so that it need not be killed."""
    code = (
        "import signal, sys\n"
        "def end(*_): raise SystemExit(7)\n"
        "signal.signal(signal.SIGTERM, end)\n"
        "try:\n"
        "    while True: print('x' * 9999)\n"
        "finally: print('cleaned up', flush=True)\n"
    )
    stuck = agent(code)
    assert until(lambda: is_full(stuck.stdout))
    started = time.monotonic()
    local._stop_all({"a": stuck}, 600)
    assert time.monotonic() - started < 300
    assert stuck.returncode not in (None, -9)
