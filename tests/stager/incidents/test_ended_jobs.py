from __future__ import annotations

from pathlib import Path

from bundle.protocol.enumerations import FailureClass
from stager.incidents.incident_files import diagnosed, ended_job
from stager.incidents.node_history import incidents_of
from tests.support.incidents import ENDED, FULL, event_log


def test_a_job_is_read_from_its_events(tmp_path: Path) -> None:
    event_log(tmp_path, {"n2": [FULL]}, left_out={"n3": [FULL]})
    job = ended_job(tmp_path, "4711", "demo")
    assert job is not None
    assert (job.job_id, job.project, job.ended) == ("4711", "demo", ENDED)
    assert job.nodes == ("n1", "n2", "n3")
    assert job.result.problems == {"n2": (FULL,)}
    assert job.left_out == {"n3": (FULL,)}


def test_only_the_last_attempt_counts(tmp_path: Path) -> None:
    event_log(tmp_path, {}, left_out={"n3": [FULL]})
    event_log(tmp_path, {"n2": [FULL]}, ended=ENDED + 60)
    job = ended_job(tmp_path, "4711", "demo")
    assert job is not None
    assert (job.ended, job.left_out) == (ENDED + 60, {})


def test_a_job_that_began_before_it_was_submitted_is_another_of_its_number(tmp_path: Path) -> None:
    event_log(tmp_path, {"n2": [FULL]})
    assert ended_job(tmp_path, "4711", "demo", ENDED - 60) is not None
    assert ended_job(tmp_path, "4711", "demo", ENDED + 60) is None


def test_a_job_that_runs_or_left_nothing_is_none(tmp_path: Path) -> None:
    assert ended_job(tmp_path, "4711", "demo") is None
    assert ended_job(tmp_path / "nowhere", "4711", "demo") is None
    event_log(tmp_path, {}, ended=None)
    assert ended_job(tmp_path, "4711", "demo") is None
    (tmp_path / "events.12.jsonl").write_bytes(b"\xff\n\n{}\n[]\n")
    assert ended_job(tmp_path, "12", "demo") is None


def test_a_line_of_a_log_may_show_that_a_node_is_broken(tmp_path: Path) -> None:
    event_log(tmp_path, {}, exit_codes={"n1": 1, "n2": 1, "n3": 1})
    job = ended_job(tmp_path, "4711", "demo")
    assert job is not None
    whole = diagnosed(job, tmp_path)
    assert whole.first is None  # it ended well
    line = "[rank1]: RuntimeError: CUDA error: uncorrectable ECC error encountered"
    failed = {"exit_codes": {"n2": 1}, "tails": {"n2": (line,)}}
    event_log(tmp_path, {"n1": ()}, ended=ENDED + 1, **failed)
    job = ended_job(tmp_path, "4711", "demo")
    assert job is not None
    whole = diagnosed(job, tmp_path)
    assert whole.first is not None
    assert whole.first.kind is FailureClass.NODE_FAILURE
    (incident,) = incidents_of(whole)
    assert (incident.node, incident.fault, incident.code) == ("n2", "node-failure", "")
    assert incident.cause == "the memory of a GPU is faulty"
