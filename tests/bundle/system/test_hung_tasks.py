"""Processes that hang: a stopped one stands for one that waits in the kernel."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from bundle.system.processes import TaskState, made_progress, own_tasks
from tests.support.processes import until


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
    os.kill(child, signal.SIGSTOP)
    # It is shown as stopped a moment before it is shown where.
    until(lambda: any(task.pid == child and "state T in " in str(task) for task in own_tasks()))
    tasks = {task.pid: task for task in own_tasks()}  # other tests may have left children
    assert tasks[os.getpid()].state == "R"  # it has just looked
    assert f"(pid {child}, stopped, state T in " in str(tasks[child])


def test_a_program_that_was_started_does_not_count(child: int) -> None:
    """The launcher of the ranks, which has a session of its own, runs beside the unpacking."""
    started = os.fork()
    if not started:
        os.setsid()
        time.sleep(600)
    try:
        until(lambda: os.getsid(started) == started)
        found = {task.pid for task in own_tasks()}
        assert found >= {os.getpid(), child}
        assert started not in found
    finally:
        os.kill(started, signal.SIGKILL)
        os.waitpid(started, 0)


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
    assert made_progress((WAITS, before), (WAITS, now)) is progress
