"""A terminal, a pager or a pipe that stops reading: the job goes on, and its result is not lost."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.support.building import STAGER, Project
from tests.support.job_processes import find_node_programs
from tests.support.processes import start, until
from tests.support.small_torch import with_small_torch

TRAIN = """\
import pathlib, sys
for number in range(int(sys.argv[1])):
    print(f"{number:<99}")
sys.stdout.flush()
pathlib.Path("done").touch()
"""
LINES = 300_000
"""Lines of 100 bytes, more than is held for a reader."""


@pytest.fixture
def ready(project: Project) -> Project:
    """A project whose one rank prints much."""
    return with_small_torch(project, TRAIN)


@contextmanager
def running(project: Project, lines: int) -> Iterator[subprocess.Popen[str]]:
    """A job whose output nobody reads as yet."""
    argv = [*STAGER, "run", "--allocation", "local", "--log-dir", "logs", "--", "train.py"]
    started = start([*argv, str(lines)], cwd=project.root)
    try:
        yield started
    finally:
        started.kill()
        started.communicate()


def has_result(project: Project) -> bool:
    """Whether the file of the job's events is complete."""
    files = list((project.root / "logs").glob("events.*.jsonl"))
    return any('"event": "result"' in path.read_text() for path in files)


def test_ranks_and_logs_go_on_and_the_rest_is_shown_later(ready: Project) -> None:
    with running(ready, LINES) as started:
        assert until((ready.root / "done").exists), "the rank waits for the reader"
        assert until(lambda: has_result(ready))
        out, err = started.communicate(timeout=300)
    assert started.returncode == 0, err
    (log,) = (ready.root / "logs").glob("*.0.out")
    logged = [line.rstrip() for line in log.read_text().splitlines()]
    assert [line for line in logged if line.isdigit()] == [*map(str, range(LINES))]
    shown = [int(line) for line in out.split()]
    assert shown == sorted(set(shown))
    assert shown[-1] == LINES - 1
    skipped = re.findall(r"^  ([\d,]+) lines? not shown: the reader did not keep up", err, re.M)
    assert sum(int(count.replace(",", "")) for count in skipped) == LINES - len(shown) > 0
    assert "done: 1 rank" in err


def test_the_result_comes_from_the_file_where_the_driver_has_not_waited(ready: Project) -> None:
    with running(ready, 30_000) as started:
        assert until(lambda: has_result(ready))
        (driver,) = find_node_programs(ready, "drive")
        os.kill(driver, signal.SIGKILL)  # as it ends by itself after a minute
        out, err = started.communicate(timeout=300)
    assert started.returncode == 0, err
    assert "done: 1 rank" in err
    assert out.split()[0] == "0"
    (events,) = (ready.root / "logs").glob("events.*.jsonl")
    assert json.loads(events.read_text().splitlines()[-1])["ok"] is True
