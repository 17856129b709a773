"""A job whose ranks compute: its driver and its agents leave them the processors."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.support.building import STAGER, Project
from tests.support.processes import start, until
from tests.support.small_torch import with_small_torch

SECONDS = 6
TRIES = 5
TRAIN = "import pathlib, time; pathlib.Path('begun').touch(); time.sleep(600)"


@pytest.fixture
def ready(project: Project) -> Project:
    """A project whose rank neither prints nor ends."""
    return with_small_torch(project, TRAIN)


def switches(store: Path) -> dict[tuple[str, int], int]:
    """How often each thread of the driver and of agents has waited for something."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
            role = next((role for role in (b"drive", b"agent") if role in words), None)
            if role is None or not any(word.startswith(os.fsencode(store)) for word in words):
                continue
            for thread in (entry / "task").iterdir():
                status = (thread / "status").read_text().splitlines()
                counts = [line.split()[1] for line in status if line.startswith("voluntary")]
                found[role.decode(), int(thread.name)] = int(counts[0])
        except OSError:  # it has ended meanwhile
            continue
    return found


@pytest.mark.full
def test_nobody_wakes_up_often_for_nothing(ready: Project) -> None:
    argv = [*STAGER, "run", "--allocation", "local", "--log-dir", "logs", "--", "train.py"]
    running = start(argv, cwd=ready.root)
    try:
        assert until((ready.root / "begun").exists)
        time.sleep(2)
        for _ in range(TRIES):  # a machine that has just become busy makes them wait for it
            begun, before = time.monotonic(), switches(ready.store.root)
            time.sleep(SECONDS)
            after = switches(ready.store.root)
            took = time.monotonic() - begun
            often = {thread: count - before.get(thread, 0) for thread, count in after.items()}
            if max(often.values()) < 2 * took:
                break
    finally:
        running.terminate()
        running.communicate(timeout=300)
    assert {role for role, _ in before} == {"drive", "agent"}
    # Once a second each; some more for whatever the kernel lets them wait for.
    assert max(often.values()) < 2 * took, often
