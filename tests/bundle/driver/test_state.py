"""What the driver makes of all answers: several tasks, none, nodes that may be left out."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bundle.driver import driver
from bundle.driver.logs import Logs
from bundle.driver.output import describe_losses
from bundle.driver.phases import PREFLIGHT
from bundle.driver.state import NodesFailed, State, drop_known_command
from bundle.driver.transports.transport import Ended, Event, OnEvent, Requests, Transport
from bundle.launch import commands
from bundle.launch.program_variables import JobDirectories
from bundle.protocol.enumerations import Launcher
from bundle.protocol.events import FramesLost, RankOutput, find_answer_class
from bundle.protocol.job import Job
from bundle.protocol.messages import (
    AgentRequest,
    Answer,
    CollectRequest,
    FailureRecord,
    GroupSettings,
    LaunchAnswer,
    PreflightAnswer,
    Started,
)
from bundle.protocol.problem import NodeError, Problem, ProblemCode
from stager.pack.bundle import Packed
from tests.support.displayed import displayed
from tests.support.jobs import LAUNCH, job_for, launch_request
from tests.support.problems import worded

ENDED = Ended(ProblemCode.NO_ANSWER, {"why": "exit status 0"}, 0)

NODES = ("n1", "n2", "n3")


class Scripted(Transport):
    """A transport whose nodes say what the test wants."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.ended: dict[str, Ended] = {}
        self.asked: list[tuple[str, dict[str, AgentRequest]]] = []

    def run(self, phase: str, requests: Requests, on_event: OnEvent) -> dict[str, Ended]:
        self.asked.append((phase, dict(requests)))
        for event in self.events:
            on_event(event)
        return {node: self.ended.get(node, ENDED) for node in requests}


def state_of(job: Job) -> State:
    state = State(job, Logs(job))
    state.transport = Scripted()
    return state


@pytest.fixture
def job(single: Packed, tmp_path: Path) -> Job:
    return job_for(single, tmp_path, nodes=NODES)


@pytest.fixture
def state(job: Job) -> State:
    return state_of(job)


def asked(state: State, phase: str, *events: Event, **ended: Ended) -> None:
    transport = state.transport
    assert isinstance(transport, Scripted)
    transport.events, transport.ended = list(events), ended
    state.ask(
        phase,
        lambda node: CollectRequest(*state.common(node), root="/r", python="", directory=node),
    )


def said(node: str, *, ok: bool = True, phase: str = "launch", **more: Any) -> Answer:
    return find_answer_class(phase)(node=node, ok=ok, **more)


def printed(state: State, capfd: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in displayed(state, capfd).splitlines()]


def test_a_node_that_says_nothing_is_lost(job: Job, state: State) -> None:
    gone = Ended(ProblemCode.NO_ANSWER_NODE_FAILURE, {}, -9)
    asked(state, "launch", said("n1", exit_code=0), said("n3", exit_code=0), n2=gone)
    answer = state.answers["n2"]
    assert (answer.ok, answer.lost, answer.exit_code) == (False, True, -9)
    values = {"phase": "launch", "log_dir": job.log_dir}
    assert answer.problems == (Problem(ProblemCode.NO_ANSWER_NODE_FAILURE, "n2", values),)
    assert answer.problems[0].what == "launch gave no answer"
    assert answer.problems[0].why == "Slurm lost the node (node failure)"
    assert state.lost_node == "n2"
    assert state.task_codes == {"0": 0, "1": -9, "2": 0}
    with pytest.raises(NodesFailed, match=r"^n2$"):
        state.fail_if_any()


def native(job: Job) -> State:
    state = state_of(
        replace(job, nodes=NODES[:2], launch=replace(job.launch, launcher=Launcher.SRUN))
    )
    state.nproc = 2
    return state


def test_the_answers_of_several_tasks_are_one(job: Job) -> None:
    """Where Slurm starts the ranks each has an agent of its own."""
    state = native(job)
    failure = FailureRecord(node="n2", rank=3, exit_code=7, time=1.0)
    failed = said("n2", ok=False, exit_code=7, task=3, failures=(failure,), tail=("raised",))
    others = [said(node, exit_code=0, task=task) for task, node in enumerate(("n1", "n1", "n2"))]
    asked(state, "launch", failed, *others)
    assert state.task_codes == {"0": 0, "1": 0, "2": 0, "3": 7}
    assert state.answers["n1"].ok
    answer = state.get_answers(LaunchAnswer)["n2"]
    assert (answer.ok, answer.exit_code, answer.tasks) == (False, 7, 2)
    assert (answer.failures, answer.tail) == ((failure,), ("raised",))
    assert not answer.lost
    state = native(job)  # and one that says nothing
    asked(state, "launch", *others, n2=Ended(ProblemCode.NO_ANSWER_KILLED, {"why": "Killed"}, -9))
    answer = state.get_answers(LaunchAnswer)["n2"]
    assert (answer.ok, answer.lost, answer.exit_code) == (False, True, -9)
    assert [problem.why for problem in answer.problems] == ["Killed"]
    assert state.task_codes == {"0": 0, "1": 0, "2": 0, "3": -9}


def test_a_launchers_status_has_its_nodes_rank_in_the_job(job: Job) -> None:
    """Not its number in the step that all phases share: that still has a node that was left out."""
    state = state_of(replace(job, nodes=("n1", "n3")))
    asked(state, "launch", said("n1", exit_code=0, task=0), said("n3", exit_code=5, task=2))
    assert state.task_codes == {"0": 0, "1": 5}


@pytest.mark.parametrize(
    ("min_nodes", "elastic", "bad", "left"),
    [
        (None, None, [], NODES),
        (None, None, ["n2"], None),
        (2, None, ["n1"], ("n2", "n3")),
        (2, None, ["n1", "n2"], None),
        (1, None, ["n1", "n2", "n3"], None),
        (None, (2, 3), ["n2"], ("n1", "n3")),
        (1, (2, 3), ["n2", "n3"], ("n1",)),
    ],
)
def test_who_may_be_left_out(
    job: Job, capfd: pytest.CaptureFixture[str], min_nodes: int | None,
    elastic: tuple[int, int] | None, bad: Sequence[str], left: tuple[str, ...] | None,
) -> None:  # fmt: skip
    launch = replace(LAUNCH, elastic=elastic)
    state = state_of(replace(job, min_nodes=min_nodes, launch=launch))
    state.facts = {node: PreflightAnswer(node, root=node) for node in NODES}
    problem = worded("it is broken", "there", "of itself", "mend it")
    state.answers = {
        node: Answer(node, ok=node not in bad, problems=(problem,) if node in bad else ())
        for node in NODES
    }
    if left is None:
        with pytest.raises(NodesFailed) as caught:
            state.leave_out_or_fail()
        assert set(caught.value.answers) == set(bad)
        assert state.job.nodes == NODES
        assert printed(state, capfd) == []
        return
    state.leave_out_or_fail()
    assert state.job.nodes == left
    assert tuple(state.facts) == tuple(state.answers) == left
    assert state.left_out == {node: (str(problem),) for node in bad}
    told = [event["problems"] for event in printed(state, capfd) if event["event"] == "left-out"]
    assert told == ([{node: [problem.to_json()] for node in bad}] if bad else [])
    # What was left out before counts, too.
    state.answers = {node: Answer(node, ok=node != left[0]) for node in left}
    if len(left) - 1 < (min_nodes or 2):
        with pytest.raises(NodesFailed):
            state.leave_out_or_fail()


def test_output_goes_to_the_log_of_its_rank_and_other_events_to_the_jobs(
    job: Job, state: State, capfd: pytest.CaptureFixture[str]
) -> None:
    state.nproc = 2
    state.take("launch", RankOutput("n2", 3, b"mine\ntoo\n", of_ranks=True))
    state.take("launch", RankOutput("n2", None, b"torchrun's\n", of_ranks=True))
    state.take("launch", RankOutput("n1", None, b"the head's\n"))
    state.log_line("n3", "n3 staged -> /x")
    again = state_of(job)  # once more
    again.nproc = 2
    again.log_line("n3", "n3 staged -> /x")
    logs = {path.name: path.read_text() for path in Path(job.log_dir).glob("*.out")}
    assert logs == {
        "demo.4711.n2.3.out": "mine\ntoo\n",
        "demo.4711.n2.2.out": "torchrun's\n",
        "demo.4711.n1.0.out": "the head's\n",
        "demo.4711.n3.4.out": "n3 staged -> /x\n" * 2,
    }
    (shown,) = printed(state, capfd)
    assert (shown["head"], shown["lines"]) == (True, ["the head's"])
    assert Path(job.log_dir, "events.4711.jsonl").read_text() == ""
    state.note("some\nthing")
    [kept] = Path(job.log_dir, "events.4711.jsonl").read_text().splitlines()
    assert [json.loads(kept)] == printed(state, capfd)
    assert re.sub(r'"time": [\d.]+, ', "", kept) == (
        '{"v": 1, "job_id": "4711", "event": "note", "text": "some\\nthing", "warning": false}'
    )


@pytest.mark.parametrize("changed", [{"max_restarts": 2}, {"elastic": (1, 2)}])
def test_where_ranks_move_between_nodes_the_first_ones_are_shown(
    job: Job, changed: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    """torchrun may deal the first ranks to any node then."""
    state = state_of(replace(job, launch=replace(job.launch, **changed)))
    state.nproc = 2
    for rank, node in ((2, "n1"), (0, "n2"), (1, "n2"), (None, "n1")):
        state.take("launch", RankOutput(node, rank, b"x\n", of_ranks=True))
    assert [(one["rank"], one["head"]) for one in printed(state, capfd)] == [
        *((0, True), (1, True), (None, True))
    ]


def test_a_log_that_cannot_be_written_is_told_and_costs_nothing(job: Job, state: State) -> None:
    Path(job.log_dir, "demo.4711.n1.0.out").mkdir(parents=True)
    state.log_line("n1", "lost")
    assert state.logs.fault == "demo.4711.n1.0.out: Is a directory"
    assert state.output.losses() == []  # it was the driver's
    state.take("launch", RankOutput("n1", 0, b"so is this", of_ranks=True))
    (loss,) = state.output.losses()
    assert (loss.node, loss.rank, loss.bytes) == ("n1", 0, 10)


def lose(job: Job, *events: Event) -> State:
    """A launch in which these events came."""
    state = state_of(job)
    asked(state, "launch", *events)
    return state


def sent(node: str, counts: dict[str, int], task: int | None = None) -> Answer:
    return said(node, exit_code=0, sent=counts, task=task)


def test_bytes_that_did_not_come_are_counted_by_rank(job: Job) -> None:
    outputs = [RankOutput(node, 0, b"12345", of_ranks=True) for node in NODES]
    state = lose(job, *outputs, *(sent(node, {"0": 5}) for node in NODES))
    assert state.output.losses() == []
    state = lose(
        job,
        RankOutput("n2", 3, b"\0\1\2", of_ranks=True),
        sent("n2", {"3": 10, "": 4}, task=0),
        FramesLost("n2", "0", 2),  # the same, less exactly
    )
    found = [(loss.node, loss.rank, loss.bytes) for loss in state.output.losses()]
    assert found == [("n2", 3, 7), ("n2", None, 4)]
    (first, second) = describe_losses(state.output.losses(), state.left_out)["n2"]
    assert "output of rank 3 (7 bytes) is lost" in str(first)
    assert "output of the node's ranks (4 bytes) is lost" in str(second)
    (loss,) = lose(job, FramesLost("n3", "2", 5)).output.losses()  # of one that never answered
    assert (loss.node, loss.rank, loss.frames) == ("n3", None, 5)


def test_what_a_node_that_is_left_out_has_lost_fails_no_job(
    job: Job, capfd: pytest.CaptureFixture[str]
) -> None:
    """It crashed amid a message; the group went on without it."""
    answers = [sent(node, {}) for node in ("n1", "n2")]
    half = FramesLost("n3", "0", 1)
    codes = []
    for left_out in {"n3": ("launch gave no answer",)}, {}:
        state = lose(job, *answers, half)
        state.left_out |= left_out
        codes.append(driver._conclude(state))
        assert state.display.drain(60)
    first, second = (one for one in printed(state, capfd) if one["event"] == "result")
    assert codes == [0, 3]
    assert (first["ok"], first["problems"]) == (True, {})
    assert first["logs_lost"] == second["logs_lost"] != []
    assert list(second["problems"]) == ["n3"]


def test_a_rank_that_goes_on_in_another_log_does_not_join_its_line(job: Job, state: State) -> None:
    """A last line without an end stays so, unless somebody else writes below it."""
    for rank, text in ((0, b"half"), (0, b" a line"), (None, b"torchrun's\n"), (0, b"end")):
        state.take("launch", RankOutput("n1", rank, text, of_ranks=True))
    log = Path(job.log_dir, "demo.4711.n1.0.out")
    assert log.read_bytes() == b"half a line\ntorchrun's\nend"
    pieces = Path(job.log_dir, "order.4711.tsv").read_text().splitlines()
    assert sum(int(line.split("\t")[3]) for line in pieces) == log.stat().st_size


def test_no_event_has_a_passed_secret(
    job: Job, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A rank printed it: its own log has every byte, the events have not."""
    monkeypatch.setenv("MINE", "SEKRITENV789abc")
    state = state_of(replace(job, launch=replace(job.launch, pass_env=("MINE",))))
    printed = "ValueError: SEKRITENV789abc"
    failure = FailureRecord("n1", 0, 1, 1.0, message=printed, lines=(printed,))
    state.take("launch", RankOutput(node="n1", rank=0, data=f"{printed}\n".encode()))
    state.take("launch", LaunchAnswer(node="n1", ok=False, failures=(failure,), tail=(printed,)))
    state.emit(replace(state.result, failures=(failure,), tails={"n1": (printed,)}))
    folder = Path(job.log_dir)
    kept = (folder / f"events.{job.id}.jsonl").read_text()
    assert "SEKRIT" not in kept
    assert kept.count("ValueError: ***") == 6
    assert [path.name for path in folder.iterdir() if b"SEKRIT" in path.read_bytes()] == [
        f"{job.name}.{job.id}.n1.0.out"
    ]
    shown, *events = displayed(state, capfd).splitlines()
    assert printed in shown
    assert "SEKRIT" not in "".join(events)


LISTED = {"host": "n1", "listed": "eth0 10.0.0.1"}
LACKING = Problem(ProblemCode.NO_INTERFACE, "ib7", LISTED)


def preflight_of(state: State, head: PreflightAnswer, **others: Any) -> None:
    """Use what a preflight found of the head node and of the others."""
    found = {"root": "/r", "python": "/p", "address": "10.0.0.1", **others}
    state.answers = {node: PreflightAnswer(node, **found) for node in state.job.nodes}
    state.answers["n1"] = head
    PREFLIGHT.use(state)


def test_an_interface_of_no_node_is_the_settings_fault_and_else_one_nodes(state: State) -> None:
    lacking = PreflightAnswer("n1", ok=False, problems=(LACKING,))
    with pytest.raises(NodeError) as caught:
        preflight_of(state, lacking, no_head=LACKING)
    problem = caught.value.problem
    assert problem.code is ProblemCode.INTERFACE_OF_NO_NODE
    assert problem.where == "[launch] interface"
    assert problem.why == "none has ib7; on n1 there are: eth0 10.0.0.1"
    with pytest.raises(NodesFailed, match=r"^n1$"):
        preflight_of(state, lacking)


def started_event(
    rank: int, *, root: str = "/tmp/stager-7", port: int = 6000, nodes: int = 64, **launch: Any
) -> Started:
    """The event of a node."""
    request = launch_request(
        rank, nodes, GroupSettings("10.0.0.1", port, "gloo", 2, on_cpus=True), **launch
    )
    directories = JobDirectories(
        root=root, environment=f"{root}/envs/12ab", job_dir=f"{root}/jobs/4711.{rank}.0"
    )
    program = [f"{directories.job_dir}/run_wrapper.py", "train.py", "--epochs", "3"]
    argv = commands.make_torchrun_argv(directories, request, f"10.0.0.{rank + 1}", program)
    return Started(request.node, argv=tuple(argv), interface="eth0")


def test_commands_that_differ_by_the_node_only_are_told_once() -> None:
    for launch in {}, {"elastic": (2, 64), "max_restarts": 1}:
        known: set[tuple[str, ...]] = set()
        first, *others = (
            drop_known_command(started_event(rank, **launch), known) for rank in range(64)
        )
        assert first == started_event(0, **launch)
        assert {event.argv for event in others} == {()}
        assert len({event.node for event in others}) == 63
    known = set()
    for event in (
        started_event(0),
        started_event(1, root="/scratch/stager-7"),
        started_event(2, nodes=63),
        started_event(3, port=6001),
    ):
        assert drop_known_command(event, known) == event
