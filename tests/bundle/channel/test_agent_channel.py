"""An agent's end of the channel: real processes, and the driver's frames."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bundle.channel import agent_channel
from bundle.channel.agent_channel import HANG_SECONDS, TaskProgress
from bundle.channel.frames import FrameReader, heartbeat
from bundle.driver.transports import agent_program
from bundle.protocol.codec import encode
from bundle.protocol.job import Job
from bundle.protocol.messages import StepMessage
from bundle.system.processes import TaskState
from tests.support.jobs import PLAIN

REPO = str(Path(__file__).resolve().parents[3])
AGENT = f"""
import os, sys, time
sys.path.insert(0, {REPO!r})
from bundle.system import signals
from bundle.channel import agent_channel
from bundle.protocol.messages import LaunchAnswer
signals.end_on_signals()
agent_channel._REPEAT_SECONDS = 0.4
agent_channel.STAY_SECONDS = float(sys.argv[2])
if "beat" in sys.argv:
    agent_channel.BEAT_SECONDS = 0.01
channel = agent_channel.AgentChannel(int(sys.argv[1]))
try:
    for number in range(3):
        channel.output(0, b"line %d\\n" % number)
    if "work" in sys.argv:
        time.sleep(600)
except signals.Stopped:
    channel.output(0, b"saved\\n")
channel.send_last_answer(LaunchAnswer(sent={{"0": channel.sent[0]}}))
"""


def message(phase: str, job: Job = PLAIN, **fields: Any) -> StepMessage:
    """The first request of a step."""
    return StepMessage(phase, {"job": job.to_json(), "nodes_here": 1, **fields}, {})


class Agent:
    """A process that speaks as an agent does; ``source`` is its name in frames."""

    source = "n1:7"

    def __init__(self, folder: Path, stay: float, *words: str) -> None:
        request = folder / "request.json"
        request.write_text(json.dumps(encode(message("clean"))))
        handle = os.open(request, os.O_RDONLY)
        self.process = subprocess.Popen(
            [sys.executable, "-c", AGENT, str(handle), str(stay), *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "SLURMD_NODENAME": "n1", "SLURM_PROCID": "7"},
            pass_fds=[handle],
        )
        os.close(handle)

    def frames(self, count: int) -> list[bytes]:
        """The next frames."""
        assert self.process.stdout is not None
        return [self.process.stdout.readline() for _ in range(count)]

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line.encode() + b"\n")
        self.process.stdin.flush()


@pytest.fixture
def agents() -> Iterator[list[Agent]]:
    started: list[Agent] = []
    yield started
    for agent in started:
        agent.process.kill()
        agent.process.wait(300)
        for stream in (agent.process.stdin, agent.process.stdout):
            if stream is not None:
                stream.close()


def events(frames: list[bytes]) -> list[dict[str, Any]]:
    return [json.loads(line) for _, line in FrameReader().feed(b"".join(frames))]


def test_it_stays_until_its_standard_input_ends(tmp_path: Path, agents: list[Agent]) -> None:
    """And says its last word again: nothing that comes behind it would show that it is missing."""
    agents.append(agent := Agent(tmp_path, 600))
    sent = agent.frames(4)
    said = events(sent)
    assert [event.get("text") for event in said] == ["line 0\n", "line 1\n", "line 2\n", None]
    assert said[-1]["sent"] == {"0": 21}
    assert agent.frames(2) == [sent[3], sent[3]]
    agent.process.send_signal(signal.SIGTERM)  # Slurm does so when another task has died
    time.sleep(0.2)
    assert agent.process.poll() is None
    assert agent.process.stdin is not None
    agent.process.stdin.close()
    assert agent.process.wait(300) == 0


def test_it_goes_by_itself_after_a_while(tmp_path: Path, agents: list[Agent]) -> None:
    """However the driver has died: nothing of it is left on the node."""
    agents.append(agent := Agent(tmp_path, 0.2))
    assert agent.process.wait(300) == 0


def test_what_is_missing_is_sent_again(tmp_path: Path, agents: list[Agent]) -> None:
    agents.append(agent := Agent(tmp_path, 600))
    sent = agent.frames(4)
    agent.tell(json.dumps({"again": {"n1:8": [[1, 4]]}}))  # not this one
    agent.tell(json.dumps({"again": {agent.source: [[2, 3]]}}))
    again: list[bytes] = []
    while len(again) < 2:  # its last word comes in between
        again += [frame for frame in agent.frames(1) if frame != sent[3]]
    assert again == sent[1:3]


def test_it_sends_heartbeats_at_work_too(tmp_path: Path, agents: list[Agent]) -> None:
    agents.append(agent := Agent(tmp_path, 600, "work", "beat"))
    beats = [frame for frame in agent.frames(8) if frame == heartbeat(agent.source)]
    assert len(beats) >= 5
    assert list(FrameReader().feed(beats[0])) == [(agent.source, "")]


def test_a_question_that_was_cut_leaves_it_listening(tmp_path: Path, agents: list[Agent]) -> None:
    """Else nobody would notice the end of the input, and what runs there would go on for ever."""
    agents.append(agent := Agent(tmp_path, 600, "work"))
    agent.frames(3)
    agent.tell('{"again": {"n1:')
    agent.tell('{"again": {"n1:7": "all"}}')
    assert agent.process.stdin is not None
    agent.process.stdin.close()
    assert agent.process.wait(60) == 0


def unreadable(*_: object) -> bytes:
    raise OSError(5, "Input/output error")


@pytest.mark.parametrize("read", [lambda *_: b"", unreadable])
def test_the_end_interrupts_before_it_can_be_taken_for_a_command(
    monkeypatch: pytest.MonkeyPatch, read: Callable[..., bytes]
) -> None:
    """Else an agent that waits for a command would answer that its file was not sent."""
    channel = object.__new__(agent_channel.AgentChannel)
    channel._lines = queue.Queue()
    waiting: list[bool] = []
    monkeypatch.setattr(channel, "_interrupt", lambda: waiting.append(channel._lines.empty()))
    monkeypatch.setattr(agent_channel, "os", SimpleNamespace(read=read))
    channel._listen()
    assert (waiting, channel.command()) == ([True], "")


def test_one_that_works_is_told_to_end_and_stays(tmp_path: Path, agents: list[Agent]) -> None:
    agents.append(agent := Agent(tmp_path, 600, "work"))
    agent.frames(3)
    agent.tell("end")
    said = events([b"\x1en1:7 0 0 - . {}\n", *agent.frames(2)])
    assert said == [{}]  # numbers 4 and 5 wait for those before
    assert agent.process.poll() is None


FOLLOWING = f"""
import json, signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # what the end of the input is to one at work
sys.path.insert(0, {REPO!r})
from bundle.channel import agent_channel
channel = agent_channel.AgentChannel(int(sys.argv[1]))
while channel.await_request():
    request = channel.request
    print(json.dumps([request.phase, request.job.id, request.node_rank]), flush=True)
"""


def test_a_request_may_be_compressed_and_leave_out_the_job_that_is_known(tmp_path: Path) -> None:
    """Be it known from a request that was for other nodes."""
    other = replace(PLAIN, id="2")
    request = tmp_path / "request.json"
    request.write_text(json.dumps(encode(message("clean"))))
    asked = [
        message("preflight", marker="x" * 500),
        replace(message("tidy", other), nodes=("n0",)),
        replace(message("clean"), nodes=("n1",)),
    ]
    for number in (0, 2):
        del asked[number].common["job"]
    lines = [agent_program.request_line(one) for one in asked]
    assert lines[0].startswith(agent_channel.PACKED)
    with request.open() as handle:
        done = subprocess.run(
            [sys.executable, "-c", FOLLOWING, str(handle.fileno())],
            input="\n".join(["=cut", *lines, ""]),
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "SLURMD_NODENAME": "n1"},
            pass_fds=[handle.fileno()],
            check=False,
        )
    assert [json.loads(line) for line in done.stdout.splitlines()] == [
        ["preflight", PLAIN.id, 1],
        ["clean", "2", 1],
    ]


LOOKING = f"""
import signal, sys, threading
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # what the end of the input is to one at work
sys.path.insert(0, {REPO!r})
from bundle.channel import agent_channel
channel = agent_channel.AgentChannel(int(sys.argv[1]) if len(sys.argv) > 1 else None)
over = threading.Event()

def look(number):
    print("look", number, flush=True)
    if number == 9:
        over.set()

with channel.answer_looks(look):
    print("ready", flush=True)
    over.wait()
print("over", flush=True)
while channel.await_request():
    print(channel.request.phase, flush=True)
"""


@pytest.mark.parametrize("is_local", [True, False], ids=["local", "step"])
def test_looks_are_taken_while_ranks_run(tmp_path: Path, is_local: bool) -> None:
    """On a local node standard input is for the next request again after them."""
    asked = message("clean")
    local = {"v": 1, "phase": "clean", "node": "n1", "node_rank": 1, **asked.common}
    request = tmp_path / "request.json"
    request.write_text(json.dumps(encode(asked)))
    with (
        request.open() as handle,
        subprocess.Popen(
            [sys.executable, "-c", LOOKING, *([] if is_local else [str(handle.fileno())])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "SLURMD_NODENAME": "n1"},
            pass_fds=[handle.fileno()],
        ) as agent,
    ):
        assert agent.stdin is not None
        assert agent.stdout is not None

        def tell(line: str, *answers: str) -> None:
            assert agent.stdin is not None
            assert agent.stdout is not None
            agent.stdin.write(f"{line}\n")
            agent.stdin.flush()
            assert [agent.stdout.readline() for _ in answers] == [f"{each}\n" for each in answers]

        if is_local:
            tell(json.dumps(local))
        assert agent.stdout.readline() == "ready\n"
        tell("look 7\nlook\nlook x\nlook 9", "look 7", "look 9", "over")
        tell("look 8")  # too late
        tell(json.dumps(local) if is_local else agent_program.request_line(asked), "clean")
        agent.stdin.close()
        assert agent.stdout.read() == ""


WRITER = TaskState(999_999_999, "D", 5)  # no such process: its command and its wait are not known
LOOKS = 12


def looks(progress: TaskProgress, tasks: tuple[TaskState, ...], count: int) -> list[str]:
    """What is found in so many looks, over the time after which processes hang."""
    return [progress.find_hang(tasks, HANG_SECONDS / LOOKS) for _ in range(count)]


def test_a_hang_is_named_a_minute_after_the_last_progress_and_not_before() -> None:
    """A slow disk answers shortly before the time is over."""
    progress = TaskProgress((WRITER,))
    assert looks(progress, (WRITER,), LOOKS - 1) == [""] * (LOOKS - 1)
    found = looks(progress, (WRITER._replace(switches=6),), LOOKS + 1)
    assert found == [""] * LOOKS + ["a process (pid 999999999, state D)"]
    assert progress.still_seconds == HANG_SECONDS
