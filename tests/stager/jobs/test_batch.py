"""Batch jobs without a Slurm: the event log that grows, what a stand-in for sbatch says, scripts.

What a real Slurm does with them is in ``slurm/test_login.py``.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from bundle.protocol.events import OutputShown, read_record
from stager.core.errors import JobError, StagerError
from stager.jobs import batch
from stager.jobs.batch import BatchOutput, Submission, Submitted, follow, submit
from stager.jobs.outcome import Outcome
from tests.support.outcomes import slurm_outcome


def program(folder: Path, name: str, text: str) -> None:
    """A stand-in for one of Slurm's commands, first on PATH."""
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(batch, "POLL_SECONDS", (0.1, 0.1))
    monkeypatch.setattr(batch, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(batch, "LATE_SECONDS", 0.3)
    return folder


def submission() -> Submission:
    return Submission(
        argv=("sbatch", "--parsable"), environment=dict(os.environ), script="#!/bin/bash\ntrue\n"
    )


def unheard(event: object) -> None:
    pytest.fail(f"nothing is waited for, and yet this is said: {event}")


@pytest.mark.parametrize(
    ("printed", "cluster"), [("12", ""), ("12;east", "east"), ("Welcome to this site\n12", "")]
)
def test_the_script_is_handed_over(
    commands: Path, tmp_path: Path, printed: str, cluster: str
) -> None:
    program(commands, "sbatch", f"cat >{tmp_path}/got\necho '{printed}'")
    job = submit(submission(), unheard, commands)
    assert job == Submitted(job_id="12", cluster=cluster)
    assert (tmp_path / "got").read_text() == "#!/bin/bash\ntrue\n"
    program(commands, "squeue", f'echo "$@" >{tmp_path}/asked')
    job.ask("squeue", "--jobs=12")
    assert ("--clusters=east" in (tmp_path / "asked").read_text()) == bool(cluster)


@pytest.mark.parametrize(
    ("script", "message", "hint"),
    [
        ("echo 'sbatch: error: Batch job submission failed: Invalid account' >&2; exit 1",
         "rejected the batch job: Invalid account", "--account"),
        ("echo who knows", "did not report the job's number: 'who knows'", "squeue --me"),
        ("echo 'sbatch: fatal: Could not establish a configuration source' >&2; exit 1",
         "installed here, but no cluster answers", "--allocation local"),
    ],
)  # fmt: skip
def test_sbatch_says_something_else(commands: Path, script: str, message: str, hint: str) -> None:
    program(commands, "sbatch", f"cat >/dev/null; {script}")
    with pytest.raises(StagerError, match=message) as caught:
        submit(submission(), unheard, commands)
    assert hint in caught.value.hint
    assert caught.value.exit_code == 1


def outcome(folder: Path) -> Outcome:
    ended = slurm_outcome()
    ended.result = None
    ended.job = replace(ended.job, log_dir=str(folder))
    return ended


def test_events_are_passed_on_line_by_line_as_they_come(commands: Path, tmp_path: Path) -> None:
    """A line that is being written waits for its end; the queue decides when the job is over."""
    log = tmp_path / "events.12.jsonl"
    events = [
        {"event": "job", "job_id": "12", "nodes": ["n1"], "log_dir": str(tmp_path)},
        {"event": "note", "text": "halfway"},
        {"event": "result", "ok": True, "seconds": {}},
    ]
    first, second, third = (json.dumps(event) for event in events)
    # The stand-in for squeue writes what the driver would have written meanwhile.
    program(
        commands,
        "squeue",
        f"n=$(cat {tmp_path}/n 2>/dev/null || echo 0); echo $((n + 1)) >{tmp_path}/n\n"
        f"case $n in 0) echo 'PENDING Priority' ;;\n"
        f"1) printf '%s\\n%s' '{first}' '{second[:9]}' >>{log}; echo 'RUNNING None' ;;\n"
        f"2) printf '%s\\nnot an event\\n' '{second[9:]}' >>{log}; echo 'RUNNING None' ;;\n"
        f"3) echo 'squeue: error: Unable to contact slurm controller' >&2; exit 1 ;;\n"
        f"4) printf '%s\\n' '{third}' >>{log}; echo 'COMPLETING None' ;; esac",
    )
    ended, seen, notes = outcome(tmp_path), [], []
    follow(Submitted(job_id="12"), ended, seen.append, notes.append)
    assert seen == [read_record(event) for event in events]
    assert notes == [f"job 12: {said}" for said in ("pending (Priority)", "running", "completing")]
    assert (ended.ok, ended.job.id, ended.job.nodes) == (True, "12", ("n1",))


@pytest.mark.parametrize("moved", [True, False])
def test_what_an_older_job_of_the_number_wrote_is_not_believed(
    commands: Path, tmp_path: Path, moved: bool
) -> None:
    """Slurm was set up anew; the driver moves the older file, unless it cannot or another wrote it.

    The other job, of another cluster, may go on meanwhile.
    """
    log, new = tmp_path / "events.12.jsonl", tmp_path / "new"
    old = [{"event": "job", "job_id": "12", "nodes": ["old"]}, {"event": "result", "ok": False}]
    own = [
        {"event": "job", "job_id": "12", "nodes": ["n1"], "bundle_id": "0" * 64},
        {"event": "result", "ok": True},
    ]
    other = {"event": "job", "job_id": "12", "nodes": ["old"], "bundle_id": "1" * 64}
    for path, events in ((log, old), (new, own if moved else [old[1], other, old[1], *own])):
        path.write_text("".join(json.dumps(event) + "\n" for event in events))
    write = f"mv {new} {log}" if moved else f"cat {new} >>{log}; rm {new}"
    program(commands, "sbatch", "cat >/dev/null; echo 12")
    program(commands, "squeue", f"test ! -e {new} || {{ {write}; echo RUNNING None; }}")
    ended, seen = outcome(tmp_path), []
    follow(submit(submission(), unheard, tmp_path), ended, seen.append, print)
    assert seen == [read_record(event) for event in own]
    assert (ended.ok, ended.job.nodes) == (True, ("n1",))


@pytest.mark.parametrize(
    ("state", "of_driver", "reason"),
    [("TIMEOUT", "cancelled", "time-limit"), ("CANCELLED", "preempted", "preempted")],
)
def test_slurm_has_the_last_word_on_how_it_ended(
    state: str, of_driver: str, reason: str, commands: Path, tmp_path: Path
) -> None:
    """A time limit looks like scancel to a driver; Slurm also cancels to make room for a job."""
    program(commands, "squeue", "exit 0")
    program(commands, "scontrol", f"echo JobId=12 JobState={state} Reason=None ExitCode=0:0")
    event = {"event": "result", "ok": False, "ended_by": of_driver, "problems": {}}
    (tmp_path / "events.12.jsonl").write_text(json.dumps(event) + "\n")
    ended = outcome(tmp_path)
    follow(Submitted(job_id="12"), ended, lambda _: None, print)
    assert ended.end_reason == reason


def test_a_result_just_before_the_job_leaves_the_queue_is_read(
    commands: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by a process that does not run again before the time for a late one is over."""
    monkeypatch.setattr(batch, "LATE_SECONDS", 0)
    event = json.dumps({"event": "result", "ok": True, "seconds": {}})
    program(commands, "squeue", f"echo '{event}' >>{tmp_path}/events.12.jsonl")
    ended = outcome(tmp_path)
    follow(Submitted(job_id="12"), ended, lambda _: None, print)
    assert ended.ok


@pytest.mark.parametrize(
    ("facts", "message", "hint"),
    [
        ("echo JobId=12 JobState=FAILED Reason=NonZeroExitCode ExitCode=3:0",
         "failed, NonZeroExitCode, exit status 3", ""),
        # What its script could not write to a log.
        ("echo 'JobState=FAILED Comment=stager: n1 cannot write /a b/demo.out; name another place "
         "with --log-dir StdErr=/a ExitCode=3:0'",
         "n1 cannot write /a b/demo.out", "name another place with --log-dir"),
        ("exit 1", "gone from the queue", ""),
    ],
)  # fmt: skip
def test_a_job_that_leaves_no_result(
    commands: Path, tmp_path: Path, facts: str, message: str, hint: str
) -> None:
    gone = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"
    program(commands, "squeue", gone)
    program(commands, "scontrol", facts)
    log = tmp_path / "demo.12.batch.out"
    log.write_text("no python3 on n1\n")
    with pytest.raises(JobError) as caught:
        follow(Submitted(job_id="12"), outcome(tmp_path), print, print)
    assert caught.value.message == f"job 12 left no result: {message}"
    assert caught.value.exit_code == 3
    assert caught.value.hint == (hint or f"its log is {log}")
    if not hint:
        assert caught.value.context == ("no python3 on n1",)
        with pytest.raises(JobError) as caught:
            follow(Submitted(job_id="12"), outcome(tmp_path / "not here"), print, print)
        assert "must see the offline root and --log-dir" in caught.value.hint


def test_a_controller_that_is_silent_for_long(
    commands: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch, "SILENCE_SECONDS", 0.5)
    program(commands, "squeue", "exit 1")
    with pytest.raises(StagerError, match="has not answered") as caught:
        follow(Submitted(job_id="12"), outcome(tmp_path), print, print)
    assert "squeue --jobs=12" in caught.value.hint


def test_the_output_of_the_first_node_is_shown_without_the_head_of_its_log(tmp_path: Path) -> None:
    head = "n1 staged -> /tmp/env\nNODE n1 OK -> PY 3.11 torch 2.3.1\n"
    (tmp_path / "events.12.jsonl").touch()
    (tmp_path / "demo.12.n1.0.out").write_text(f"{head}step 1\nunfinis")
    (tmp_path / "demo.12.n2.1.out").write_text("of another node\n")
    output = BatchOutput(tmp_path, "12", all_nodes=False)
    shown = [*output.more(["n1", "n2"]), *output.more(["n1", "n2"], ended=True)]
    events = [record.event for record in shown if isinstance(record.event, OutputShown)]
    expected = [(0, ("step 1",)), (0, ("unfinis",))]
    assert [(event.rank, event.lines) for event in events] == expected
