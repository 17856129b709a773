"""Silence: when it is mentioned, when ranks are asked, and what is made of their answers."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bundle.driver.hangs import UNKNOWN_STATE
from bundle.driver.logs import Logs
from bundle.driver.rank_watch import SILENCE, RankWatch
from bundle.driver.state import State
from bundle.driver.transports.transport import Ended, LaunchStopped, Transport
from bundle.protocol.codec import decode
from bundle.protocol.enumerations import Allocation
from bundle.protocol.events import JobStacks, RankOutput
from bundle.protocol.job import Job
from bundle.protocol.messages import (
    UNASKED,
    CollectiveState,
    LaunchAnswer,
    ProcessState,
    RankState,
    RankStates,
    Started,
    ThreadStack,
)
from bundle.protocol.problem import ProblemCode
from tests.support.jobs import PLAIN

READING = ThreadStack("main", ("/p/loader.py:88 read_shard",))
WAITING = ThreadStack("main", ("/p/train.py:40 step",))
SECRET = "hunter2-and-more"
Answer = Callable[[int], list[RankStates]]


def states(node: str, number: int, *ranks: RankState) -> RankStates:
    return RankStates(node, ranks, number)


def rank(number: int, stack: ThreadStack, enqueued: int, completed: int, **more: Any) -> RankState:
    group = CollectiveState("default_pg", (), enqueued, -1, completed, "all_reduce")
    return RankState(number, ProcessState(number + 9, "p", "S"), (stack,), (group,), **more)


def hang(number: int) -> list[RankStates]:
    """Return answers of two nodes: rank 1 reads, and rank 0 waits for it."""
    reader, waiter = rank(1, READING, 3, 3), rank(0, WAITING, 4, 3)
    return [states("n1", number, reader), states("n0", number, waiter)]


class Recorder(Transport):
    """A transport that keeps what is sent to the ranks."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def send_to_ranks(self, line: str) -> None:
        self.lines.append(line)

    def run(self, *args: object) -> dict[str, Ended]:
        raise NotImplementedError

    deliver = fetch = close = run  # type: ignore[assignment]


class Watched:
    """A watch of two nodes with one rank each, with a clock of its own and answers as wanted."""

    def __init__(self, job: Job, answer: Answer = hang) -> None:
        self.now, self.answer, self.asked = 0.0, answer, 0
        self.logs = Path(job.log_dir)
        self.state = State(job, Logs(job))
        self.transport = self.state.transport = Recorder()
        self.watch = RankWatch(self.state, lambda: self.now)
        for node in job.nodes:
            self.watch.take(Started(node))

    def wait(self, seconds: int) -> None:
        """Let time pass; the nodes answer each question within the second."""
        for _ in range(seconds):
            self.now += 1
            self.watch.tick()
            for line in self.transport.lines[self.asked :]:
                for event in self.answer(int(line.removeprefix("look "))):
                    self.watch.take(event)
            self.asked = len(self.transport.lines)

    def output(self, text: str = "step 1\n", number: int = 0) -> None:
        self.watch.take(RankOutput(f"n{number}", number, text.encode(), of_ranks=True))

    def request(self) -> Path:
        path = self.logs / "stacks.4711.request"
        path.write_text("")
        return path

    def events(self, kind: str) -> list[dict[str, Any]]:
        lines = map(json.loads, (self.logs / "events.4711.jsonl").read_text().splitlines())
        return [line for line in lines if line["event"] == kind]

    def stacks(self) -> JobStacks:
        raw = json.loads((self.logs / "stacks.4711.json").read_text())
        assert raw.pop("v") == 1
        return decode(JobStacks, raw)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    monkeypatch.delenv(SILENCE, raising=False)
    return replace(PLAIN, allocation=Allocation.LOCAL, log_dir=str(tmp_path / "logs"))


def end_after(job: Job, seconds: float) -> Job:
    return replace(job, launch=replace(job.launch, hang_timeout=seconds))


def test_a_silence_is_mentioned_and_again_when_it_has_doubled(job: Job) -> None:
    watched = Watched(job)
    watched.output("step 1\nloss 0.1\n")
    watched.wait(240)
    assert (watched.events("silent"), watched.transport.lines) == ([], [])
    watched.wait(1000)
    seconds = [event["seconds"] for event in watched.events("silent")]
    assert seconds == [241, 481, 961]
    first = watched.events("silent")[0]
    assert (first["usual"], first["rank"], first["line"]) == (None, 0, "loss 0.1")
    assert watched.transport.lines == [f"look {number}" for number in range(1, 7)]


def test_the_longest_pause_before_counts_three_times(job: Job) -> None:
    watched = Watched(job)
    for pause in (1, 100, 5):
        watched.output()
        watched.wait(pause)
    watched.output(number=1)
    watched.wait(300)
    assert watched.events("silent") == []
    watched.wait(1)
    (event,) = watched.events("silent")
    assert (event["usual"], event["rank"]) == (100, 1)


def test_time_in_which_the_driver_was_stopped_is_no_silence(job: Job) -> None:
    watched = Watched(job)
    watched.output()
    watched.now += 10_000
    watched.wait(200)
    assert watched.events("silent") == []


def test_a_launch_that_has_not_begun_or_has_ended_is_not_silent(job: Job) -> None:
    watched = Watched(job)
    watched.wait(200)
    watched.watch.take(LaunchAnswer("n0"))
    watched.watch.take(LaunchAnswer("n1"))
    watched.wait(1000)
    assert watched.events("silent") == []


def test_the_last_line_has_no_secrets(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    watched = Watched(job, lambda number: hang_in(number, f"/p/{SECRET}.py:3 main"))
    watched.output(f"key {SECRET}\n")
    watched.wait(300)
    assert watched.events("silent")[0]["line"].startswith("key ")
    kept = "".join(path.read_text() for path in watched.logs.iterdir())
    assert "stacks.4711.json" in os.listdir(watched.logs)
    assert SECRET not in kept


def hang_in(number: int, frame: str) -> list[RankStates]:
    first = rank(0, ThreadStack("main", (frame,)), 3, 3)
    return [states("n0", number, first), states("n1", number, rank(1, WAITING, 4, 3))]


def test_a_hang_is_named_once_and_its_stacks_are_kept(job: Job) -> None:
    watched = Watched(job)
    watched.wait(600)
    (event,) = watched.events("hang")
    assert (event["kind"], event["rank"], event["node"], event["number"]) == ("behind", 1, "n1", 4)
    assert event["place"] == "loader.py:88 read_shard"
    assert (event["certain"], event["ended"]) == (True, False)
    kept = watched.stacks()
    assert (kept.job_id, kept.silent > 240, kept.ending) == ("4711", True, False)
    assert kept.nodes["n1"] == (rank(1, READING, 3, 3),)
    assert kept.hang is not None
    assert kept.hang.text == event["text"]
    stood = watched.watch.end()
    assert stood == kept.hang


def test_what_nccl_says_is_kept_and_bounded(job: Job) -> None:
    reader, waiter = hang(2)[0], replace(hang(2)[1], nccl="NCCL " * 100_000)
    watched = Watched(job, lambda number: [reader, waiter] if number == 2 else hang(number))
    watched.wait(300)
    kept = watched.stacks()
    assert (kept.nccl[:5], len(kept.nccl)) == ("NCCL ", 1 << 16)


def test_ranks_that_go_on_without_printing_do_not_hang(job: Job) -> None:
    watched = Watched(job, lambda number: [states("n0", number, rank(0, WAITING, number, number))])
    watched.wait(300)
    assert watched.events("silent")
    assert watched.events("hang") == []
    assert watched.watch.end() is None


def test_a_hang_is_over_when_ranks_have_printed_for_a_while(job: Job) -> None:
    watched = Watched(job)
    watched.wait(300)
    watched.output("Watchdog caught collective operation timeout\n")
    watched.wait(20)
    assert watched.watch.end() is not None  # it is what PyTorch ends the ranks for
    watched.output()
    watched.wait(150)
    watched.output()
    assert watched.watch.end() is None


def test_output_while_ranks_are_asked_is_no_hang(job: Job) -> None:
    watched = Watched(job)
    watched.wait(242)
    assert watched.transport.lines
    watched.output()
    watched.wait(60)
    assert watched.events("hang") == []


def test_a_job_is_ended_only_where_that_is_set(job: Job) -> None:
    watched = Watched(end_after(job, 60))
    with pytest.raises(LaunchStopped) as caught:
        watched.wait(100)
    problem = caught.value.problem
    assert (problem.code, problem.where) == (ProblemCode.RANKS_HANG, "n1")
    assert 60 < float(problem.values["seconds"]) < 70
    (event,) = watched.events("hang")
    assert event["ended"]
    stood = watched.watch.end()
    assert stood is not None
    assert stood.ended


def test_a_job_that_shows_nothing_is_ended_all_the_same(job: Job) -> None:
    watched = Watched(end_after(job, 60), lambda number: [])
    with pytest.raises(LaunchStopped) as caught:
        watched.wait(200)
    assert caught.value.problem.where == "n0"
    assert watched.events("hang")[0]["kind"] == "unknown"


def test_a_request_is_answered_at_once_and_removed(job: Job) -> None:
    watched = Watched(job)
    request = watched.request()
    watched.wait(3)
    watched.output()  # the job goes on
    watched.wait(7)
    assert not request.exists()
    kept = watched.stacks()
    assert (len(kept.nodes), kept.hang) == (2, None)
    watched.request()
    watched.wait(10)
    assert watched.stacks().hang is not None  # nothing was printed since
    assert watched.events("silent") == watched.events("hang") == []
    assert len(watched.transport.lines) == 4


@pytest.mark.parametrize("kind", ["link", "folder", "pipe", "another user's"])
def test_a_request_that_is_no_file_of_this_users_is_none(
    job: Job, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(job)
    path = watched.logs / "stacks.4711.request"
    if kind == "link":
        path.symlink_to(watched.logs / "job.4711.json")
    elif kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.write_text("")
        os.chown(path, 12345, -1)
    watched.wait(10)
    watched.watch.end()
    assert watched.transport.lines == []
    assert not (watched.logs / "stacks.4711.json").exists()


def test_a_request_that_cannot_be_removed_is_answered_once(job: Job) -> None:
    watched = Watched(job)
    request = watched.request()
    unlink, os.unlink = os.unlink, refuse
    try:
        watched.wait(30)
    finally:
        os.unlink = unlink
    assert request.exists()
    assert len(watched.transport.lines) == 2


def refuse(*args: Any, **kwargs: Any) -> None:
    raise PermissionError


def test_a_job_that_ends_while_it_is_asked_leaves_what_it_has(job: Job) -> None:
    watched = Watched(job)
    request = watched.request()
    watched.wait(2)
    assert watched.transport.lines == ["look 1"]
    assert watched.watch.end() is None
    assert not request.exists()
    kept = watched.stacks()
    assert kept.nodes["n1"] == (rank(1, READING, 3, 3),)


def test_a_full_disk_leaves_the_earlier_stacks(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(job)
    watched.request()
    watched.wait(10)
    before = watched.stacks()

    def fail(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    request = watched.request()
    watched.wait(10)
    assert watched.stacks() == before
    assert not request.exists()
    assert watched.state.logs.fault == "stacks.4711.json: No space left on device"
    assert [name for name in os.listdir(watched.logs) if name.startswith(".")] == []


def test_stacks_of_ranks_that_do_not_end_are_kept(job: Job) -> None:
    watched = Watched(job)
    watched.wait(10)
    watched.watch.take(states("n1", UNASKED, rank(1, READING, 3, 3)))
    assert watched.watch.end() is None
    kept = watched.stacks()
    assert kept.ending
    assert kept.nodes == {"n0": (), "n1": (rank(1, READING, 3, 3),)}


def test_hostile_answers_are_dropped_and_those_of_others_ignored(job: Job) -> None:
    stack = ThreadStack("\0" * 1000, ("x" * 10_000,) * 200)
    wild = CollectiveState("g", tuple(range(-5, 9999)), 1 << 61, -(1 << 61), -7, "x" * 9999)
    process = ProcessState(-1, "\x1b[2J" * 500, "much more than a letter", "", -1e300)
    bad = RankState(1, process, (stack,) * 5, (wild,) * 50, (process,) * 999, "?" * 9999)

    def answer(number: int) -> list[RankStates]:
        strange = [replace(bad, rank=of) for of in (0, -1, 2, 1 << 61)]
        return [
            states("n7", number, bad),
            states("n1", number + 1, bad),
            states("n1", number, *strange, bad, bad),
            states("n1", number, rank(1, WAITING, 1, 1)),  # a second answer
            hang(number)[1],
        ]

    watched = Watched(job, answer)
    watched.wait(300)
    kept = watched.stacks()
    assert kept.nodes["n0"] == (rank(0, WAITING, 4, 3),)
    (only,) = kept.nodes["n1"]
    assert (only.rank, only.threads, only.groups, only.process.state) == (1, (), (), UNKNOWN_STATE)
    assert only.no_answer == "its node has sent too much of it"
    assert (watched.logs / "stacks.4711.json").stat().st_size < 4_000
    assert len(watched.events("hang")) == 1
