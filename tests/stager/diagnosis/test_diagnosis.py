"""A diagnosis from files: what the driver told, what only the logs tell, what proves it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bundle.protocol.codec import encode
from bundle.protocol.enumerations import FailureClass
from bundle.protocol.log_names import ATTEMPT_MARK
from bundle.protocol.problem import Problem, ProblemCode
from bundle.system.processes import CompletedCommand
from stager.diagnosis import diagnosis
from stager.diagnosis.diagnosis import diagnose
from stager.diagnosis.failure import Diagnosis, Evidence, FirstFailure, format_ranks
from stager.logs.job_files import find_job_files, list_job_files, parse_kept_job
from stager.slurm import messages
from tests.support.building import Project
from tests.support.failed_logs import IN_TORCH, PEER, WAITED, trace
from tests.support.jobs import job_for

# --- A diagnosis from files: what the driver told, what only the logs tell, what Slurm remembers.


@pytest.fixture
def job(tmp_path: Path) -> Callable[..., Diagnosis]:
    """Diagnoses job 17 of two nodes with two ranks each, out of its logs and its result."""

    def make(logs: dict[int, str], result: dict[str, Any] | None) -> Diagnosis:
        for rank in range(4):
            name = f"demo.17.n{rank // 2 + 1}.{rank}.out"
            (tmp_path / name).write_text(logs.get(rank, "step 1\n"))
        events: list[dict[str, Any]] = [{"v": 1, "event": "job", "nodes": ["n1", "n2"]}]
        if result is not None:
            told = {"ok": False, "problems": {}, "world_size": 4, **result}
            events.append({"v": 1, "event": "result", **told})
        text = "".join(json.dumps(event) + "\n" for event in events)
        (tmp_path / "events.17.jsonl").write_text(text + '{"v": 1, "event": "half')
        return diagnose(list_job_files(tmp_path, "17"))

    return make


def record(rank: int, closing: str, *, code: int = 1, time: float = 5.0) -> dict[str, Any]:
    exception, _, message = closing.partition(": ")
    return {
        "node": f"n{rank // 2 + 1}", "rank": rank, "local_rank": rank % 2, "exit_code": code,
        "exception": exception, "message": message, "time": time,
        "lines": trace(closing).splitlines() if closing else [],
    }  # fmt: skip


def test_the_record_decides_and_its_line_proves_it(job: Callable[..., Diagnosis]) -> None:
    closing = "OSError: [Errno 28] No space left on device: '/tmp/x'"
    logs = {0: trace(PEER), 3: "step 1\nstep 2\n" + trace(closing)}
    found = job(logs, {"failures": [record(0, PEER, time=1.0), record(3, closing, time=2.0)]})
    assert (found.first.node, found.first.rank, found.first.kind) == ("n2", 3, "disk-full")
    assert (found.first.cause, found.first.entry) == (closing, "disk-full")
    assert found.first.meaning == "a disk is full on that node"
    (proof,) = found.evidence
    assert (proof.path.name, proof.number, proof.text) == ("demo.17.n2.3.out", 6, closing)
    assert (found.ok, found.consequences, found.missing) == (False, (0,), ())


def test_a_job_that_ended_well_or_still_runs(job: Callable[..., Diagnosis]) -> None:
    well = job({0: "an Error was handled: OSError: No space left on device\n"}, {"ok": True})
    assert (well.ok, well.first, well.evidence) == (True, None, ())
    assert job({}, None).ok is None


@pytest.mark.parametrize(
    ("said", "lines"), [("", ()), ("step 41\nloading\n", ("step 41", "loading"))]
)
def test_the_rank_that_did_not_come_is_blamed_for_a_hang(
    job: Callable[..., Diagnosis], said: str, lines: tuple[str, ...]
) -> None:
    others = {rank: trace(WAITED, IN_TORCH) for rank in (0, 1, 3)}
    found = job({**others, 2: said}, {"failures": [record(rank, WAITED) for rank in others]})
    assert (found.first.kind, found.first.node, found.first.rank) == ("hang", "n2", 2)
    assert (found.missing, found.consequences) == ((2,), (0, 1, 3))
    names = {f"demo.17.n{rank // 2 + 1}.{rank}.out" for rank in others}
    assert set() < {proof.path.name for proof in found.evidence} <= names
    assert found.first.lines == lines
    assert ("printed nothing" in found.first.hint) == (not lines)


def test_memory_explains_a_rank_that_was_killed(job: Callable[..., Diagnosis]) -> None:
    said = "slurmstepd: error: Detected 1 oom_kill event in StepId=17.0. Some of the step tasks\n"
    killed = {"failures": [record(2, "", code=-9)]}
    assert job({}, killed).first.kind == "killed"  # type: ignore[union-attr]
    assert job({0: said}, killed).first.kind == "killed"  # type: ignore[union-attr] # another node
    found = job({2: said}, killed)
    assert (found.first.kind, found.first.rank) == ("out-of-memory", 2)
    assert found.evidence[0].path.name == "demo.17.n2.2.out"


def test_a_driver_that_was_killed_leaves_the_logs_to_be_judged(
    job: Callable[..., Diagnosis], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no Slurm
    found = job({1: trace("KeyError: 'label'"), 0: trace(PEER)}, None)
    assert (found.first.rank, found.first.kind) == (1, "python-error")
    assert found.ok is False


def test_slurm_is_asked_about_a_job_that_left_no_result(
    job: Callable[..., Diagnosis], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A stand-in for sacct: the accounting data base of a site cannot be had here."""
    fake = tmp_path / "bin" / "sacct"
    fake.parent.mkdir()
    fake.write_text('#!/bin/sh\ncase "$*" in *"-j 17 "*) echo "TIMEOUT";; esac\n')
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}:/usr/bin:/bin")
    monkeypatch.setattr(messages, "_TIMEOUT_SECONDS", 300.0)
    found = job({}, None)
    assert (found.first.kind, found.ok) == ("time-limit", False)
    own = job({3: trace("KeyError: 'label'")}, None)  # what failed before counts
    assert own.first.kind == "python-error"


@pytest.mark.parametrize(
    ("said", "state"),
    [
        ("COMPLETED|2026-11-29T02:00:00\n", "COMPLETED"),
        ("CANCELLED by 1000|2026-11-29T02:00:00\n", "CANCELLED"),
        ("JobId=17 JobName=x UserId=a(1) JobState=NODE_FAIL Reason=None\n", "NODE_FAIL"),
        ("slurm_load_jobs error: Invalid job id specified\n", ""),
        ("", ""),
    ],
)
def test_states_are_read(said: str, state: str) -> None:
    assert messages.parse_job_state(said) == state

    def never(*_: object, **__: object) -> CompletedCommand:
        raise AssertionError("asked about a number that is none")

    assert messages.read_job_state("../x", never) == messages.read_job_state("", never) == ""


def test_the_state_of_a_job_that_was_submitted_later_is_not_that_of_an_older_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said = "JobId=17 JobState=RUNNING SubmitTime=2026-11-29T02:00:00 Reason=None"
    (tmp_path / "scontrol").write_text(f"#!/bin/sh\necho '{said}'\n")
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    submitted = time.mktime((2026, 11, 29, 2, 0, 0, 0, 0, -1))
    assert messages.read_job_state("17", begun=submitted + 5) == "RUNNING"
    assert messages.read_job_state("17", begun=submitted - 3600) == ""


def test_a_long_log_is_read_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tracebacks and lines that lie across the end of a block are found, with their numbers."""
    monkeypatch.setattr("stager.diagnosis.hits.BLOCK", 1000)
    for before in range(5, 30):
        text = "".join(f"step {number} loss 0.5 and so on\n" for number in range(before))
        path = tmp_path / "t.9.node01.0.out"
        path.write_text(text + trace("ValueError: bad", "/home/you/" + "x" * 300) + "after\n" * 9)
        found = diagnose(find_job_files(str(tmp_path), tmp_path))
        assert found.first.cause == "ValueError: bad", before
        assert found.evidence[0].number == before + 4
        assert len(found.first.lines) == 4


NAN, INFINITE = float("nan"), float("inf")


@pytest.mark.parametrize(
    "changed",
    [
        {"failures": 5},
        {"failures": [{"rank": 1}, None, [1], {**record(0, "KeyError: 'x'"), "time": NAN}]},
        {"failures": [{**record(0, "KeyError: 'x'"), "lines": 0, "rank": INFINITE}]},
        {"world_size": "x"},
        {"world_size": INFINITE},
        {"problems": {"n1": [{"why": 5}, 7]}},
        {"problems": 3, "exit_codes": ["a"], "tails": {"n1": 4}},
        {"ok": "yes"},
    ],
)
def test_a_result_of_another_make_is_read_as_far_as_it_goes(
    job: Callable[..., Diagnosis], changed: dict[str, Any]
) -> None:
    assert json.dumps(encode(job({3: trace("KeyError: 'label'")}, changed)))


def test_ranks_that_fail_in_the_same_way_are_no_consequences(job: Callable[..., Diagnosis]) -> None:
    closing = "ModuleNotFoundError: No module named 'x'"
    failures = [record(rank, closing, time=5.0 + rank) for rank in (0, 1, 3)]
    found = job({}, {"failures": [*failures, record(2, PEER)]})
    assert (found.first.rank, found.same_failure, found.consequences) == (0, (1, 3), (2,))
    for ranks, said in (([7, 0, 1, 2, 9, 8, 4], "ranks 0-2,4,7-9"), ([3], "rank 3"), ([], "")):
        assert format_ranks(ranks) == said


# --- What shows a failure that no line of a log does: the driver's own notes ---------------------


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
    found = diagnose(list_job_files(folder, "17"))
    (proof,) = found.evidence
    assert proof.text in proof.path.read_text().splitlines()[proof.number - 1]
    return found, proof


def result(**changed: Any) -> dict[str, Any]:
    return {"event": "result", "ok": False, "ended_by": "", "problems": {}, **changed}


def test_what_was_seen_before_anything_was_sent(tmp_path: Path) -> None:
    lines = f"n1 proj=ok\nn2 proj=ok\nn2 problem: {NO_ROOM}\n"
    found, proof = made(tmp_path, result(problems={"n2": [NO_ROOM.to_json()]}), preflight=lines)
    assert found.first.kind == "disk-full"
    assert (proof.path.name, proof.number) == ("preflight.17.txt", 3)


def test_what_an_agent_answered(tmp_path: Path) -> None:
    answer = {"event": "unpack", "node": "n2", "ok": False, "problems": [DAMAGED.to_json()]}
    other = {"event": "unpack", "node": "n1", "ok": True, "problems": []}
    found, proof = made(tmp_path, other, answer, result(problems={"n2": [DAMAGED.to_json()]}))
    assert (found.first.node, found.first.kind) == ("n2", "damaged-copy")
    assert (proof.path.name, proof.number) == ("events.17.jsonl", 3)
    assert "the bundle is damaged" in proof.text


@pytest.mark.parametrize("how", ["time-limit", "preempted", "cancelled", "node-failure"])
def test_what_slurm_did(tmp_path: Path, how: str) -> None:
    _, proof = made(tmp_path, result(ended_by=how))
    assert (proof.number, proof.text) == (2, f'"ended_by": "{how}"')


def test_the_driver_that_saw_a_hang(tmp_path: Path) -> None:
    hang = {"kind": "behind", "rank": 2, "node": "n2", "ranks": [2], "text": "rank 2 reads"}
    (tmp_path / "demo.17.n2.2.out").write_text(f"shard 7\n{ATTEMPT_MARK}1: again\nshard 88\n")
    ending = result(hang=hang, ended_by="time-limit")
    found, proof = made(tmp_path, {"event": "hang", **hang}, ending)
    assert (found.first.rank, found.first.kind, found.missing) == (2, "hang", (2,))
    assert found.first.lines == ("shard 88",)
    assert (proof.number, proof.text) == (2, '"text": "rank 2 reads"')


# --- A module that a rank did not find: what the bundle and the project's folder tell of it.


def test_the_remedy_is_that_of_this_project(project: Project, tmp_path: Path) -> None:
    for path in ("lib/tools.py", "src/own/__init__.py", "left_out/__init__.py", "train.py"):
        (project.root / path).parent.mkdir(parents=True, exist_ok=True)
        (project.root / path).touch()
    packed = project.settings("alpha", more='[project]\nexclude = ["left_out/"]').build().packed
    job = parse_kept_job(
        json.dumps(job_for(packed, tmp_path, run_dir=str(project.root)).to_json()).encode()
    )

    def said(module: str) -> tuple[str, str]:
        first = FirstFailure(
            node="n1",
            kind=FailureClass.MISSING_MODULE,
            cause=f"ModuleNotFoundError: No module named '{module}'",
            hint="",
            entry="module-missing",
        )
        told = diagnosis.explain_missing_module(first, job)
        return told.meaning, told.hint

    meaning, hint = said("tools")
    assert meaning.startswith("the project has tools in lib, where Python does not look")
    assert hint.startswith("import it as lib.tools; or move lib/tools.py to")
    meaning, hint = said("left_out")
    assert meaning == f"left_out/ is in {project.root}, but not in the bundle"
    assert 'add "!/left_out/" to project.exclude' in hint
    assert said("sklearn.metrics") == (
        "no package in the bundle has the module sklearn, nor has the project",
        "add scikit-learn to environment.requirements in stager.toml, then `stager build`",
    )
    assert said("einops")[1] == (
        "add einops to environment.requirements in stager.toml (if the package of einops has "
        "another name, that one), then `stager build`"
    )
    assert said("alpha.absent")[0] == (
        "alpha is in the bundle in version 1.0, which has no module alpha.absent"
    )
    assert said("_lzma")[1].endswith('environment.interpreter = "bundled"')
    (project.root / "uv.lock").touch()
    assert said("sklearn")[1] == "`uv add scikit-learn`, then `stager build`"
    packed.path.unlink()
    assert said("sklearn") == ("", "")
