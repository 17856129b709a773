"""The mark in the run directory, outputs that are brought there, and earlier ones sent to nodes."""

from __future__ import annotations

import io
import itertools
import json
import os
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest

from bundle.driver import collect
from bundle.driver.collect import collect_outputs, run_dir_marker, send_earlier_results
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
from bundle.launch.staged_files import has_outputs_besides
from bundle.node.machine import host_facts
from bundle.protocol.enumerations import Allocation
from bundle.protocol.messages import LaunchAnswer, PreflightAnswer, TidyAnswer, UnpackAnswer
from bundle.protocol.problem import Problem, ProblemCode
from bundle.results import stream as stream_format
from bundle.results.receive import receive_outputs
from bundle.results.stream import send_outputs
from stager.pack.bundle import Packed
from tests.support.displayed import displayed, noted
from tests.support.jobs import job_for

CHUNK = stream_format.CHUNK


def test_the_mark_is_there_for_as_long_as_it_is_looked_for(single: Packed, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    job = job_for(single, run_dir)
    with run_dir_marker(job) as first, run_dir_marker(job) as second:
        assert first != second  # two jobs may look at the same time
        assert sorted(os.listdir(run_dir)) == sorted([first, second])
        assert first.startswith(".stager-4711-")
        assert stat.S_IMODE((run_dir / first).stat().st_mode) == 0o600
    with pytest.raises(RuntimeError), run_dir_marker(job):
        raise RuntimeError("in the middle")
    assert os.listdir(run_dir) == []
    with run_dir_marker(job) as name:
        (run_dir / name).unlink()  # by somebody else
    with run_dir_marker(job_for(single, tmp_path, run_dir=str(tmp_path / "absent"))) as name:
        assert name == ""


class Nodes(Transport):
    """A transport to nodes whose directories are here, below a folder, by their names.

    Attributes:
        mute: the nodes that do not send all of theirs.
        full: those that have no room for what is sent to them.
        make_stream: makes what a node writes its outputs to.
        tidied: the nodes of each request to tidy.
        transfers: the files that were sent to nodes.
    """

    def __init__(self, folder: Path, mute: tuple[str, ...] = (), full: tuple[str, ...] = ()):
        self.mute, self.full = mute, full
        self.make_stream: Callable[[], io.BytesIO] = io.BytesIO
        self.tidied: list[tuple[str, ...]] = []
        self.transfers: list[Transfer] = []
        self._folder = folder

    def run(self, phase: str, requests: Requests, on_event: OnEvent) -> dict[str, Ended]:
        for node, request in requests.items():
            folder, brought = str(self._folder / node), request.brought
            more = brought is not None and has_outputs_besides(folder, ("out",), brought)
            left = more or (request.keep_files and bool(os.listdir(folder)))
            on_event(TidyAnswer(node, left=left, unsent=more))
        self.tidied.append(tuple(requests))
        return dict.fromkeys(requests, Ended(ProblemCode.NO_ANSWER, {"why": "it is a test"}, 0))

    def fetch(self, phase: str, requests: Requests, take: Callable[[IO[bytes]], None]) -> None:
        ((node, request),) = requests.items()
        stream = self.make_stream()
        folder = str(self._folder / node)
        send_outputs(folder, request.job.outputs, stream, brought=request.brought)
        take(io.BytesIO(stream.getvalue()[:600] if node in self.mute else stream.getvalue()))

    def deliver(self, transfer: Transfer, requests: Requests, on_event: OnEvent) -> Delivery:
        self.transfers.append(transfer)
        for node, request in requests.items():
            values = {"why": "full", "files": "1", "source": "s"}
            problem = Problem(ProblemCode.RESULTS_TOO_LARGE, node, values)
            answer = UnpackAnswer(node, ok=False, problems=(problem,))
            if node not in self.full:
                (self._folder / node).mkdir()
                with open(transfer.source, "rb") as stream:
                    outputs = request.job.outputs
                    assert receive_outputs(stream, str(self._folder / node), outputs).complete
                answer = UnpackAnswer(node)
            on_event(answer)
        return Delivery({}, dict.fromkeys(requests, Ended(ProblemCode.NO_ANSWER, {}, 0)))


@pytest.fixture
def three(single: Packed, tmp_path: Path) -> State:
    """A job on three nodes: the first and the last have written one file, the second another."""
    (tmp_path / "run").mkdir()
    nodes, run_dir = ("n1", "n2", "n3"), str(tmp_path / "run")
    job = job_for(single, tmp_path, nodes=nodes, run_dir=run_dir, outputs=("out",))
    state = State(job, Logs(job))
    state.separate_run_dirs = True
    state.transport = Nodes(tmp_path)
    for node, file in zip(nodes, ("same", "shard", "same"), strict=True):
        (tmp_path / node / "out").mkdir(parents=True)
        (tmp_path / node / "out" / file).write_text(node)
        state.facts[node] = PreflightAnswer(node=node, root=str(tmp_path), python="python")
    return state


def collected(state: State, capfd: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """What is told of the outputs, with nothing more to be said."""
    events = [json.loads(line) for line in displayed(state, capfd).splitlines()]
    assert not any(event["event"] == "note" for event in events)
    [one] = [event for event in events if event["event"] == "collected"]
    return dict(one)


def test_files_come_that_only_other_nodes_have_and_are_removed_there(
    three: State, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    nodes = three.transport
    collect_outputs(three, standing=True)
    out = tmp_path / "run" / "out"
    assert {path.name: path.read_text() for path in out.iterdir()} == {"same": "n1", "shard": "n2"}
    assert isinstance(nodes, Nodes)
    assert nodes.tidied == [("n1", "n2", "n3"), ("n2",)]
    told = collected(three, capfd)
    assert (told["node"], told["others"], told["files"]) == ("n1", ["n2"], 2)


def test_what_has_gaps_stays_on_the_node(
    three: State, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A file that breaks off while it is read is complete to the stream, but not to its user."""
    model = tmp_path / "n1" / "out" / "model"
    model.write_bytes(bytes(3 * CHUNK))

    class Cutting(io.BytesIO):
        def write(self, data: Any) -> int:
            if len(data) == CHUNK:
                os.truncate(model, CHUNK)
            return super().write(data)

    nodes = three.transport = Nodes(tmp_path)
    nodes.make_stream = Cutting
    collect_outputs(three, standing=True)
    assert (tmp_path / "run" / "out" / "model").exists()
    assert "n1" not in {node for tidied in nodes.tidied for node in tidied}
    assert "some outputs were not brought back; they are still on n1" in noted(three, capfd)


def test_where_the_files_of_other_nodes_do_not_come_they_stay(
    three: State, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    nodes = three.transport = Nodes(tmp_path, mute=("n2",))
    collect_outputs(three, standing=True)
    assert os.listdir(tmp_path / "run" / "out") == ["same"]
    assert nodes.tidied == [("n1", "n2", "n3")]
    assert "some outputs were not brought back; they are still on n2 in" in noted(three, capfd)


def test_outputs_come_from_the_node_where_rank_0_ran_last(
    three: State, capfd: pytest.CaptureFixture[str]
) -> None:
    """In an elastic job it may have moved: what it wrote before it was started again is older."""
    for name, began in {"n1": 100.0, "n2": 200.0, "n3": None}.items():
        three.answers[name] = LaunchAnswer(name, first_rank=began)
    collect_outputs(three, standing=True)
    assert collected(three, capfd)["node"] == "n2"


@pytest.fixture
def resuming(single: Packed, tmp_path: Path) -> State:
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
    resuming: State, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    send_earlier_results(resuming)
    send_earlier_results(resuming)  # the ranks are started again without a node
    for node in resuming.job.nodes:
        assert (tmp_path / node / "out" / "model").stat().st_size == 3000
    text = f"sending earlier results to the nodes: out (1 file, 3.0 kB) in {resuming.job.run_dir}"
    assert noted(resuming, capfd) == text
    assert [*(resuming.sent_results or {})] == ["out", "out/model"]


def without_room(resuming: State) -> None:
    node, facts = next(iter(resuming.facts.items()))
    root = replace(facts.host.node_root, free_bytes=5000)
    resuming.facts[node] = replace(facts, host=replace(facts.host, node_root=root))


def without_limit(resuming: State) -> None:
    os.truncate(Path(resuming.job.run_dir, "out", "model"), 0)
    resuming.job = replace(resuming.job, resume_limit=0)


def leading_out(resuming: State) -> None:
    out = Path(resuming.job.run_dir, "out")
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
    resuming: State, tmp_path: Path, capfd: pytest.CaptureFixture[str], change: Any, why: str
) -> None:
    change(resuming)
    send_earlier_results(resuming)
    text = noted(resuming, capfd)
    assert text.startswith(f"{resuming.job.run_dir}: not sent to the nodes: {why}"), text
    assert text.endswith("; a program that resumes from earlier results starts anew")
    assert resuming.sent_results == {}
    assert not (tmp_path / "local1").exists()


@pytest.mark.parametrize("outputs", [(), (".",), ("**/*",), ("none",), ("wandb",)])
def test_nothing_is_sent_that_is_not_named_as_a_result(
    resuming: State, tmp_path: Path, capfd: pytest.CaptureFixture[str], outputs: tuple[str, ...]
) -> None:
    """Everything would be the project with its environment, and trackers begin anew."""
    (tmp_path / "run" / "wandb").mkdir()
    (tmp_path / "run" / "wandb" / "log").write_text("log")
    resuming.job = replace(resuming.job, outputs=outputs, tracked=("wandb",))
    send_earlier_results(resuming)
    assert noted(resuming, capfd) == ""
    assert not (tmp_path / "local1").exists()


def test_a_relay_brings_them_and_a_node_without_them_fails_the_job(
    resuming: State, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its ranks would begin at another step than all others."""
    for number, node in enumerate(resuming.job.nodes):
        resuming.facts[node] = replace(resuming.facts[node], address=f"127.0.0.{number + 1}")
    nodes = resuming.transport = Nodes(tmp_path, full=("local2",))
    with pytest.raises(NodesFailed) as caught:
        send_earlier_results(resuming)
    assert {bool(transfer.token) for transfer in nodes.transfers} == {True}
    assert [*caught.value.answers] == ["local2"]
    assert "with project.resume-limit = 0 a job starts without them" in noted(resuming, capfd)


def grow(file: Path) -> None:
    with file.open("ab") as handle:
        handle.write(b"more")


def shorten(file: Path) -> None:
    os.truncate(file, max(0, file.stat().st_size - CHUNK // 2))


@pytest.mark.parametrize(
    ("times", "change", "sent", "warning"),
    [
        (1, grow, ["half", "model"], ""),
        (2, grow, ["half", "model"], "out/half: written to while it was read for the nodes"),
        (1, lambda file: file.unlink(missing_ok=True), ["model"], ""),
        (1, shorten, ["half", "model"], ""),
        (2, shorten, [], "out/half changed while it was read; a program that resumes"),
    ],
)
def test_what_changes_while_it_is_read_is_read_again(
    resuming: State,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    times: int,
    change: Callable[[Path], object],
    sent: list[str],
    warning: str,
) -> None:
    """A checkpoint that is half written is not sent, and does not keep a job from starting."""
    half, reads = tmp_path / "run" / "out" / "half", itertools.count(1)
    half.write_bytes(bytes(3 * CHUNK))
    resuming.job = replace(resuming.job, resume_limit=10 * CHUNK)
    send_selection = collect.send_selection

    def send(selection: Any, directory: str, stream: Any) -> Any:
        if next(reads) > times:
            return send_selection(selection, directory, stream)

        def write(data: bytes) -> int:
            change(half)
            return int(stream.write(data))

        end = send_selection(selection, directory, SimpleNamespace(write=write, flush=stream.flush))
        if times > 1:
            half.write_bytes(bytes(3 * CHUNK))
        return end

    monkeypatch.setattr(collect, "send_selection", send)
    send_earlier_results(resuming)
    text, where = noted(resuming, capfd), tmp_path / "local1" / "out"
    assert (sorted(os.listdir(where)) if where.exists() else []) == sent, text
    assert warning in text
    assert ("while it was read" in text) == bool(warning)
