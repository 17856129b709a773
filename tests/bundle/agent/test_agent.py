"""One node's part: real agents asked for each phase; more on the preflight in test_preflight.py."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from bundle.protocol.digest import Digest
from bundle.protocol.enumerations import Action
from stager.pack.bundle import Packed
from tests.support.bundles import BASE_PYTHON
from tests.support.jobs import ask, job_for
from tests.support.processes import run, until


def catches(pid: int, number: signal.Signals) -> bool:
    (caught,) = re.findall(r"SigCgt:\s+(\w+)", Path(f"/proc/{pid}/status").read_text())
    return bool(int(caught, 16) >> (number - 1) & 1)


@pytest.fixture
def found(single: Packed, program: Path, tmp_path: Path) -> dict[str, Any]:
    _, (event,) = ask(program, "preflight", job_for(single, tmp_path))
    return {key: event[key] for key in ("root", "python")}


GROUP = {"address": "127.0.0.1", "port": 61000, "backend": "gloo", "nproc": 1}


def test_an_agent_that_is_told_to_end_says_nothing_more(
    single: Packed, program: Path, tmp_path: Path
) -> None:
    argv = [sys.executable, "-I", "-S", str(program), "agent", "preflight"]
    waiting = subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert until(lambda: catches(waiting.pid, signal.SIGTERM))
    time.sleep(0.2)  # it waits for its request
    waiting.terminate()
    out, err = waiting.communicate(timeout=300)
    assert (waiting.returncode, out, err) == (143, b"", b"")


def converse(program: Path, *requests: dict[str, Any]) -> tuple[int, list[dict[str, Any]]]:
    node = {"v": 1, "node": "local1", "node_rank": 0, "nodes_here": 1}
    argv = [sys.executable, "-I", "-S", program, "agent", "session"]
    done = run(argv, given="".join(json.dumps({**node, **one}) + "\n" for one in requests))
    assert done.stderr == ""
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]


def test_a_session_answers_each_request_and_ends_with_the_last(
    single: Packed, program: Path, tmp_path: Path
) -> None:
    job = job_for(single, tmp_path).to_json()
    other = {**job, "requires": {**job["requires"], "machine": "pdp11"}}
    requests = [{"phase": "early", "job": job}]
    requests += [{"phase": "preflight", "job": one} for one in (job, other, job)]
    code, events = converse(program, *requests)
    assert code == 0  # each answer says how it went
    assert [event["ok"] for event in events] == [True, False, True]


def test_a_session_goes_on_under_the_python_that_is_named(
    single: Packed, program: Path, tmp_path: Path, found: dict[str, Any]
) -> None:
    """Once: one that is not what it was taken for is told by the phase, not tried for ever."""
    job = job_for(single, tmp_path).to_json()
    job["requires"]["python"] = "3.77"
    log = tmp_path / "started"
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "$@" >>{log}\nexec {BASE_PYTHON} "$@"\n')
    python.chmod(0o755)
    asked = {"phase": "tidy", "job": job, "root": found["root"], "python": str(python)}
    code, events = converse(program, asked)
    assert (code, [event["event"] for event in events]) == (0, ["tidy"])
    (line,) = log.read_text().splitlines()
    assert re.fullmatch(rf"-I -S {program} agent session --request \d+", line)


def test_without_torch_the_launcher_says_so_and_nothing_is_left(
    single: Packed, program: Path, tmp_path: Path, found: dict[str, Any]
) -> None:
    job = job_for(single, tmp_path, action=Action.RUN)
    ask(program, "unpack", job, **found, bundle=str(single.path))
    code, events = ask(program, "launch", job, **found, group=GROUP, shared=True)
    assert code == 3
    assert [event["event"] for event in events] == ["started", "output", "launch"]
    last = events[-1]
    assert (last["ok"], last["exit_code"], last["failures"], last["problems"]) == (False, 1, [], [])
    assert "No module named" in last["tail"][-1]
    assert os.listdir(f"{found['root']}/jobs") == []


def test_an_environment_that_has_gone_is_said_to_be_gone(
    single: Packed, program: Path, tmp_path: Path, found: dict[str, Any]
) -> None:
    """Cleared away between the probe and the launch."""
    job = job_for(single, tmp_path, bundle_id=Digest("0" * 64))
    code, (event,) = ask(program, "launch", job, **found, group=GROUP, shared=True)
    assert (code, event["problems"][0]["what"]) == (3, "the environment is gone")
    assert os.listdir(f"{found['root']}/jobs") == []


def test_tidy_removes_what_the_job_left_here_and_nothing_else(
    single: Packed, program: Path, tmp_path: Path, found: dict[str, Any]
) -> None:
    """Unless what the ranks have written there is to be kept, and there is something."""
    jobs, job = Path(found["root"], "jobs"), job_for(single, tmp_path)
    for name in ("4711.work", "4712.work"):
        (jobs / name).mkdir()
        (jobs / name / "result.txt").write_text("kept or not")
    work = jobs / "4711.work"
    code, (event,) = ask(program, "tidy", job, **found, keep_files=True)
    assert (code, event["left"], os.listdir(work)) == (0, True, ["result.txt"])
    code, (event,) = ask(program, "tidy", job, **found)
    assert (code, event["ok"], os.listdir(jobs)) == (0, True, ["4712.work"])
    code, (event,) = ask(program, "tidy", job, **found)
    assert (code, event["ok"]) == (0, True)  # nothing was there
    work.mkdir()
    code, (event,) = ask(program, "tidy", job, **found, keep_files=True)
    assert (code, event.get("left", False), work.exists()) == (0, False, False)
