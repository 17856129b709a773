"""A store that may only be read: what was built there is checked and run all the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.building import STAGER, Project
from tests.support.namespaces import entering
from tests.support.processes import run
from tests.support.small_torch import with_small_torch


@pytest.fixture
def built(project: Project) -> Project:
    """A project whose bundle is there, and that no job has used yet."""
    return with_small_torch(project, 'print("trained")\n')


def contents(root: Path) -> dict[Path, int]:
    return {path: path.lstat().st_mtime_ns for path in root.rglob("*")}


@pytest.mark.parametrize("command", ["verify", "run", "exec"])
def test_a_bundle_is_used_from_a_store_that_is_mounted_read_only(
    command: str, built: Project, tmp_path: Path
) -> None:
    store = built.store.root
    before = contents(store)
    job = ["--allocation", "local", "--json", "--log-dir", str(tmp_path / "logs")]
    argv = {
        "verify": [*STAGER, "verify", *job],
        "run": [*STAGER, "run", *job, "--", "train.py"],
        "exec": [*STAGER, "exec", "--", "python", "-c", "print('{\"ok\": true}')"],
    }[command]
    mounted = f"mount --bind '{store}' '{store}'; mount -o remount,ro,bind '{store}'"
    done = run([*entering("-m", mounted), *argv], cwd=built.root)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["ok"]
    assert contents(store) == before
