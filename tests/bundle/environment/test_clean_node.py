"""A node cleans itself: by age and size, each user's files with that user's rights only."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest

import bundle.environment.clean as clean_node_module
from bundle.environment.clean import Retention, clean_node
from bundle.environment.unpack import hold, lock_path
from bundle.node.node_root import env_path, node_root_name, secure_root
from bundle.protocol.messages import NodeCleanup
from tests.support.namespaces import REPO
from tests.support.needs import needs

IDS = ["a" * 64, "b" * 64, "c" * 64]
DAY = 86400.0


def make_root(base: Path, owner: int = os.geteuid(), size: int = 1000) -> Path:
    """A node root with three environments: used now, two days ago, and ten days ago."""
    root = Path(secure_root(str(base), owner))
    for name in IDS:
        environment, lock = Path(env_path(str(root), name)), Path(lock_path(str(root), name))
        environment.mkdir()
        (environment / "data").write_bytes(bytes(size))
        lock.touch()
        for path in (environment / "data", environment, lock):
            os.chown(path, owner, owner)
    return aged(root)


def aged(root: Path) -> Path:
    for name, age in zip(IDS, (0.0, 2 * DAY, 10 * DAY), strict=True):
        for path in (env_path(str(root), name), lock_path(str(root), name)):
            os.utime(path, times=(time.time() - age,) * 2)
    return root


def environments(root: Path) -> list[str]:
    return sorted(path.name for path in (root / "envs").iterdir()) if root.exists() else []


def test_old_environments_go(tmp_path: Path) -> None:
    root = make_root(tmp_path)
    planned = clean_node([str(tmp_path)], Retention(days=7), dry_run=True)
    assert [name for name, _ in planned[0].removed] == IDS[2:]
    assert environments(root) == IDS
    (done,) = clean_node([str(tmp_path)], Retention(days=7), dry_run=False)
    assert (done.removed, done.freed) == (((IDS[2], 1000),), 1000)
    assert environments(root) == IDS[:2]


@pytest.mark.parametrize(("days", "left"), [(0.1, ["17.work"]), (6.9, ["17.work"]), (7.1, [])])
def test_results_that_were_not_brought_back_stay_as_long_as_environments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, days: float, left: list[str]
) -> None:
    root = make_root(tmp_path)
    (root / "jobs" / "17.work" / "checkpoint").mkdir(parents=True)
    later = types.SimpleNamespace(**vars(time))
    later.time = lambda: time.time() + days * DAY
    monkeypatch.setattr(clean_node_module, "time", later)
    clean_node([str(tmp_path)], Retention(days=7), dry_run=False)
    assert [path.name for path in root.glob("jobs/*")] == left


def test_a_limit_in_bytes_removes_those_not_used_for_longest(tmp_path: Path) -> None:
    root = make_root(tmp_path, size=1000)
    shared = Path(env_path(str(root), IDS[1])) / "shared"
    os.link(Path(env_path(str(root), IDS[0])) / "data", shared)  # counts once
    aged(root)
    clean_node([str(tmp_path)], Retention(days=30, bytes_a_user=2000), dry_run=False)
    assert environments(root) == IDS[:2]
    clean_node([str(tmp_path)], Retention(days=30, bytes_a_user=1999), dry_run=False)
    assert environments(root) == IDS[:1]


def test_what_is_in_use_stays_and_counts_as_used(tmp_path: Path) -> None:
    root = make_root(tmp_path)
    held = hold(str(root), IDS[2])
    try:
        (done,) = clean_node([str(tmp_path)], Retention(days=0), dry_run=False)
    finally:
        os.close(held)
    assert environments(root) == IDS[2:]
    assert done.kept == ((IDS[2], "in use"),)
    clean_node([str(tmp_path)], Retention(days=1), dry_run=False)
    assert environments(root) == IDS[2:], "to hold it was a use"


def test_the_nodes_of_a_local_allocation_count(tmp_path: Path) -> None:
    root = make_root(tmp_path)
    base = root / "nodes" / "local0"
    base.mkdir(parents=True)
    inner = make_root(base)
    clean_node([str(tmp_path)], Retention(days=7), dry_run=False)
    assert environments(inner) == environments(root) == IDS[:2]


def test_root_cleans_all_users_with_their_rights(tmp_path: Path) -> None:
    needs("root")
    tmp_path.chmod(0o1777)
    for parent in tmp_path.parents[:3]:
        parent.chmod(parent.stat().st_mode | 0o055)
    roots = [make_root(tmp_path, uid) for uid in (61001, 61002)]
    victim = tmp_path / "victim"
    victim.mkdir(mode=0o700)
    (victim / "file").write_text("root's own")
    planted = tmp_path / "stager-61003"
    planted.symlink_to(victim)  # a link in the place of a node root
    foreign = tmp_path / "stager-61004"
    foreign.mkdir()  # not that user's
    Path(env_path(str(roots[0]), IDS[2]), "out").symlink_to(victim)
    incoming = roots[1] / "incoming" / f"{IDS[1]}.1"
    incoming.symlink_to(victim)
    aged(roots[0])
    command = [sys.executable, "-m", "bundle", "clean-node", "--days", "7", str(tmp_path)]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == list(map(str, roots))
    assert [environments(root) for root in roots] == [IDS[:2]] * 2
    assert (victim / "file").read_text() == "root's own"
    assert foreign.is_dir()
    assert planted.is_symlink()


def test_a_user_cannot_lead_root_out_of_a_node_root(tmp_path: Path) -> None:
    """An environment belongs to a directory that its user may not change: root does not help."""
    needs("root")
    for parent in (tmp_path, *tmp_path.parents[:3]):
        parent.chmod(parent.stat().st_mode | 0o055)
    root = make_root(tmp_path, 61001)
    locked = Path(env_path(str(root), IDS[2]), "of-root")
    locked.mkdir(mode=0o700)
    (locked / "file").touch()
    aged(root)
    (done,) = clean_node([str(tmp_path)], Retention(days=7), dry_run=False)
    assert {problem.code for problem in done.problems} == {"not-removed"}
    assert any(path.name == "file" for path in root.rglob("file"))


def test_a_user_who_kills_the_process_keeps_out_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs("root")
    tmp_path.chmod(0o1777)
    for parent in tmp_path.parents[:3]:
        parent.chmod(parent.stat().st_mode | 0o055)
    roots = [make_root(tmp_path, uid) for uid in (61001, 61002)]
    real = clean_node_module._clean

    def killed(root: str, *rest: Any) -> NodeCleanup:
        if os.geteuid() == 61001:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(root, *rest)

    monkeypatch.setattr(clean_node_module, "_clean", killed)
    first, second = clean_node([str(tmp_path)], Retention(days=7), dry_run=False)
    assert [problem.values["why"] for problem in first.problems] == [
        "the process that cleans it was ended"
    ]
    assert second.problems == ()
    assert [environments(root) for root in roots] == [IDS, IDS[:2]]


@pytest.mark.parametrize("words", [["--json"], []])
def test_the_command(tmp_path: Path, words: list[str]) -> None:
    make_root(tmp_path)
    stager = Path(sys.executable).with_name("stager")
    command = [stager, "clean-node", "--days", "7", *words, tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    if words:
        assert json.loads(done.stdout)["bytes"] == 1000
    else:
        path = tmp_path / node_root_name()
        assert done.stdout == f"{path}: 1 environment, 1.0 kB freed, 2 items kept\n"
