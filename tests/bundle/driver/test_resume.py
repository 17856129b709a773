"""Earlier results on their way to nodes that do not see the run directory, and why they stay."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import pytest

from bundle.driver import collect
from bundle.driver.collect import send_earlier_results
from bundle.driver.logs import Logs
from bundle.driver.state import NodesFailed, State
from bundle.driver.transports.transport import (
    Delivery,
    Ended,
    OnEvent,
    Requests,
    Transfer,
    Transport,
)
from bundle.node.machine import host_facts
from bundle.protocol.enumerations import Allocation
from bundle.protocol.messages import PreflightAnswer, UnpackAnswer
from bundle.protocol.problem import Problem, ProblemCode
from bundle.results.receive import receive_outputs
from bundle.results.stream import CHUNK
from stager.pack.bundle import Packed
from tests.support.displayed import noted
from tests.support.jobs import job_for


class Nodes(Transport):
    """A transport to nodes whose working directories are here; some of them have no room."""

    def __init__(self, place: Path, full: tuple[str, ...] = ()) -> None:
        self.place = place
        self._full = full
        self.transfers: list[Transfer] = []

    def deliver(self, transfer: Transfer, requests: Requests, on_event: OnEvent) -> Delivery:
        self.transfers.append(transfer)
        for node, request in requests.items():
            problem = Problem(
                ProblemCode.RESULTS_TOO_LARGE, node, {"why": "full", "files": "1", "source": "s"}
            )
            answer = UnpackAnswer(node, ok=False, problems=(problem,))
            if node not in self._full:
                (self.place / node).mkdir()
                with open(transfer.source, "rb") as stream:
                    outputs = request.job.outputs
                    assert receive_outputs(stream, str(self.place / node), outputs).complete
                answer = UnpackAnswer(node)
            on_event(answer)
        return Delivery({}, {node: Ended(0, ProblemCode.NO_ANSWER, {}) for node in requests})


@pytest.fixture
def state(single: Packed, tmp_path: Path) -> State:
    """A job over ssh, with the results of an earlier one, and nodes that do not see them."""
    out = tmp_path / "run" / "out"
    out.mkdir(parents=True)
    (out / "model").write_bytes(bytes(3000))
    job = job_for(
        single, tmp_path, run_dir=str(tmp_path / "run"), outputs=("out",), resume_limit=10_000,
        allocation=Allocation.SSH,
    )  # fmt: skip
    state = State(job, Logs(job))
    state.separate_run_dirs = True
    state.transport = Nodes(tmp_path)
    for node in job.nodes:
        host = host_facts(str(tmp_path))
        state.facts[node] = PreflightAnswer(node=node, root=str(tmp_path), ready=True, host=host)
    return state


def test_they_lie_on_each_node_and_the_job_says_so(
    state: State, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    send_earlier_results(state)
    send_earlier_results(state)  # the ranks are started again without a node
    for node in state.job.nodes:
        assert (tmp_path / node / "out" / "model").stat().st_size == 3000
    text = f"sending earlier results to the nodes: out (1 file, 3.0 kB) in {state.job.run_dir}"
    assert noted(state, capfd) == text
    assert [*(state.sent_results or {})] == ["out", "out/model"]


def without_room(state: State) -> None:
    node, facts = next(iter(state.facts.items()))
    root = replace(facts.host.node_root, free_bytes=5000)
    state.facts[node] = replace(facts, host=replace(facts.host, node_root=root))


def without_limit(state: State) -> None:
    os.truncate(Path(state.job.run_dir, "out", "model"), 0)
    state.job = replace(state.job, resume_limit=0)


def leading_out(state: State) -> None:
    out = Path(state.job.run_dir, "out")
    out.rename(out.parent.parent / "scratch")
    out.symlink_to(out.parent.parent / "scratch")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda state: Path(state.job.run_dir, "out", "more").write_bytes(bytes(8000)),
         "out (2 files, 11.0 kB): more than project.resume-limit, 10.0 kB"),
        (without_limit, "out (1 file, 0 bytes): project.resume-limit is 0"),
        (without_room, "out (1 file, 3.0 kB): local1 has room for 2.5 kB in "),
        (leading_out, "out: it leads out of the run directory, to "),
        (
            lambda state: Path(state.job.run_dir).rename(f"{state.job.run_dir}.away"),
            f"{os.uname().nodename}, where the job's driver runs, does not see this directory",
        ),
    ],
)  # fmt: skip
def test_what_is_not_sent_is_said_with_the_reason(
    state: State, tmp_path: Path, capfd: pytest.CaptureFixture[str], change: Any, why: str
) -> None:
    change(state)
    send_earlier_results(state)
    text = noted(state, capfd)
    assert text.startswith(f"{state.job.run_dir}: not sent to the nodes: {why}"), text
    assert text.endswith("; a program that resumes from earlier results starts anew")
    assert state.sent_results == {}
    assert not (tmp_path / "local1").exists()


@pytest.mark.parametrize("outputs", [(), (".",), ("*",), ("**/*",), ("none",), ("wandb",)])
def test_nothing_is_sent_that_is_not_named_as_a_result(
    state: State, tmp_path: Path, capfd: pytest.CaptureFixture[str], outputs: tuple[str, ...]
) -> None:
    """Everything would be the project with its environment, and trackers begin anew."""
    (tmp_path / "run" / "wandb").mkdir()
    (tmp_path / "run" / "wandb" / "log").write_text("log")
    state.job = replace(state.job, outputs=outputs, tracked=("wandb",))
    send_earlier_results(state)
    assert noted(state, capfd) == ""
    assert not (tmp_path / "local1").exists()


def test_a_relay_brings_them(state: State) -> None:
    for number, node in enumerate(state.job.nodes):
        state.facts[node] = replace(state.facts[node], address=f"127.0.0.{number + 1}")
    nodes = state.transport = Nodes(Path(state.job.run_dir).parent)
    send_earlier_results(state)
    assert {bool(transfer.token) for transfer in nodes.transfers} == {True}


def test_a_node_without_them_fails_the_job(
    state: State, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its ranks would begin at another step than all others."""
    state.transport = Nodes(tmp_path, full=("local2",))
    with pytest.raises(NodesFailed) as caught:
        send_earlier_results(state)
    assert [*caught.value.answers] == ["local2"]
    assert "with project.resume-limit = 0 a job starts without them" in noted(state, capfd)


class Watched(io.FileIO):
    """The file that results are written to, while another job goes on writing them."""

    def __init__(self, path: str, most: int, change: Callable[[], object]) -> None:
        super().__init__(path, "w")
        self._most, self._change = most, change

    def write(self, data: Any) -> int:
        if self._most:
            self._most -= 1
            self._change()
        return super().write(data)


@pytest.mark.parametrize(("writes", "warned"), [(1, False), (100, True)])
def test_what_changes_while_it_is_read_is_read_again(
    state: State,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    writes: int,
    warned: bool,
) -> None:
    log = tmp_path / "run" / "out" / "log"
    log.write_text("begin")
    files: list[IO[bytes]] = []

    def grow() -> None:
        with log.open("ab") as handle:
            handle.write(b"more")

    def opened(path: str, mode: str) -> IO[bytes]:
        files.append(Watched(path, 0 if files and not warned else writes, grow))
        return files[-1]

    monkeypatch.setattr(collect, "open", opened, raising=False)
    send_earlier_results(state)
    text = noted(state, capfd)
    assert ("out/log: written to while it was read for the nodes" in text) == warned, text
    copy = (tmp_path / "local1" / "out" / "log").read_bytes()
    assert log.read_bytes().startswith(copy)
    assert warned or os.stat(log).st_size == len(copy)


def shortened(file: Path) -> None:
    os.truncate(file, max(0, file.stat().st_size - CHUNK // 2))


@pytest.mark.parametrize(
    ("again", "change", "sent"),
    [
        (False, lambda file: file.unlink(missing_ok=True), ["model"]),
        (False, shortened, ["half", "model"]),
        (True, lambda file: file.unlink(missing_ok=True), []),
        (True, shortened, []),
    ],
    ids=["vanishes", "shrinks", "vanishes twice", "shrinks twice"],
)
def test_a_checkpoint_that_is_half_written_does_not_keep_a_job_from_starting(
    state: State,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    again: bool,
    change: Callable[[Path], object],
    sent: list[str],
) -> None:
    half = tmp_path / "run" / "out" / "half"
    half.write_bytes(bytes(3 * CHUNK))
    state.job = replace(state.job, resume_limit=10 * CHUNK)
    files: list[IO[bytes]] = []

    class Restoring(Watched):
        """A file after whose writing the checkpoint is written anew."""

        def close(self) -> None:
            super().close()
            if again:
                half.write_bytes(bytes(3 * CHUNK))

    def opened(path: str, mode: str) -> IO[bytes]:
        files.append(Restoring(path, 100 if again or not files else 0, lambda: change(half)))
        return files[-1]

    monkeypatch.setattr(collect, "open", opened, raising=False)
    send_earlier_results(state)
    text = noted(state, capfd)
    where = tmp_path / "local1" / "out"
    assert (sorted(os.listdir(where)) if where.exists() else []) == sent, text
    assert ("out/half changed while it was read; a program that resumes" in text) == again, text
