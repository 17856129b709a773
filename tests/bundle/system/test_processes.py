"""Starting and ending real processes, and looking in /proc for what is left of them."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bundle.system import processes
from bundle.system.processes import TaskState, has_progress, list_own_tasks
from tests.support.processes import is_alive, until

REPO = Path(__file__).resolve().parents[3]


def wait_for(path: Path) -> str:
    """The content of a file as soon as it has a line."""
    assert until(lambda: path.exists() and path.read_text().endswith("\n"), pause=0.02)
    return path.read_text()


def python(code: str, *args: str) -> list[str]:
    return [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(REPO)!r})\n{code}", *args]


def test_run_returns_what_was_written(tmp_path: Path) -> None:
    argv = ["/bin/sh", "-c", 'cat; pwd; echo "$A-$HOME" >&2']
    done = processes.run(argv, timeout=300, env={"A": "é"}, cwd=str(tmp_path), input="in\n")
    assert done == processes.CompletedCommand(tuple(argv), 0, f"in\n{tmp_path}\n", "é-\n")
    assert processes.run(["cat"], timeout=300).stdout == ""
    failing = ["/bin/sh", "-c", "seq 100 >&2; exit 3"]
    with pytest.raises(processes.ProcessError, match="exit status 3") as caught:
        processes.run(failing, timeout=300)
    assert (caught.value.argv, caught.value.code) == (tuple(failing), 3)
    assert caught.value.tail == tuple(str(n) for n in range(86, 101))
    assert processes.run(failing, timeout=300, check=False).returncode == 3


def test_a_program_that_is_not_there_or_that_a_signal_ends(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each command is logged before it runs."""
    caplog.set_level(logging.DEBUG, logger="bundle.system.processes")
    with pytest.raises(processes.ProcessError, match="No such file") as caught:
        processes.run(["/no/such program"], timeout=300)
    assert caught.value.code is None
    assert caplog.messages == ["start: '/no/such program'"]
    with pytest.raises(processes.ProcessError, match="ended by SIGSEGV"):
        processes.run(["/bin/sh", "-c", "kill -SEGV $$"], timeout=300)


def test_a_timeout_ends_grandchildren_that_hold_the_pipes(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    code = f"trap '' TERM; setsid sleep 300 & echo $! > {note}; echo at work >&2; sleep 300"
    for seconds in (1, 20, 200):  # as long as it takes until the program is at work
        with pytest.raises(processes.ProcessError) as caught:
            processes.run(["/bin/sh", "-c", code], timeout=seconds)
        assert caught.value.reason == f"took more than {seconds} s"
        if caught.value.tail:
            break
    assert caught.value.tail == ("at work",)
    assert not is_alive(int(note.read_text()))


def test_stop_lets_a_process_end_by_itself(tmp_path: Path) -> None:
    note = tmp_path / "ready"
    code = f"trap 'exit 7' TERM; echo y > {note}; while :; do sleep 0.05; done"
    started = processes.start(["/bin/sh", "-c", code])
    wait_for(note)
    assert processes.stop(started, grace=300) == 7


@pytest.mark.parametrize("grace", [0.5, 0.0])
def test_stop_kills_what_does_not_heed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, grace: float
) -> None:
    """Although the machine stood still for as long as it would wait for that end."""
    if not grace:
        monkeypatch.setattr(processes, "_KILL_SECONDS", -1.0)
    note = tmp_path / "pid"
    code = f"trap '' TERM; sleep 300 & echo $! > {note}; wait; sleep 300"
    started = processes.start(["/bin/sh", "-c", code])
    child = int(wait_for(note))
    before = time.monotonic()
    assert processes.stop(started, grace=grace) == -signal.SIGKILL
    assert grace <= time.monotonic() - before < 120
    assert not is_alive(child)


def test_stop_ends_what_a_dead_leader_left_behind_and_nothing_else(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    code = f"setsid sleep 300 >/dev/null 2>&1 & echo $! > {note}; exit 5"
    started, other = processes.start(["/bin/sh", "-c", code]), processes.start(["sleep", "300"])
    worker = int(wait_for(note))
    assert started.wait(300) == 5
    assert is_alive(worker)
    assert processes.stop(started, grace=5) == 5
    assert not is_alive(worker)
    assert is_alive(other.pid)
    assert processes.stop(other, grace=5) == -signal.SIGTERM


def test_stop_reaches_through_an_agent_that_was_killed(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    worker_code = f"trap '' TERM; echo $$ > {note}; while :; do sleep 0.1; done"
    agent = processes.start(
        python(
            "import time; from bundle.system import processes\n"
            f"processes.start(['/bin/sh', '-c', {worker_code!r}], env={{}})\n"
            "time.sleep(300)"
        )
    )
    worker = int(wait_for(note))
    agent.kill()
    agent.wait(300)
    assert is_alive(worker)
    assert processes.stop(agent, grace=0.2) == -signal.SIGKILL
    assert not is_alive(worker)


def test_a_process_ends_with_the_one_that_started_it(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    parent = subprocess.Popen(
        python(
            "import time; from pathlib import Path; from bundle.system import processes\n"
            "child = processes.start(['sleep', '300'])\n"
            f"Path({str(note)!r}).write_text(f'{{child.pid}}\\n'); time.sleep(300)"
        )
    )
    child = int(wait_for(note))
    assert is_alive(child)
    parent.kill()
    parent.wait(300)
    assert until(lambda: not is_alive(child), pause=0.02)


def test_a_lock_that_a_signal_left_closed_holds_nothing_up() -> None:
    """As it is when a handler raises within ``Popen.poll``, just behind the taking of its lock."""
    running = processes.start([sys.executable, "-c", "import time; time.sleep(604)"])
    running._waitpid_lock.acquire()  # type: ignore[attr-defined]
    assert running.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        running.wait(timeout=0.1)
    assert processes.stop(running, 5) == -signal.SIGTERM
    assert running.poll() == running.wait() == running.wait(timeout=1) == -signal.SIGTERM


@pytest.mark.parametrize("code", [0, 255])
def test_the_status_is_known_however_it_is_asked_for(code: int) -> None:
    argv = ["sh", "-c", f"exit {code}"]
    assert processes.start(argv).wait() == code
    assert processes.start(argv).wait(timeout=300) == code
    polled = processes.start(argv)
    assert until(lambda: polled.poll() is not None, pause=0.01)
    assert polled.returncode == code


ESCAPES = """\
import subprocess, sys
from pathlib import Path
left = subprocess.Popen(["env", "-i", "setsid", *sys.argv[2:]], stdout=subprocess.DEVNULL)
Path(sys.argv[1]).write_text(f"{left.pid}\\n")
"""
"""Leaves a process behind that is neither in its session nor has its variables."""


def adopting(code: str, *args: str) -> str:
    """What code writes that runs where orphans are adopted, which a test's own process is not."""
    begin = (
        "import os, sys, time\n"
        "from bundle.system import processes as descendants, processes\n"
        "descendants.adopt_orphans()\n"
    )
    argv = python(begin + code, *args)
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("heeds", [True, False])
def test_stop_ends_what_left_the_session_and_dropped_its_variables(
    heeds: bool, tmp_path: Path
) -> None:
    note = tmp_path / "pid"
    left = ["sleep", "300"] if heeds else ["sh", "-c", "trap '' TERM; sleep 300; sleep 300"]
    started = python(ESCAPES, str(note), *left)
    said = adopting(
        "from pathlib import Path\n"
        "one, other = processes.start(sys.argv[1:]), processes.start(['sleep', '300'])\n"
        "forked = os.fork()\n"
        "if not forked: time.sleep(300)\n"
        "one.wait()\n"
        "begun = time.monotonic()\n"
        "processes.stop(one, 600 if " + str(heeds) + " else 0.2)\n"
        f"left = int(Path({str(note)!r}).read_text())\n"
        "print(time.monotonic() - begun < 300, Path(f'/proc/{left}').exists(), end=' ')\n"
        "print(other.poll(), os.waitpid(forked, os.WNOHANG))\n"
        "processes.stop(other, 5); os.kill(forked, 9)",
        *started,
    )
    assert said == "True False None (0, 0)\n"


def test_orphans_that_end_by_themselves_are_reaped(tmp_path: Path) -> None:
    started = python(ESCAPES, str(tmp_path / "pid"), "true")
    said = adopting(
        "ended = processes.start(['true'])\n"
        "for _ in range(3): processes.start(sys.argv[1:]).wait()\n"
        "until = time.monotonic() + 120\n"
        "def children(): return open(f'/proc/self/task/{os.getpid()}/children').read().split()\n"
        "while ended.poll() is None: time.sleep(0.01)\n"
        "while children() and time.monotonic() < until:\n"
        "    descendants.reap_orphans()\n"
        "    time.sleep(0.01)\n"
        "print(children(), ended.returncode)",
        *started,
    )
    assert said == "[] 0\n"


@pytest.fixture
def child() -> Iterator[int]:
    """A forked child that sleeps."""
    pid = os.fork()
    if not pid:
        time.sleep(600)
        os._exit(0)
    yield pid
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def test_a_stopped_child_is_named_with_its_command(child: int) -> None:
    """And a program that was started does not count: it has a session of its own."""
    launcher = processes.start(["sleep", "600"])
    os.kill(child, signal.SIGSTOP)

    def tasks() -> dict[int, str]:  # other tests may have left children
        return {task.pid: str(task) for task in list_own_tasks()}

    # It is shown as stopped a moment before it is shown where.
    assert until(lambda: f"(pid {child}, stopped, state T in " in tasks().get(child, ""))
    assert tasks()[os.getpid()].endswith(f"(pid {os.getpid()}, R)")  # it has just looked
    assert launcher.pid not in tasks()
    processes.stop(launcher, 5)


WAITS = TaskState(1, "S", 10)


@pytest.mark.parametrize(
    ("before", "now", "progress"),
    [
        (TaskState(2, "D", 5), TaskState(2, "D", 5), False),
        (TaskState(2, "D", 5), TaskState(2, "D", 6), True),  # a slow disk
        (TaskState(2, "T", 5), TaskState(2, "T", 5), False),
        (TaskState(2, "R", 5), TaskState(2, "R", 5), True),  # alone on its processor
        (TaskState(2, "S", 5), TaskState(2, "S", 5), True),  # waits for another job's lock
        (TaskState(2, "D", 5), TaskState(3, "D", 5), True),  # another one has begun
    ],
)
def test_progress(before: TaskState, now: TaskState, *, progress: bool) -> None:
    assert has_progress((WAITS, before), (WAITS, now)) is progress
