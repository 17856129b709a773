"""From events to phases: which node was where from when to when."""

from __future__ import annotations

from pathlib import Path

from stager.logs.job_record import read_events
from stager.report.phases import JobPhases, find_phases
from tests.support.stories import T0, Told, went_well

NODES = ["a", "b"]


def told(job: Told, now: float | None = None) -> dict[str, list[tuple[str, float, float, str]]]:
    """Each node's phases with their times since the beginning."""
    found: JobPhases = find_phases(read_events(job.write().events), now)
    begin = found.begin
    return {
        row.node: [
            (s.phase, round(s.begin - begin, 3), round(s.end - begin, 3), s.state)
            for s in row.spans
        ]
        for row in found.rows
    }


def test_a_job_from_its_beginning_to_its_end(tmp_path: Path) -> None:
    found = told(went_well(tmp_path, NODES))
    assert found["a"] == [
        ("preflight", 0.0, 0.5, "ended"),
        ("place", 0.5, 0.5, "ended"),
        ("unpack", 0.5, 2.5, "ended"),
        ("probe", 2.5, 2.75, "ended"),
        ("launch", 2.75, 2.751, "ended"),
        ("train", 2.751, 62.752, "ended"),
    ]
    assert found["b"][4:] == [("launch", 2.75, 2.752, "ended"), ("train", 2.752, 62.752, "ended")]


def test_unpacking_includes_the_sending(tmp_path: Path) -> None:
    """Two groups are served one after the other; a node that has all of it gets nothing."""
    job = Told(tmp_path).say("job", nodes=["here", "one", "two"]).say("begin", phase="unpack")
    job.say("unpack", 0.1, node="here", ok=True)
    job.say("sent", 2.0, bytes=9).say("unpack", 1, node="one", ok=True)
    job.say("sent", 3.0, bytes=9).say("unpack", 1, node="two", ok=True)
    found = told(job.say("end", phase="unpack", seconds=8.0))
    assert found == {
        "here": [("unpack", 0.0, 0.1, "ended")],
        "one": [("unpack", 0.0, 3.1, "ended")],
        "two": [("unpack", 0.0, 7.1, "ended")],
    }


def test_a_sending_that_failed_or_worked_when_it_was_tried_again(tmp_path: Path) -> None:
    job = Told(tmp_path).say("job", nodes=NODES).say("begin", phase="unpack")
    job.say("unpack", 1.0, node="a", ok=False).say("end", 1.0, phase="unpack", seconds=2.0)
    assert told(job) == {
        "a": [("unpack", 0.0, 1.0, "failed")],
        "b": [("unpack", 0.0, 2.0, "silent")],
    }
    job = Told(tmp_path).say("job", nodes=["a"]).say("begin", phase="unpack")
    job.say("unpack", 1.0, node="a", ok=False, lacking=True)
    job.say("unpack", 2.0, node="a", ok=True).say("end", phase="unpack", seconds=3.0)
    assert told(job)["a"] == [("unpack", 0.0, 3.0, "ended")]


def test_each_task_of_a_node_answers(tmp_path: Path) -> None:
    job = Told(tmp_path).say("job", nodes=["a"]).say("begin", phase="launch")
    job.say("started", 1.0, node="a").say("started", 0.1, node="a")
    job.say("launch", 5.0, node="a", ok=False, exit_code=1, task=0)
    job.say("launch", 1.0, node="a", ok=True, exit_code=0, task=1)
    found = told(job.say("end", phase="launch", seconds=7.1))
    assert found["a"] == [("launch", 0.0, 1.0, "ended"), ("train", 1.0, 7.1, "failed")]


def test_nodes_that_are_left_out_or_do_not_answer(tmp_path: Path) -> None:
    job = Told(tmp_path).say("job", nodes=["bad", "good", "lost"]).say("begin", phase="preflight")
    job.say("preflight", 1.0, node="bad", ok=False).say("preflight", node="good", ok=True)
    job.say("preflight", node="lost", ok=True).say("end", phase="preflight", seconds=1.0)
    job.say("left-out", nodes={"bad": ["no room"]}).say("begin", phase="probe")
    job.say("probe", 0.5, node="good", ok=True).say("end", 0.5, phase="probe", seconds=1.0)
    assert told(job) == {
        "bad": [("preflight", 0.0, 1.0, "failed")],
        "good": [("preflight", 0.0, 1.0, "ended"), ("probe", 1.0, 1.5, "ended")],
        "lost": [("preflight", 0.0, 1.0, "ended"), ("probe", 1.0, 2.0, "silent")],
    }


def test_a_job_that_runs_and_one_whose_driver_was_killed(tmp_path: Path) -> None:
    job = Told(tmp_path).say("job", nodes=["a"]).say("begin", 1.0, phase="launch")
    job.say("started", 1.0, node="a", phase="launch")
    assert told(job)["a"] == [("launch", 1.0, 2.0, "ended"), ("train", 2.0, 2.0, "open")]
    assert told(job, now=T0 + 30)["a"][1] == ("train", 2.0, 30.0, "open")
    assert told(Told(tmp_path)) == {}  # nothing is told
    # A clock that is set back.
    job = Told(tmp_path).say("job", nodes=["a"]).say("begin", phase="preflight")
    job.say("preflight", -3600, node="a", ok=True).say("end", phase="preflight", seconds=1.0)
    assert told(job)["a"] == [("preflight", 0.0, 0.0, "ended")]
