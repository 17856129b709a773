"""Unpacking what is sent: an agent as in a step of Slurm's, told to go on or not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bundle.channel.frames import FrameReader, heartbeat
from bundle.driver.plan import write_excerpt
from bundle.format.archive import BundleFile
from stager.pack.bundle import Packed
from tests.support.bundles import BASE_PYTHON, left_over
from tests.support.jobs import job_for
from tests.support.processes import until

STEP = {"SLURMD_NODENAME": "n1", "SLURM_PROCID": "3", "SLURM_JOB_ID": "42", "SLURM_STEP_ID": "7"}


class Agent:
    """An agent whose request is in a file already, and who hears our commands."""

    def __init__(self, program: Path, phase: str, request: dict[str, Any], own: Path) -> None:
        path = own / "request.json"
        path.write_text(json.dumps({"v": 1, "phase": phase, "common": request, "own": {}}))
        handle = os.open(path, os.O_RDONLY)
        argv = [sys.executable, "-I", "-S", str(program), "agent", phase, "--request", str(handle)]
        self.process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **STEP},
            pass_fds=[handle],
        )
        os.close(handle)
        self._reader = FrameReader()

    def event(self) -> dict[str, Any]:
        """The next one."""
        assert self.process.stdout is not None
        while True:
            line = self.process.stdout.readline()
            assert line, self.process.communicate()
            for source, text in self._reader.feed(line):
                assert source == "n1:3"
                if text:  # else it is a heartbeat
                    return dict(json.loads(text))

    def tell(self, word: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(word)
        self.process.stdin.flush()

    def end(self, *, by_itself: bool = True) -> int:
        """Its status, after which it has said nothing more; else its standard input is closed."""
        if by_itself:  # it stays until all that it has said is heard
            time.sleep(0.1)
            assert self.process.poll() is None
        out, err = self.process.communicate(timeout=300)
        assert (out.replace(heartbeat("n1:3"), b""), err) == (b"", b"")
        return self.process.returncode


@pytest.fixture
def incoming(single: Packed, root: Path) -> dict[str, Any]:
    """What an agent is told of a file that will be sent: all of the bundle."""
    target = str(root / "incoming" / "job-42.0" / "bundle.tar")
    size = single.path.stat().st_size
    return {"target": target, "manifest": None, "members": [], "size": size}


@pytest.fixture
def agents() -> Iterator[list[Agent]]:
    made: list[Agent] = []
    yield made
    for agent in made:
        agent.process.kill()
        agent.process.wait()


def waiting(
    agents: list[Agent],
    program: Path,
    packed: Packed,
    incoming: dict[str, Any],
    own: Path,
) -> Agent:
    """An agent that is ready for the file."""
    job = job_for(packed, own, nodes=("n0", "n1"), bundle="/not/seen/here.tar")
    root = str(Path(incoming["target"]).parents[2])
    request = {
        "job": job.to_json(),
        "nodes_here": 1,
        "root": root,
        "python": BASE_PYTHON,
        "incoming": incoming,
    }
    agents.append(Agent(program, "unpack", request, own))
    event = agents[-1].event()
    assert (event["node"], event["event"], event["step"]) == ("n1", "ready", "42.7")
    return agents[-1]


@pytest.fixture
def agent(
    agents: list[Agent], program: Path, single: Packed, incoming: dict[str, Any], tmp_path: Path
) -> Agent:
    """One that is ready for the file of a bundle."""
    return waiting(agents, program, single, incoming, tmp_path)


def test_what_was_sent_is_unpacked_and_does_not_stay(
    agent: Agent, single: Packed, incoming: dict[str, Any], tmp_path: Path
) -> None:
    Path(incoming["target"]).write_bytes(single.path.read_bytes())
    agent.tell(b"go\n")
    event = agent.event()
    assert (event["ok"], event["reused"], event["event"]) == (True, False, "unpack")
    assert os.path.isdir(event["path"])
    assert agent.end() == 0
    assert left_over(tmp_path / "base") == [f"envs/{single.manifest.id}"]


@pytest.mark.parametrize(("arrived", "size"), [(0, 0), (1000, 0), (0, 1 << 60)])
def test_where_the_sending_failed_it_is_told_how_much_came(
    agents: list[Agent],
    program: Path,
    single: Packed,
    incoming: dict[str, Any],
    tmp_path: Path,
    arrived: int,
    size: int,
) -> None:
    """Of a disk that is full Slurm says no more than ``Unspecified error``."""
    size = size or incoming["size"]
    agent = waiting(agents, program, single, {**incoming, "size": size}, tmp_path)
    if arrived:
        Path(incoming["target"]).write_bytes(single.path.read_bytes()[:arrived])
    agent.tell(b"stop\n")
    event = agent.event()
    (problem,) = event["problems"]
    assert (event["ok"], problem["what"]) == (False, "the bundle could not be sent")
    assert problem["why"].startswith(f"{arrived} of {size} bytes had arrived")
    assert problem["why"].endswith(" are free") == (size == 1 << 60)
    assert agent.end() == 3
    assert left_over(tmp_path / "base") == []


def test_a_file_that_is_cut_is_not_unpacked(
    agent: Agent, single: Packed, incoming: dict[str, Any], tmp_path: Path
) -> None:
    Path(incoming["target"]).write_bytes(single.path.read_bytes()[:-1])
    agent.tell(b"go\n")
    event = agent.event()
    assert [problem["what"] for problem in event["problems"]] == [
        "the bundle is damaged or not a bundle"
    ]
    assert agent.end() == 3
    assert left_over(tmp_path / "base") == []


def test_a_driver_that_goes_away_leaves_nothing_behind(
    agent: Agent, single: Packed, incoming: dict[str, Any], tmp_path: Path
) -> None:
    Path(incoming["target"]).write_bytes(single.path.read_bytes()[:1000])
    time.sleep(0.2)
    assert agent.end(by_itself=False) == 143
    assert left_over(tmp_path / "base") == []


def test_a_part_that_is_not_enough_is_told_as_such(
    agents: list[Agent], program: Path, standard: Packed, incoming: dict[str, Any], tmp_path: Path
) -> None:
    """The older environment that had the rest has gone meanwhile."""
    manifest = standard.manifest
    names = [name for name, _ in manifest.layers[0].members]
    told = {**incoming, "manifest": manifest.to_bytes().decode(), "members": names}
    agent = waiting(agents, program, standard, told, tmp_path)
    with BundleFile(str(standard.path)) as bundle:
        write_excerpt(bundle, names, str(tmp_path / "parts.tar"))
    (tmp_path / "parts.tar").rename(incoming["target"])
    agent.tell(b"go\n")
    event = agent.event()
    assert (event["ok"], event["lacking"]) == (False, True)
    assert [problem["what"] for problem in event["problems"]] == [
        "a part of the environment is missing"
    ]
    assert agent.end() == 3
    assert until(lambda: left_over(tmp_path / "base") == [], 120)


IMPATIENT = """\
import sys
sys.path.insert(0, {program!r})
from bundle.channel import agent_channel
agent_channel.BEAT_SECONDS = 0.05
agent_channel.HANG_SECONDS = 1.0
from bundle.agent.agent import command
sys.exit(command(sys.argv[1:]))
"""
"""An agent with more heartbeats, to which a second without progress is a hang."""


def test_what_a_node_hangs_in_is_told_and_it_may_go_on(
    agents: list[Agent], program: Path, standard: Packed, incoming: dict[str, Any], tmp_path: Path
) -> None:
    """A process that is stopped stands for one whose disk does not answer."""
    impatient = tmp_path / "impatient.py"
    impatient.write_text(IMPATIENT.format(program=str(program)))
    whole = standard.path.read_bytes()
    incoming = {**incoming, "size": len(whole)}
    agent = waiting(agents, impatient, standard, incoming, tmp_path)
    # All but the end of the last frame, which the children wait for.
    Path(incoming["target"]).write_bytes(whole[:-2_000])
    children = Path(f"/proc/{agent.process.pid}/task/{agent.process.pid}/children")
    assert until(lambda: len(children.read_text().split()) > 0)
    stopped = int(children.read_text().split()[0])
    os.kill(stopped, signal.SIGSTOP)
    with Path(incoming["target"]).open("ab") as file:
        file.write(whole[-2_000:])
    agent.tell(b"go\n")
    event = agent.event()
    assert event["event"] == "heartbeat"
    assert f"(pid {stopped}, stopped, state T in " in event["hung"]
    assert event["seconds"] >= 1.0
    os.kill(stopped, signal.SIGCONT)
    while event["event"] == "heartbeat":
        event = agent.event()
    assert event["ok"]
    assert agent.end() == 0
