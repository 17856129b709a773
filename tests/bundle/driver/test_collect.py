"""The mark in the run directory, outputs that are brought there, and earlier ones sent to nodes."""

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
        return {node: Ended(ProblemCode.NO_ANSWER, {"why": "it is a test"}, 0) for node in requests}

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
        return {node: Ended(ProblemCode.NO_ANSWER, {"why": "it is a test"}, 0) for node in requests}

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


# --- earlier results on their way to nodes that do not see the run directory ---------------------


class Hosts(Transport):
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
        return Delivery({}, {node: Ended(ProblemCode.NO_ANSWER, {}, 0) for node in requests})


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
    state.transport = Hosts(tmp_path)
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


@pytest.mark.parametrize("outputs", [(), (".",), ("*",), ("**/*",), ("none",), ("wandb",)])
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


def test_a_relay_brings_them(resuming: State) -> None:
    for number, node in enumerate(resuming.job.nodes):
        resuming.facts[node] = replace(resuming.facts[node], address=f"127.0.0.{number + 1}")
    nodes = resuming.transport = Hosts(Path(resuming.job.run_dir).parent)
    send_earlier_results(resuming)
    assert {bool(transfer.token) for transfer in nodes.transfers} == {True}


def test_a_node_without_them_fails_the_job(
    resuming: State, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its ranks would begin at another step than all others."""
    resuming.transport = Hosts(tmp_path, full=("local2",))
    with pytest.raises(NodesFailed) as caught:
        send_earlier_results(resuming)
    assert [*caught.value.answers] == ["local2"]
    assert "with project.resume-limit = 0 a job starts without them" in noted(resuming, capfd)


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
    resuming: State,
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
    send_earlier_results(resuming)
    text = noted(resuming, capfd)
    assert ("out/log: written to while it was read for the nodes" in text) == warned, text
    copy = (tmp_path / "local1" / "out" / "log").read_bytes()
    assert log.read_bytes().startswith(copy)
    assert warned or os.stat(log).st_size == len(copy)


def shortened(file: Path) -> None:
    os.truncate(file, max(0, file.stat().st_size - stream_format.CHUNK // 2))


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
    resuming: State,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    again: bool,
    change: Callable[[Path], object],
    sent: list[str],
) -> None:
    half = tmp_path / "run" / "out" / "half"
    half.write_bytes(bytes(3 * stream_format.CHUNK))
    resuming.job = replace(resuming.job, resume_limit=10 * stream_format.CHUNK)
    files: list[IO[bytes]] = []

    class Restoring(Watched):
        """A file after whose writing the checkpoint is written anew."""

        def close(self) -> None:
            super().close()
            if again:
                half.write_bytes(bytes(3 * stream_format.CHUNK))

    def opened(path: str, mode: str) -> IO[bytes]:
        files.append(Restoring(path, 100 if again or not files else 0, lambda: change(half)))
        return files[-1]

    monkeypatch.setattr(collect, "open", opened, raising=False)
    send_earlier_results(resuming)
    text = noted(resuming, capfd)
    where = tmp_path / "local1" / "out"
    assert (sorted(os.listdir(where)) if where.exists() else []) == sent, text
    assert ("out/half changed while it was read; a program that resumes" in text) == again, text
