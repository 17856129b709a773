"""Compiled code that is kept while ranks run."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bundle.driver import compiled_code
from bundle.driver.code_store import list_stored_code
from bundle.driver.compiled_code import JobCode
from bundle.driver.logs import Logs
from bundle.driver.retries import RankProgress
from bundle.driver.state import State
from bundle.driver.transports.transport import Ended, Transport
from bundle.protocol.digest import Digest
from bundle.protocol.events import RankOutput
from bundle.protocol.job import CodeStore
from bundle.protocol.messages import (
    CodeFacts,
    CollectRequest,
    FailureRecord,
    LaunchAnswer,
    PreflightAnswer,
    Started,
)
from bundle.system import processes
from tests.support.jobs import PLAIN
from tests.support.object_files import ELF
from tests.support.processes import until

SEND = """
import sys
from bundle.launch.compiled_code import select_code
from bundle.results.stream import send_selection
send_selection(select_code(sys.argv[1], 0.0, float(sys.argv[2])), sys.argv[1], sys.stdout.buffer)
"""
KIND = Digest.of(b"kind")


class Sender(Transport):
    """A transport that fetches from a directory of this machine."""

    def __init__(self, folder: Path, *program: str) -> None:
        self.argv = [sys.executable, "-c", *(program or (SEND,)), str(folder)]
        self.started: list[processes.Process] = []

    def start_fetch(
        self, phase: str, requests: Mapping[str, Any], output: Any, errors: Any
    ) -> processes.Process:
        [request] = requests.values()
        assert isinstance(request, CollectRequest)
        argv = [*self.argv, str(request.unchanged_seconds)]
        self.started.append(processes.start(argv, stdout=output, stderr=errors))
        return self.started[-1]

    def run(self, *args: object) -> dict[str, Ended]:
        raise NotImplementedError

    deliver = fetch = close = run  # type: ignore[assignment]


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> State:
    """A job on two nodes of one kind that have never compiled; the first has three files now."""
    monkeypatch.setattr(compiled_code, "_EARLY_SECONDS", 0.1)
    store = CodeStore(str(tmp_path / "store"), Digest.of(b"torch"), 1 << 20)
    job = replace(PLAIN, log_dir=str(tmp_path / "logs"), code_store=store)
    os.mkdir(job.log_dir)
    state = State(job, Logs(job))
    facts = CodeFacts(KIND, "x86_64", has_all=False, compiler="g++")
    state.facts = {node: PreflightAnswer(node=node, root="/r", code=facts) for node in job.nodes}
    for name in ("one.so", "two.so", "unfinished.so"):
        path = tmp_path / "node" / "inductor" / name[:3] / name
        path.parent.mkdir(parents=True)
        path.write_bytes(ELF)
        if name != "unfinished.so":
            os.utime(path, (time.time() - 40.0,) * 2)
    state.transport = Sender(tmp_path / "node")
    return state


def stepping() -> RankProgress:
    progress = RankProgress()
    progress.take(Started("n0"))
    progress.take(RankOutput("n0", 0, b"step 1\n", of_ranks=True))
    return progress


def kept(state: State) -> list[tuple[str, int]]:
    assert state.job.code_store is not None
    found = list_stored_code(state.job.code_store.path)
    return [(code.job_id, code.kernels) for code in found]


def test_what_is_finished_is_kept_while_the_ranks_run(state: State) -> None:
    code = JobCode(state)
    with code.keep_early(RankProgress()):  # before the first step
        time.sleep(0.2)
        state.transport.tick()
        assert kept(state) == []
    with code.keep_early(stepping()):
        until(lambda: state.transport.tick() or kept(state))
    assert kept(state) == [("4711", 2)]
    # A node that takes part later would get it; nothing is kept a second time.
    with code.keep_early(stepping()):
        time.sleep(0.2)
        state.transport.tick()
    assert len(state.transport.started) == 1  # type: ignore[attr-defined]
    assert [one.job_id for one in code._list_usable(KIND)] == ["4711"]


def test_nothing_is_left_of_what_has_not_come_when_the_ranks_end(
    state: State, tmp_path: Path
) -> None:
    sender = state.transport = Sender(tmp_path, "import time; time.sleep(600)")
    with JobCode(state).keep_early(stepping()):
        until(lambda: state.transport.tick() or sender.started)
    assert sender.started[0].poll() is not None
    assert (kept(state), os.listdir(tmp_path / "store")) == ([], [])


def test_a_node_that_sends_too_much_is_refused(state: State, tmp_path: Path) -> None:
    flood = "import sys\nwhile True: sys.stdout.buffer.write(bytes(1 << 16))"
    sender = state.transport = Sender(tmp_path, flood)
    with JobCode(state).keep_early(stepping()):
        until(
            lambda: state.transport.tick() or (sender.started and sender.started[0].poll()),
            seconds=30,
        )
    assert kept(state) == []
    assert "n0 has more than launch.compile-cache-limit" in notes(state)


def notes(state: State) -> str:
    path = Path(state.job.log_dir, "events.4711.jsonl")
    return path.read_text() if path.exists() else ""


def keep_early(code: JobCode) -> None:
    """Do all steps of it, as far as they go."""
    for _ in code._keep_early(stepping()):
        time.sleep(0.01)


def test_more_files_than_are_kept_are_refused(
    state: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled_code, "MOST_FILES", 1)
    keep_early(JobCode(state))
    assert kept(state) == []
    assert "it is more than the limit (2 files" in notes(state)


def test_a_job_that_compiles_nothing_says_nothing(state: State, tmp_path: Path) -> None:
    state.transport = Sender(tmp_path / "absent")
    keep_early(JobCode(state))
    assert (kept(state), notes(state)) == ([], "")


def test_what_a_job_that_crashes_has_compiled_is_not_kept(state: State) -> None:
    code = JobCode(state)
    keep_early(code)
    assert kept(state) == [("4711", 2)]
    crash = FailureRecord(node="n0", rank=0, exit_code=-11, time=1.0)
    state.answers = {"n0": LaunchAnswer(node="n0", failures=(crash,))}
    code.look_for_crashes()
    assert kept(state) == []


def test_a_node_that_fails_to_send_is_told_with_its_last_words(state: State) -> None:
    state.transport = Sender(Path("/"), "import sys; sys.exit('the disk is broken')")
    keep_early(JobCode(state))
    assert "was not kept: the disk is broken" in notes(state)
