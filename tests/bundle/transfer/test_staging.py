"""Unpacking what is sent: an agent as in a step of Slurm's, told to go on or not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
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
    """An agent that is ready for a file; its request is in a file already, and it hears us."""

    def __init__(self, program: Path, packed: Packed, root: Path, own: Path, **told: Any) -> None:
        self.target = root / "incoming" / "job-42.0" / "bundle.tar"
        self._base = root.parent
        self._reader = FrameReader()
        size = packed.path.stat().st_size
        job = job_for(packed, own, nodes=("n0", "n1"), bundle="/not/seen/here.tar")
        incoming = {"target": str(self.target), "manifest": None, "members": [], "size": size}
        request = {
            "job": job.to_json(),
            "nodes_here": 1,
            "root": str(root),
            "python": BASE_PYTHON,
            "incoming": {**incoming, **told},
        }
        path = own / "request.json"
        path.write_text(json.dumps({"v": 1, "phase": "unpack", "common": request, "own": {}}))
        with path.open() as handle:
            number = handle.fileno()
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-S", program, "agent", "unpack", "--request", str(number)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                env={**os.environ, **STEP}, pass_fds=[number],
            )  # fmt: skip
        event = self.event()
        assert (event["node"], event["event"], event["step"]) == ("n1", "ready", "42.7")

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

    def told(self, word: bytes) -> tuple[dict[str, Any], list[str]]:
        """What it says to a command, and the problems in that."""
        assert self.process.stdin is not None
        self.process.stdin.write(word)
        self.process.stdin.flush()
        event = self.event()
        return event, [problem["what"] for problem in event.get("problems", ())]

    def end(self, *, by_itself: bool = True) -> tuple[int, list[str]]:
        """Its status, after which it has said nothing more, and what is left on the node."""
        if by_itself:  # it stays until all that it has said is heard
            time.sleep(0.1)
            assert self.process.poll() is None
        out, err = self.process.communicate(timeout=300)  # which ends its standard input
        assert (out.replace(heartbeat("n1:3"), b""), err) == (b"", b"")
        return self.process.returncode, left_over(self._base)


@pytest.fixture
def waiting(program: Path, root: Path, tmp_path: Path) -> Iterator[Callable[..., Agent]]:
    """Start an agent for a bundle; by default it will be sent all of it."""
    made: list[Agent] = []

    def start(packed: Packed, program: Path = program, **told: Any) -> Agent:
        made.append(Agent(program, packed, root, tmp_path, **told))
        return made[-1]

    yield start
    for agent in made:
        agent.process.kill()
        agent.process.wait()


def test_what_was_sent_is_unpacked_and_does_not_stay(
    waiting: Callable[..., Agent], single: Packed
) -> None:
    agent = waiting(single)
    agent.target.write_bytes(single.path.read_bytes())
    event, _ = agent.told(b"go\n")
    assert (event["ok"], event["reused"], event["event"]) == (True, False, "unpack")
    assert os.path.isdir(event["path"])
    assert agent.end() == (0, [f"envs/{single.manifest.id}"])


@pytest.mark.parametrize(("arrived", "more"), [(1000, {}), (0, {"size": 1 << 60})])
def test_where_the_sending_failed_it_is_told_how_much_came(
    waiting: Callable[..., Agent], single: Packed, arrived: int, more: dict[str, int]
) -> None:
    """Of a disk that is full Slurm says no more than ``Unspecified error``."""
    agent = waiting(single, **more)
    if arrived:
        agent.target.write_bytes(single.path.read_bytes()[:arrived])
    event, whats = agent.told(b"stop\n")
    assert (event["ok"], whats) == (False, ["the bundle could not be sent"])
    size = more.get("size", single.path.stat().st_size)
    why = event["problems"][0]["why"]
    assert why.startswith(f"{arrived} of {size} bytes had arrived")
    assert why.endswith(" are free") == bool(more)
    assert agent.end() == (3, [])


def test_a_file_that_is_cut_is_not_unpacked(waiting: Callable[..., Agent], single: Packed) -> None:
    agent = waiting(single)
    agent.target.write_bytes(single.path.read_bytes()[:-1])
    assert agent.told(b"go\n")[1] == ["the bundle is damaged or not a bundle"]
    assert agent.end() == (3, [])


def test_a_driver_that_goes_away_leaves_nothing_behind(
    waiting: Callable[..., Agent], single: Packed
) -> None:
    agent = waiting(single)
    agent.target.write_bytes(single.path.read_bytes()[:1000])
    time.sleep(0.2)
    assert agent.end(by_itself=False) == (143, [])


def test_a_part_that_is_not_enough_is_told_as_such(
    waiting: Callable[..., Agent], standard: Packed, tmp_path: Path
) -> None:
    """The older environment that had the rest has gone meanwhile."""
    manifest = standard.manifest
    names = [name for name, _ in manifest.layers[0].members]
    agent = waiting(standard, manifest=manifest.to_bytes().decode(), members=names)
    with BundleFile(str(standard.path)) as bundle:
        write_excerpt(bundle, names, str(tmp_path / "parts.tar"))
    (tmp_path / "parts.tar").rename(agent.target)
    event, whats = agent.told(b"go\n")
    assert (event["ok"], event["lacking"]) == (False, True)
    assert whats == ["a part of the environment is missing"]
    assert agent.end()[0] == 3
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


def test_what_a_node_hangs_in_is_told_and_it_may_go_on(
    waiting: Callable[..., Agent], program: Path, standard: Packed, tmp_path: Path
) -> None:
    """A process that is stopped stands for one whose disk does not answer."""
    impatient = tmp_path / "impatient.py"
    impatient.write_text(IMPATIENT.format(program=str(program)))
    whole = standard.path.read_bytes()
    agent = waiting(standard, impatient)
    # All but the end of the last frame, which the children wait for.
    agent.target.write_bytes(whole[:-2_000])
    children = Path(f"/proc/{agent.process.pid}/task/{agent.process.pid}/children")
    assert until(lambda: len(children.read_text().split()) > 0)
    stopped = int(children.read_text().split()[0])
    os.kill(stopped, signal.SIGSTOP)
    with agent.target.open("ab") as file:
        file.write(whole[-2_000:])
    event, _ = agent.told(b"go\n")
    assert event["event"] == "heartbeat"
    assert f"(pid {stopped}, stopped, state T in " in event["hung"]
    assert event["seconds"] >= 1.0
    os.kill(stopped, signal.SIGCONT)
    while event["event"] == "heartbeat":
        event = agent.event()
    assert event["ok"]
    assert agent.end()[0] == 0
