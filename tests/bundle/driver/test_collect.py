"""The mark in the run directory by which nodes know it, and the outputs that are brought there."""

from __future__ import annotations

import io
import json
import os
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import pytest

from bundle.driver.collect import collect_outputs, run_dir_marker
from bundle.driver.logs import Logs
from bundle.driver.state import State
from bundle.driver.transports.transport import Ended, OnEvent, Requests, Transport
from bundle.launch.staged_files import has_outputs_besides
from bundle.protocol.messages import LaunchAnswer, PreflightAnswer, TidyAnswer
from bundle.protocol.problem import ProblemCode
from bundle.results import stream as stream_format
from bundle.results.stream import send_outputs
from stager.pack.bundle import Packed
from tests.support.displayed import displayed, noted
from tests.support.jobs import job_for
from tests.support.namespaces import namespace


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


def test_a_directory_that_is_read_only(single: Packed, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    log = job_for(single, tmp_path / "run").to_json()
    code = (
        "from bundle.protocol.job import parse_job\nfrom bundle.driver.collect import "
        "run_dir_marker\n"
        f"with run_dir_marker(parse_job({log!r})) as name: print(json.dumps(name))\n"
    )
    mount = f"mount -t tmpfs -o ro none '{tmp_path}/run'"
    assert namespace("-m", mount, code) == ""


# --- outputs -------------------------------------------------------------------------------------


class CutWhileSent(io.BytesIO):
    """A stream whose file, of more than a chunk, gets shorter while it is written."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self._file = file

    def write(self, data: Any) -> int:
        if len(data) == stream_format.CHUNK:
            os.truncate(self._file, stream_format.CHUNK)
        return super().write(data)


class OneNode(Transport):
    """A transport to a node whose directory is here.

    Attributes:
        asked: the phases that the node was asked for.
    """

    def __init__(self, work: Path, stream: io.BytesIO) -> None:
        self.asked: list[str] = []
        self._work, self._stream = work, stream
        self._outputs = ("out", "wandb")

    def run(self, phase: str, requests: Requests, on_event: OnEvent) -> dict[str, Ended]:
        self.asked.append(phase)
        return {node: Ended(0, ProblemCode.NO_ANSWER, {"why": "it is a test"}) for node in requests}

    def fetch(self, phase: str, requests: Requests, take: Callable[[IO[bytes]], None]) -> None:
        send_outputs(str(self._work), self._outputs, self._stream)
        take(io.BytesIO(self._stream.getvalue()))


@pytest.fixture
def state(single: Packed, tmp_path: Path) -> State:
    """A job whose first node has the run directory ``work``, with an output."""
    (tmp_path / "run").mkdir()
    (tmp_path / "work" / "out").mkdir(parents=True)
    (tmp_path / "work" / "out" / "model").write_bytes(bytes(3 * stream_format.CHUNK))
    job = job_for(single, tmp_path, run_dir=str(tmp_path / "run"), outputs=("out",))
    state = State(job, Logs(job))
    state.separate_run_dirs = True
    for node in job.nodes:
        state.facts[node] = PreflightAnswer(node=node, ok=True, root=str(tmp_path), python="python")
    return state


def test_what_has_come_whole_is_removed_from_the_node(
    state: State, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    node = state.transport = OneNode(tmp_path / "work", io.BytesIO())
    collect_outputs(state, standing=True)
    assert (tmp_path / "run" / "out" / "model").stat().st_size == 3 * stream_format.CHUNK
    assert node.asked == ["tidy"]
    assert "still on" not in noted(state, capfd)


def test_what_has_gaps_stays_on_the_node(
    state: State, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A file that breaks off while it is read is complete to the stream, but not to its user."""
    work = tmp_path / "work"
    node = state.transport = OneNode(work, CutWhileSent(work / "out" / "model"))
    collect_outputs(state, standing=True)
    assert (tmp_path / "run" / "out" / "model").exists()
    assert node.asked == []
    assert "some outputs were not brought back; they are still on local1" in noted(state, capfd)


def test_outputs_come_from_the_node_where_rank_0_ran_last(
    single: Packed, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """In an elastic job it may have moved: what it wrote before it was started again is older."""
    (tmp_path / "run").mkdir()
    (tmp_path / "work" / "out").mkdir(parents=True)
    run_dir = str(tmp_path / "run")
    job = job_for(single, tmp_path, nodes=("n1", "n2", "n3"), run_dir=run_dir, outputs=("out",))
    state = State(job, Logs(job))
    state.separate_run_dirs = True
    for name in job.nodes:
        state.facts[name] = PreflightAnswer(node=name, root=str(tmp_path), python="python")
    began = {"n1": 100.0, "n2": 200.0, "n3": None}
    for name, time in began.items():
        state.answers[name] = LaunchAnswer(name, first_rank=time)
    state.transport = OneNode(tmp_path / "work", io.BytesIO())
    collect_outputs(state, standing=True)
    lines = map(json.loads, displayed(state, capfd).splitlines())
    assert [line["node"] for line in lines if line["event"] == "collected"] == ["n2"]


class SeveralNodes(OneNode):
    """A transport to nodes whose directories are named after them; some do not send theirs.

    Attributes:
        tidied: the nodes of each request to tidy.
    """

    def __init__(self, works: Path, mute: tuple[str, ...] = ()) -> None:
        super().__init__(works, io.BytesIO())
        self.tidied: list[tuple[str, ...]] = []
        self._mute = mute

    def run(self, phase: str, requests: Requests, on_event: OnEvent) -> dict[str, Ended]:
        for node, request in requests.items():
            folder, brought = str(self._work / node), request.brought
            more = brought is not None and has_outputs_besides(folder, ("out",), brought)
            left = more or (request.keep_files and bool(os.listdir(folder)))
            on_event(TidyAnswer(node, left=left, unsent=more))
        self.tidied.append(tuple(requests))
        return {node: Ended(0, ProblemCode.NO_ANSWER, {"why": "it is a test"}) for node in requests}

    def fetch(self, phase: str, requests: Requests, take: Callable[[IO[bytes]], None]) -> None:
        ((node, request),) = requests.items()
        stream = io.BytesIO()
        send_outputs(str(self._work / node), request.job.outputs, stream, brought=request.brought)
        take(io.BytesIO(stream.getvalue()[:600] if node in self._mute else stream.getvalue()))


@pytest.fixture
def three(state: State, tmp_path: Path) -> State:
    """A job on three nodes: the first and the last have written one file, the second another."""
    for node, file in (("n1", "same"), ("n2", "shard"), ("n3", "same")):
        (tmp_path / node / "out").mkdir(parents=True)
        (tmp_path / node / "out" / file).write_text(node)
        state.facts[node] = PreflightAnswer(node=node, root=str(tmp_path), python="python")
    state.job = replace(state.job, nodes=("n1", "n2", "n3"))
    return state


def test_files_come_that_only_other_nodes_have(
    three: State, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    nodes = three.transport = SeveralNodes(tmp_path)
    collect_outputs(three, standing=True)
    out = tmp_path / "run" / "out"
    assert {path.name: path.read_text() for path in out.iterdir()} == {"same": "n1", "shard": "n2"}
    assert nodes.tidied == [("n1", "n2", "n3"), ("n2",)]
    events = [json.loads(line) for line in displayed(three, capfd).splitlines()]
    (collected,) = (event for event in events if event["event"] == "collected")
    assert (collected["node"], collected["others"], collected["files"]) == ("n1", ["n2"], 2)
    assert not any(event["event"] == "note" for event in events)


def test_an_output_that_only_another_node_has_is_not_missing(
    three: State, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "n1" / "out").rename(tmp_path / "n1" / "else")
    three.transport = SeveralNodes(tmp_path)
    collect_outputs(three, standing=True)
    assert sorted(os.listdir(tmp_path / "run" / "out")) == ["same", "shard"]
    assert '"missing": []' in displayed(three, capfd)


def test_where_the_files_of_other_nodes_do_not_come_they_stay(
    three: State, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    nodes = three.transport = SeveralNodes(tmp_path, mute=("n2",))
    collect_outputs(three, standing=True)
    assert os.listdir(tmp_path / "run" / "out") == ["same"]
    assert nodes.tidied == [("n1", "n2", "n3")]
    assert "some outputs were not brought back; they are still on n2 in" in noted(three, capfd)


def test_nobody_misses_what_a_tracker_has_not_written(
    state: State, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    state.job = replace(state.job, outputs=("out", "wandb"), tracked=("wandb",))
    state.transport = OneNode(tmp_path / "work", io.BytesIO())
    collect_outputs(state, standing=True)
    events = [json.loads(line) for line in displayed(state, capfd).splitlines()]
    (collected,) = (event for event in events if event["event"] == "collected")
    assert collected.get("missing", []) == []
    assert (tmp_path / "run" / "out" / "model").exists()
