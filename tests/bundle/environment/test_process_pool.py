"""Forked workers: every task is done once, every failure is told, nobody is left behind."""

import fcntl
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bundle.environment.process_pool import run_tasks
from bundle.protocol.problem import NodeError
from tests.support.namespaces import REPO
from tests.support.needs import needs
from tests.support.problems import worded
from tests.support.processes import until

PROBLEM = worded("it is broken", "/some/where", "because", "mend it")


def noting(path: Path) -> Callable[[int], None]:
    """Work that appends its number and process to a file; the kernel keeps each line whole."""

    def work(number: int) -> None:
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(handle, f"{number} {os.getpid()}\n".encode())
        os.close(handle)

    return work


def noted(path: Path) -> list[tuple[int, int]]:
    lines = path.read_text().splitlines() if path.exists() else []
    return [(int(number), int(pid)) for number, pid in map(str.split, lines)]


def children() -> set[str]:
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Every worker is gone, and waited for, and no descriptor is open, whatever happened."""
    before = children(), len(os.listdir("/proc/self/fd"))
    yield
    assert (children(), len(os.listdir("/proc/self/fd"))) == before


@pytest.mark.parametrize(("count", "processes"), [(0, 4), (1, 4), (7, 1), (3, 16), (20000, 4)])
def test_every_task_is_done_once(tmp_path: Path, count: int, processes: int) -> None:
    run_tasks(count, noting(tmp_path / "log"), processes)
    done = noted(tmp_path / "log")
    assert sorted(number for number, _ in done) == list(range(count))
    workers = {pid for _, pid in done}
    assert len(workers) <= max(1, min(processes, count))
    assert (os.getpid() in workers) == (count > 0 and (processes <= 1 or count == 1))


@pytest.mark.parametrize("processes", [1, 3])
def test_a_task_that_fails_ends_all(tmp_path: Path, processes: int) -> None:
    def work(number: int) -> None:
        if number == 5:
            raise NodeError(PROBLEM)
        noting(tmp_path / "log")(number)
        if number > 5:
            time.sleep(600)  # it is ended in here

    with pytest.raises(NodeError) as caught:
        run_tasks(3000, work, processes)
    assert caught.value.problem == PROBLEM
    assert len(noted(tmp_path / "log")) < 5 + processes


def test_many_failures_at_once_are_one() -> None:
    """More is said than a pipe holds; nobody may wait for somebody who waits."""

    def work(number: int) -> None:
        raise NodeError(worded("w" * 700, str(number), "y" * 100_000, "f" * 700))

    with pytest.raises(NodeError) as caught:
        run_tasks(50, work, 20)
    assert int(caught.value.problem.where) < 50
    assert len(caught.value.problem.why) == 100_000


def test_a_killed_child_is_told(tmp_path: Path) -> None:
    def work(number: int) -> None:
        if number == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.002)

    with pytest.raises(NodeError, match="was killed; signal 9; usually the node ran out of memory"):
        run_tasks(1000, work, 3)


def test_a_child_that_is_told_to_end_does(tmp_path: Path) -> None:
    """With a handler like the agent's, which raises what is no Exception."""

    class Stopped(BaseException):
        pass

    def stop(number: int, frame: object) -> None:
        raise Stopped

    def work(number: int) -> None:
        if number == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(600)  # the other one is ended in here

    before = signal.signal(signal.SIGTERM, stop)
    try:
        with pytest.raises(NodeError, match="an unpacking process ended; exit status 1"):
            run_tasks(1000, work, 2)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_an_unexpected_error_is_told_too(capfd: pytest.CaptureFixture[str]) -> None:
    def work(number: int) -> None:
        if number == 2:
            raise ZeroDivisionError("by no one")
        time.sleep(0.005)

    with pytest.raises(NodeError, match="ZeroDivisionError: by no one"):
        run_tasks(1000, work, 2)
    assert "Traceback" in capfd.readouterr().err  # a fault of ours: all of it is wanted


def test_a_pipe_of_one_page_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the kernel gives to a user who has very many pipes, see pipe(7)."""
    real = os.pipe

    def small() -> tuple[int, int]:
        ends = real()
        fcntl.fcntl(ends[1], 1031, 4096)  # F_SETPIPE_SZ, which Python 3.9 has no name for
        return ends

    monkeypatch.setattr(os, "pipe", small)
    signal.alarm(900)  # a pipe that is full would be waited for without end
    try:
        run_tasks(5_000, noting(tmp_path / "log"), 2)
    finally:
        signal.alarm(0)
    assert len(noted(tmp_path / "log")) == 5_000


def test_without_processes_to_start_the_work_is_done_here(tmp_path: Path) -> None:
    needs("root")  # to become somebody whom the limit counts for
    said, say = os.pipe()
    child = os.fork()
    if not child:
        os.setresuid(65534, 65534, 65534)
        resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
        pid = os.getpid()
        run_tasks(
            50, lambda number: os.write(say, b"1" if os.getpid() == pid else b"0") and None, 4
        )
        os._exit(0)
    os.close(say)
    assert os.waitpid(child, 0)[1] == 0
    with os.fdopen(said) as answer:
        assert answer.read() == "1" * 50


def test_children_that_wait_end_with_their_parent(tmp_path: Path) -> None:
    """For bytes of a bundle, for example, that nobody brings any more."""
    begun = tmp_path / "begun"
    begun.mkdir()
    code = f"""
import os, sys, time
sys.path.insert(0, {str(REPO)!r})
from bundle.environment.process_pool import run_tasks
def work(number):
    open({str(begun)!r} + "/" + str(os.getpid()), "w").close()
    time.sleep(600)
run_tasks(2, work, 2)
"""
    parent = subprocess.Popen([sys.executable, "-c", code])
    assert until(lambda: len(os.listdir(begun)) == 2, pause=0.01)
    parent.kill()
    parent.wait()
    children = os.listdir(begun)
    gone = until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children), pause=0.01)
    assert gone, "children of a killed parent wait for ever"


def test_the_exit_status_of_another_child_is_left_to_its_parent(tmp_path: Path) -> None:
    """Of a launcher, for example, that was started before."""
    other = subprocess.Popen([sys.executable, "-c", "raise SystemExit(7)"])
    os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and stays
    run_tasks(20, noting(tmp_path / "done"), 3)
    assert other.wait() == 7
    assert sorted(number for number, _ in noted(tmp_path / "done")) == list(range(20))


@pytest.mark.parametrize("processes", [1, 3])
def test_children_let_others_go_first_where_that_is_asked_for(
    tmp_path: Path, processes: int
) -> None:
    own = os.nice(0)

    def work(number: int) -> None:
        (tmp_path / str(number)).write_text(str(os.nice(0)))

    run_tasks(4, work, processes, niceness=3)
    assert {(tmp_path / str(number)).read_text() for number in range(4)} == {str(own + 3)}
    assert os.nice(0) == own
