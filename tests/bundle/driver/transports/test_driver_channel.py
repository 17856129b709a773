"""Talking with a step: real processes that write much, read slowly, ignore us or linger."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress

import pytest

from bundle.driver.transports import driver_channel, slurm_text
from bundle.driver.transports.driver_channel import DriverChannel
from bundle.driver.transports.ssh import SshErrors
from bundle.driver.transports.ssh_fanout import REPORT_PREFIX
from bundle.driver.transports.step_transport import describe_ends
from bundle.protocol.problem import ProblemCode
from bundle.system import processes
from tests.support.processes import living


class Heard:
    """What came, and a way to wait for it."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []

    def __call__(self, source: str, line: str) -> None:
        self.lines.append((source, line))

    def until(self, step: DriverChannel, count: int) -> None:
        self._pump(step, lambda: len(self.lines) >= count)

    def to_the_end(self, step: DriverChannel) -> None:
        self._pump(step, lambda: step.has_ended)

    def _pump(self, step: DriverChannel, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + 300
        while not condition():
            assert time.monotonic() < end, self.lines
            step.pump(self)


def started(code: str, opening: bytes = b"") -> DriverChannel:
    """Talk with a Python program that stands for srun."""
    return DriverChannel([sys.executable, "-c", code], os.environ, opening, slurm_text)


FRAME = "print('\\x1en1:0 0 0 - . ' + {}, flush=True)\n"


def test_a_talk_from_beginning_to_end() -> None:
    code = (
        "import sys\n" + FRAME.format("sys.stdin.readline().strip()") + "print('odd', flush=True)\n"
        "print('srun: error: n1: task 0: Exited with exit code 3', file=sys.stderr, flush=True)\n"
        + FRAME.format("sys.stdin.readline().strip()")
        + "sys.exit(3)\n"
    )
    heard = Heard()
    with started(code, b"opening\n") as step:
        assert (step.code, step.errors, step.faults) == (0, "", {})
        heard.until(step, 1)
        assert not step.has_ended
        step.send_line("go")
        heard.to_the_end(step)
        assert step.code == 3
        assert step.faults["n1"].values == {"why": "task 0: Exited with exit code 3"}
        assert step.pop_losses() == ({}, ["odd"])
    assert heard.lines == [("n1:0", "opening"), ("n1:0", "go")]


def test_a_large_opening_to_one_that_writes_first_and_reads_slowly() -> None:
    """Neither waits for the other: it would be for ever."""
    code = (
        "import os, sys, time\n"
        "for n in range(30_000): print(f'\\x1en1:0 0 0 - . line {n}')\n"
        "sys.stdout.flush()\n"
        "count = 0\n"
        "while count < 3_000_000:\n"
        "    count += len(os.read(0, 50_000)); time.sleep(0.002)\n" + FRAME.format("str(count)")
    )
    heard = Heard()
    with started(code, b"x" * 3_000_000) as step:
        heard.to_the_end(step)
        assert step.code == 0
    assert heard.lines == [("n1:0", f"line {n}") for n in range(30_000)] + [("n1:0", "3000000")]


def test_one_that_reads_nothing_and_ends_has_its_last_words_kept() -> None:
    code = "import sys\nsys.stderr.write('a' * 300_000 + 'the last word')\nsys.exit(4)"
    with started(code, b"x" * 3_000_000) as step:
        Heard().to_the_end(step)
        step.send_line("go")  # nobody hears it any more
        step.pump(Heard())
        assert step.code == 4
        assert step.errors.endswith("the last word")
        assert len(step.errors) == 1 << 18


def test_the_end_of_its_standard_input_ends_it() -> None:
    code = "import sys\nsys.stdin.read()\n" + FRAME.format("'goodbye'") + "sys.exit(7)\n"
    heard = Heard()
    with started(code) as step:
        began = time.monotonic()
        step.finish(heard, 600)
        assert time.monotonic() - began < 300
        assert (step.has_ended, step.code) == (True, 7)
    assert heard.lines == [("n1:0", "goodbye")]


def test_one_that_ignores_all_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_channel, "_AFTER_SECONDS", 0.5)
    code = (
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        + FRAME.format("'deaf'")
        + "time.sleep(605)\n"
    )
    heard = Heard()
    with started(code) as step:
        heard.until(step, 1)
        began = time.monotonic()
        step.finish(heard, 0.5)
        assert time.monotonic() - began < 300
        assert (step.has_ended, step.code) == (True, -9)
    assert living("sleep(605)") == []


def test_nodes_that_a_stopped_step_said_nothing_of_follow_the_one_it_named() -> None:
    """What they would have said is not known, so no fault is theirs where another one has one."""
    end = {"host": "n3", "status": 255, "begun": True, "slow": False, "said": ["it broke"]}
    code = (
        "import sys, time\n"
        + f"print({REPORT_PREFIX + json.dumps(end)!r}, file=sys.stderr, flush=True)\n"
        + FRAME.format("'heard'")
        + "time.sleep(604)\n"
    )
    heard, asked = Heard(), {"n2": {}, "n3": {}}
    with DriverChannel([sys.executable, "-c", code], os.environ, b"", SshErrors()) as step:
        heard.until(step, 1)
        step.finish(heard, 0.5)
        ended = describe_ends(asked, step, SshErrors())
    assert ended["n3"].problem == ProblemCode.SSH_CONNECTION_LOST
    assert ended["n2"].problem == ProblemCode.NO_ANSWER_FOLLOWED
    assert ended["n2"].values == {"first": "n3"}


def test_an_agent_that_was_ended_for_a_rank_of_another_node_follows_it() -> None:
    """The other node's agent has answered for its ranks, and Slurm says nothing of it."""
    for words in ("Exited with exit code 143", "Terminated"):
        with started(f"import sys; sys.exit('srun: error: n2: task 1: {words}')") as step:
            Heard().to_the_end(step)
            alone = describe_ends({"n2": {}}, step, slurm_text)
            ended = describe_ends({"n2": {}}, step, slurm_text, {"n1": None})
        assert alone["n2"].problem != ProblemCode.NO_ANSWER_FOLLOWED
        assert ended["n2"].problem == ProblemCode.NO_ANSWER_FOLLOWED
        assert ended["n2"].values == {"first": "n1"}


def test_a_pipe_that_another_keeps_open_does_not_keep_us(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_channel, "_AFTER_SECONDS", 1.0)
    code = (
        "import os, sys\n"
        "print('\\x1en1:0 0 0 - . begun', flush=True)\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        f"    os.environ.pop({processes.MARK!r})\n"
        "    argv = [sys.executable, '-c', 'import time; time.sleep(240.4)']\n"
        "    os.execve(argv[0], argv, dict(os.environ))\n"
    )
    heard = Heard()
    try:
        with started(code) as step:
            heard.until(step, 1)
            time.sleep(0.5)
            assert not step.has_ended  # something might still come
            began = time.monotonic()
            step.finish(heard, 0.5)
            assert time.monotonic() - began < 120
            assert step.has_ended
    finally:
        for line in living("time.sleep(240.4)"):
            assert "sleep" in line  # it ends by itself in a while


def test_leaving_the_block_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Politely first, whatever the block raised."""
    monkeypatch.setattr(driver_channel, "_KILL_SECONDS", 300.0)
    before = set(os.listdir("/proc/self/fd"))
    code = "import sys\nsys.stdin.read()\nimport time\ntime.sleep(0.1)\n"
    with suppress(RuntimeError), started(code) as step:
        raise RuntimeError("in the middle")
    assert step.code == 0
    del step
    assert set(os.listdir("/proc/self/fd")) == before
    with pytest.raises(processes.ProcessError):
        DriverChannel(["/no/such/srun"], os.environ, b"", slurm_text)


def test_a_step_that_says_nothing_is_waited_for_a_second_at_a_time() -> None:
    """A driver does so for as long as the ranks compute."""
    with started("import sys; sys.stdin.read()") as step:
        step.pump(Heard())  # nothing is left to send
        began = time.monotonic()
        step.pump(Heard())
        assert time.monotonic() - began > 0.9


def test_each_message_of_a_node_and_each_heartbeat_is_a_sign_of_life() -> None:
    """A heartbeat is no message; of a node that has never sent anything nothing is known."""
    code = (
        "import sys, time\n"
        "beat = '\\x1en{}:{} 0 0 - . \\n'\n"
        "print(beat.format(1, 0) + beat.format(2, 0), end='', flush=True)\n"
        "time.sleep(0.5)\n" + FRAME.format("'said'") + "sys.stdin.read()\n"
    )
    heard = Heard()
    with started(code) as step:
        assert not step.heartbeats.has_begun()
        heard.until(step, 1)
        assert heard.lines == [("n1:0", "said")]
        assert step.heartbeats.silence("n2") > 0.4 + step.heartbeats.silence("n1")
        assert step.heartbeats.has_begun("n2")
        assert not step.heartbeats.has_begun("n3")
