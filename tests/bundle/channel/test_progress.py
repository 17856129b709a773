"""What a node's heartbeats say that it hangs in."""

from __future__ import annotations

import dataclasses

from bundle.channel.agent_channel import HANG_SECONDS, TaskProgress
from bundle.system.processes import TaskState

WRITER = TaskState(999_999_999, "D", 5)  # no such process: its command and its wait are not known
LOOKS = 12


def looks(progress: TaskProgress, tasks: tuple[TaskState, ...], count: int) -> list[str]:
    """What is found in so many looks, over the time after which processes hang."""
    return [progress.find_hang(tasks, HANG_SECONDS / LOOKS) for _ in range(count)]


def test_a_hang_is_named_after_a_minute_and_not_before() -> None:
    progress = TaskProgress((WRITER,))
    found = looks(progress, (WRITER,), LOOKS)
    assert found == [""] * (LOOKS - 1) + ["a process (pid 999999999, state D)"]
    assert progress.still_seconds == HANG_SECONDS


def test_a_slow_disk_is_no_hang() -> None:
    """It answers shortly before the time is over, each time."""
    progress = TaskProgress((WRITER,))
    for switches in range(6, 9):
        assert looks(progress, (WRITER,), LOOKS - 1) == [""] * (LOOKS - 1)
        slow = dataclasses.replace(WRITER, switches=switches)
        assert progress.find_hang((slow,), HANG_SECONDS / LOOKS) == ""
        assert looks(progress, (slow,), LOOKS - 1) == [""] * (LOOKS - 1)
        assert progress.find_hang((WRITER,), HANG_SECONDS / LOOKS) == ""


def test_few_of_many_are_named() -> None:
    many = tuple(dataclasses.replace(WRITER, pid=10**9 + number) for number in range(5))
    *_, found = looks(TaskProgress(many), many, LOOKS)
    assert found.count("state D") == 3
    assert found.endswith("; and 2 more")
