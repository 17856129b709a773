"""What shows a failure that no line of a log does: the driver's own notes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bundle.protocol.problem import Problem, ProblemCode
from stager.diagnosis.diagnosis import diagnose
from stager.diagnosis.failure import Diagnosis, Evidence
from stager.logs.job_files import of_job

NO_ROOM = Problem(ProblemCode.NO_ROOM, "n2", {"why": 'needs 2 GB, 1 GB are free in "/tmp"'})
DAMAGED = Problem(ProblemCode.BUNDLE_DAMAGED, "/é.tar", {"why": "no digest"})


def made(folder: Path, *events: dict[str, Any], preflight: str = "") -> tuple[Diagnosis, Evidence]:
    """The diagnosis of job 17, and its only proof, which stands where it says."""
    told = [{"event": "job", "nodes": ["n1", "n2"]}, *events]
    lines = [json.dumps({"v": 1, "job_id": "17", **event}) for event in told]
    (folder / "events.17.jsonl").write_text("\n".join(lines) + '\n{"v": 1, "event": "ha')
    (folder / "demo.17.n1.0.out").write_text("step 1\n")
    if preflight:
        (folder / "preflight.17.txt").write_text(preflight)
    found = diagnose(of_job(folder, "17"))
    (proof,) = found.evidence
    assert proof.text in proof.path.read_text().splitlines()[proof.number - 1]
    return found, proof


def result(**changed: Any) -> dict[str, Any]:
    return {"event": "result", "ok": False, "ended_by": "", "problems": {}, **changed}


def test_what_was_seen_before_anything_was_sent(tmp_path: Path) -> None:
    lines = f"n1 proj=ok\nn2 proj=ok\nn2 problem: {NO_ROOM}\n"
    told = result(problems={"n2": [NO_ROOM.to_json()]})
    found, proof = made(tmp_path, told, preflight=lines)
    assert found.first is not None
    assert found.first.kind == "disk-full"
    assert (proof.path.name, proof.number) == ("preflight.17.txt", 3)


def test_what_an_agent_answered(tmp_path: Path) -> None:
    answer = {"event": "unpack", "node": "n2", "ok": False, "problems": [DAMAGED.to_json()]}
    other = {"event": "unpack", "node": "n1", "ok": True, "problems": []}
    found, proof = made(tmp_path, other, answer, result(problems={"n2": [DAMAGED.to_json()]}))
    assert found.first is not None
    assert (found.first.node, found.first.kind) == ("n2", "damaged-copy")
    assert (proof.path.name, proof.number) == ("events.17.jsonl", 3)
    assert "the bundle is damaged" in proof.text


@pytest.mark.parametrize("how", ["time-limit", "preempted", "cancelled", "node-failure"])
def test_what_slurm_did(tmp_path: Path, how: str) -> None:
    _, proof = made(tmp_path, result(ended_by=how))
    assert (proof.number, proof.text) == (2, f'"ended_by": "{how}"')


def test_how_a_rank_ended_that_left_no_word(tmp_path: Path) -> None:
    record = {
        "node": "n2", "rank": 1, "local_rank": 0, "exit_code": -9, "exception": "", "message": "",
        "lines": ["step 1"], "time": 5.0,
    }  # fmt: skip
    answer = {"event": "launch", "node": "n2", "ok": False, "problems": [], "failures": [record]}
    found, proof = made(tmp_path, answer, result(failures=[record], problems={"n2": []}))
    assert found.first is not None
    assert (found.first.rank, found.first.kind) == (1, "killed")
    assert (proof.number, proof.text) == (2, '"exit_code": -9')


def test_a_line_of_another_failure_proves_nothing(tmp_path: Path) -> None:
    """A rank that Slurm ended with the job may have complained; that is not why it ended."""
    (tmp_path / "demo.17.n2.1.out").write_text(
        'Traceback (most recent call last):\n  File "t.py", line 1\n    go()\nKeyError: 7\n'
    )
    _, proof = made(tmp_path, result(ended_by="time-limit"))
    assert proof.path.name == "events.17.jsonl"
