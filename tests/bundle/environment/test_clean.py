"""Cleaning a node root: what nobody uses goes, what is in use stays, nothing outside is touched."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import bundle.environment.clean as clean_node_module
from bundle.environment.clean import NOT_OURS, Retention, clean, clean_node, list_node_roots
from bundle.environment.unpack import hold_environment, lock_path
from bundle.node.node_root import SUBDIRECTORIES, env_path, hold_root, take_lock
from bundle.protocol.messages import NodeCleanup
from bundle.protocol.problem import NodeError, ProblemCode
from stager.pack.bundle import Packed
from tests.support.bundles import BASE_PYTHON, CLEAN, OWN, Pair, left_over, run_node, stage, tree
from tests.support.namespaces import REPO, namespace
from tests.support.needs import needs
from tests.support.processes import until


def unpack(bundle: Packed, base: Path) -> Path:
    return Path(stage(bundle, base).path)


@contextlib.contextmanager
def running(argv: Sequence[object], cwd: Path | None = None) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(list(map(str, argv)), env=CLEAN, cwd=cwd) as process:
        try:
            yield process
        finally:
            process.kill()


def size_of(*folders: Path) -> int:
    """Bytes of the files below, each counted once whatever its number of names."""
    files = [path for folder in folders for path in folder.rglob("*")]
    sizes = {p.lstat().st_ino: p.lstat().st_size for p in files if p.is_symlink() or p.is_file()}
    return sum(sizes.values())


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that other users can reach; pytest closes its own whenever another pytest begins."""
    with tempfile.TemporaryDirectory(prefix="stager-test-", dir="/var/tmp") as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder


# --- environments --------------------------------------------------------------------------------


def test_only_what_is_to_be_kept_stays(single: Packed, pair: Pair, base: Path) -> None:
    first, second = unpack(single, base), unpack(pair[0], base)
    before, size = tree(second), size_of(first)
    root = base / OWN
    would = clean(str(root), [second.name], True)
    assert (first.is_dir(), would.removed) == (True, ((first.name, size),))
    done = clean(str(root), [second.name], False)
    assert done == would
    assert done.kept == ((second.name, "to be kept"),)
    assert (done.freed, done.problems, done.gone) == (size, (), False)
    assert tree(second) == before
    assert left_over(base) == [f"envs/{second.name}"]
    locks = [f"{second.name}.lock", f"{second.name}.making"]
    assert sorted(os.listdir(root / "locks")) == locks
    assert clean(str(root), [], False).gone
    assert os.listdir(base) == []
    assert clean(str(root), [], False) == NodeCleanup(str(root), gone=True)
    assert tree(unpack(pair[0], base)) == before


def test_bytes_of_shared_files_count_once_they_are_free(pair: Pair, base: Path) -> None:
    old, new = (unpack(bundle, base) for bundle in pair)
    both, root = size_of(old, new), str(base / OWN)
    assert next(old.rglob("f7.py")).stat().st_nlink == 2
    alone = clean(root, [new.name], True)
    assert 0 < alone.freed < both - size_of(*new.glob("lib/*/site-packages/steady"))
    assert clean(root, [], True).freed == both
    assert clean(root, [new.name], False).freed == alone.freed
    assert clean(root, [], False).freed == both - alone.freed


def test_one_that_a_process_uses_is_kept(program: Path, single: Packed, base: Path) -> None:
    place = unpack(single, base)
    python = [place / "bin" / "python", "-c", "import time; time.sleep(600)"]
    with running(python) as user:  # without the lock
        done = clean(str(base / OWN), [], False)
        assert done.kept == ((place.name, f"process {user.pid} uses it"),)
    argv = [sys.executable, "-I", "-S", program, "exec", single.path, base, "--", "sleep", "600"]
    with running(argv) as user:
        line = Path(f"/proc/{user.pid}/cmdline")
        assert until(lambda: line.read_bytes() == b"sleep\x00600\x00")
        for dry_run in (True, False):
            done = clean(str(base / OWN), [], dry_run)
            assert (done.removed, done.kept) == ((), ((place.name, "in use"),))
    assert (place / "bin" / "python").exists()
    assert clean(str(base / OWN), [], False).gone


def test_killed_in_the_middle_it_leaves_no_half_environment(many: Packed, base: Path) -> None:
    """By itself: from outside the moment would be too early, or too late."""
    place, root = unpack(many, base), base / OWN
    code = f"""
import os, signal, sys; sys.path.insert(0, {str(REPO)!r})
from bundle.environment.clean import clean
removed = []
def count(event, arguments):
    if event == "os.remove":
        removed.append(1)
        if len(removed) == 500:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(count)
clean({str(root)!r}, [], False)
"""
    done = subprocess.run([sys.executable, "-c", code], check=False, timeout=300)
    assert done.returncode == -signal.SIGKILL
    assert not place.exists()
    left = os.listdir(root / "incoming")
    assert len(left) == 1
    assert left[0].startswith(f"{many.manifest.id}.")
    assert os.listdir(root / "envs") == []
    again = clean(str(root), [], False)
    assert [name for name, _ in again.left_overs] == [f"incoming/{left[0]}"]
    assert again.gone


def test_unpacking_and_cleaning_at_the_same_time(program: Path, single: Packed, base: Path) -> None:
    whole = tree(unpack(single, base))
    code = f"""
import sys, time; sys.path.insert(0, {str(REPO)!r})
from bundle.environment.clean import clean
end = time.monotonic() + 2
while time.monotonic() < end:
    problems = clean({str(base / OWN)!r}, ["0" * 64], False).problems
    assert not problems, problems
"""
    with running([sys.executable, "-c", code]) as cleaning:
        while cleaning.poll() is None:
            done = run_node(program, "unpack", single.path, base, "--python", BASE_PYTHON)
            assert done.returncode == 0, done.stderr
    assert cleaning.returncode == 0
    assert tree(unpack(single, base)) == whole


# --- what else lies there ------------------------------------------------------------------------


def test_left_overs_go_once_nobody_needs_them(root: Path) -> None:
    made, busy = "1" * 64, "2" * 64
    for name in (f"incoming/{made}.x/env", f"incoming/{busy}.x/env", "jobs/17.0/work", "jobs/18.0"):
        (root / name).mkdir(parents=True)
    (root / "jobs" / "17.0" / "work" / "result.bin").write_bytes(b"r" * 1000)
    (root / "incoming" / f"{made}.x" / "env" / "file").write_bytes(b"e" * 100)
    (root / "incoming" / "job-17.tar").write_bytes(b"b" * 10)
    (root / "incoming" / "notes.txt").touch()
    (root / "keep.txt").touch()
    for name in ("mine", "A" * 64):
        (root / "envs" / name).mkdir()
    (root / "locks" / f"{'3' * 64}.lock").touch()
    with (root / "locks" / f"{busy}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        soon = clean(str(root), [], False)
        assert soon.left_overs == ((f"incoming/{made}.x", 100),)
        recent = "written to in the last 1 hour"
        assert soon.kept == (
            ("A" * 64, NOT_OURS),
            ("mine", NOT_OURS),
            (f"incoming/{busy}.x", "in use"),
            ("incoming/job-17.tar", recent),
            ("incoming/notes.txt", NOT_OURS),
            ("jobs/17.0", recent),
            ("jobs/18.0", recent),
        )
        assert os.listdir(root / "locks") == [f"{busy}.lock"]
        with (root / "incoming" / "job-17.tar").open() as reader:
            fcntl.flock(reader, fcntl.LOCK_SH)
            with running(["sleep", "600"], cwd=root / "jobs" / "18.0") as user:
                later = clean(str(root), [], False, idle_since=time.time())
    assert later.left_overs == (("jobs/17.0", 1000),)
    assert dict(later.kept) == {
        "A" * 64: NOT_OURS,
        "mine": NOT_OURS,
        f"incoming/{busy}.x": "in use",
        "incoming/job-17.tar": "in use",
        "incoming/notes.txt": NOT_OURS,
        "jobs/18.0": f"process {user.pid} uses it",
    }
    last = clean(str(root), [], False, idle_since=time.time())
    assert [name for name, _ in last.left_overs] == [
        f"incoming/{busy}.x", "incoming/job-17.tar", "jobs/18.0",
    ]  # fmt: skip
    assert (last.gone, os.listdir(root / "incoming")) == (False, ["notes.txt"])
    assert (root / "keep.txt").exists()


# --- hostile content -----------------------------------------------------------------------------


def test_links_are_removed_and_never_followed(root: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    (outside / "folder").mkdir(parents=True)
    (outside / "file").write_text("precious")
    (outside / "folder").chmod(0o500)
    before = tree(outside)
    (root / "envs" / ("1" * 64)).symlink_to(outside)
    (root / "incoming" / f"{'2' * 64}.x").symlink_to(outside)
    (root / "incoming" / "job-9.tar").symlink_to(outside / "file")
    (root / "jobs" / "17.0").symlink_to(outside)
    (root / "jobs" / "18.0").mkdir()
    (root / "jobs" / "18.0" / "way-out").symlink_to(outside)
    os.link(outside / "file", root / "jobs" / "18.0" / "file")
    (root / "locks" / f"{'4' * 64}.lock").symlink_to(outside / "file")
    (root / "nodes").symlink_to(outside)
    done = clean(str(root), [], False, idle_since=time.time())
    assert [name for name, _ in done.removed] == ["1" * 64]
    assert {name for name, _ in done.left_overs} == {
        f"incoming/{'2' * 64}.x", "incoming/job-9.tar", "jobs/17.0", "jobs/18.0",
    }  # fmt: skip
    assert [problem.where for problem in done.problems] == [
        str(root / "locks" / f"{'4' * 64}.lock")
    ]
    assert tree(outside) == before
    assert (outside / "folder").stat().st_mode & 0o777 == 0o500
    assert not done.gone
    assert done.freed < 600  # links' own lengths; the file outside keeps another name


def test_what_is_no_node_root_of_ours_is_refused(base: Path, tmp_path: Path) -> None:
    """By its name, or as tests/bundle/node/test_node_root.py has it."""
    real, place = tmp_path / "elsewhere", base / OWN
    (real / "envs" / ("1" * 64)).mkdir(parents=True)
    place.symlink_to(real)
    before = sorted(tmp_path.rglob("*"))
    for refused in (real, place):
        with pytest.raises(NodeError) as caught:
            clean(str(refused), [], False)
        assert caught.value.problem.where == str(refused)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("kind", ["tmpfs", "bind"])
def test_where_something_is_mounted_nothing_is_touched(
    single: Packed, base: Path, tmp_path: Path, kind: str
) -> None:
    place = unpack(single, base)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "precious").touch()
    point = place / "project"
    mount = "mount -t tmpfs none" if kind == "tmpfs" else f"mount --bind {tmp_path / 'data'}"
    code = f"""
from bundle.environment.clean import clean
from bundle.protocol.codec import encode
print(json.dumps([encode(clean({str(base / OWN)!r}, [], dry)) for dry in (True, False)]))
"""
    answers = namespace("-m", f"{mount} {point}", code)
    assert isinstance(answers, Sequence)
    for answer in answers:
        assert (answer["removed"], answer["freed"], answer["gone"]) == ([], 0, False)
        (problem,) = answer["problems"]
        assert str(point) in problem["why"]
        assert f"umount {point}" in problem["fix"]
    assert (tmp_path / "data" / "precious").exists()
    assert clean(str(base / OWN), [], False).gone


# --- which roots, and their locks ----------------------------------------------------------------


def test_every_place_where_a_root_may_be_is_looked_at(
    base: Path, root: Path, tmp_path: Path
) -> None:
    assert list_node_roots(str(base), {}) == [str(root)]
    assert list_node_roots("/nowhere", {"STAGER_NODE_ROOT": str(base)}) == [str(root)]
    assert list_node_roots("$SCRATCH", {"SCRATCH": str(base)}) == [str(root)]
    assert list_node_roots("/nowhere", {}) == []
    (tmp_path / OWN).symlink_to(root)
    assert str(root) in list_node_roots(
        "auto", {"TMPDIR": str(base), "SLURM_TMPDIR": str(tmp_path)}
    )
    assert str(tmp_path / OWN) not in list_node_roots("auto", {"SLURM_TMPDIR": str(tmp_path)})
    with pytest.raises(NodeError, match="SCRATCH is not set"):
        list_node_roots("$SCRATCH", {})


def test_a_place_that_another_user_took_is_not_looked_into(tmp_path: Path) -> None:
    """No job has used it: the next directory was taken."""
    needs("root")
    root = tmp_path / OWN
    root.mkdir()
    os.chown(root, 12345, -1)
    assert str(root) not in list_node_roots("auto", {"TMPDIR": str(tmp_path)})
    assert list_node_roots(str(tmp_path), {}) == [str(root)]  # it was named: clean says why not


def test_a_lock_whose_file_was_removed_meanwhile_is_taken_anew(tmp_path: Path) -> None:
    path = tmp_path / "x.lock"
    first = take_lock(str(path), fcntl.LOCK_EX)
    code = f"""
import fcntl, os, sys; sys.path.insert(0, {str(REPO)!r})
from bundle.node.node_root import take_lock
handle = take_lock({str(path)!r}, fcntl.LOCK_EX)
print(os.fstat(handle).st_ino, flush=True)
sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        time.sleep(0.3)
        path.unlink()
        os.close(first)
        assert other.stdout
        assert int(other.stdout.readline()) == path.stat().st_ino
        with pytest.raises(BlockingIOError):
            take_lock(str(path), fcntl.LOCK_EX | fcntl.LOCK_NB)
        other.communicate()
    os.close(take_lock(str(path), fcntl.LOCK_EX | fcntl.LOCK_NB))


def test_a_root_that_somebody_is_about_to_fill_stays(root: Path) -> None:
    with hold_root(str(root)):
        assert not clean(str(root), [], False).gone
    assert clean(str(root), [], False).gone
    with hold_root(str(root)):
        assert {"envs", "incoming", "jobs", "locks"} <= set(os.listdir(root))
    (root / "envs").rmdir()  # a process that failed to remove it may have removed a part
    with hold_root(str(root)):
        assert (root / "envs").is_dir()


# --- A node cleans itself: by age and size, each user's files with that user's rights ------------


IDS = ["a" * 64, "b" * 64, "c" * 64]
DAY = 86400.0


def make_root(base: Path, owner: int = os.geteuid(), size: int = 1000) -> Path:
    """A node root with three environments: used now, two days ago, and ten days ago."""
    root = base / f"stager-{owner}"
    for folder in (root, *(root / name for name in SUBDIRECTORIES)):
        folder.mkdir(mode=0o700)
        os.chown(folder, owner, owner)
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
    held = hold_environment(str(root), IDS[2])
    try:
        (done,) = clean_node([str(tmp_path)], Retention(days=0), dry_run=False)
    finally:
        os.close(held)
    assert environments(root) == IDS[2:]
    assert done.kept == ((IDS[2], "in use"),)
    clean_node([str(tmp_path)], Retention(days=1), dry_run=False)
    assert environments(root) == IDS[2:], "to hold it was a use"


def test_the_nodes_of_a_local_allocation_are_cleaned_with_it(tmp_path: Path) -> None:
    root = make_root(tmp_path)
    base, other = root / "nodes" / "local0", root / "nodes" / "local1"
    for folder in (base, other):
        folder.mkdir(parents=True, mode=0o700)
    inner = make_root(base)
    clean_node([str(tmp_path)], Retention(days=7), dry_run=False)
    assert environments(inner) == environments(root) == IDS[:2]
    done = clean(str(root), [], False)
    assert [name for name, _ in done.removed] == IDS[:2] * 2
    assert 4000 <= done.freed < 4500
    assert os.listdir(root / "nodes") == ["local1"]
    other.rmdir()
    assert clean(str(root), [], False).gone


def test_root_cleans_all_users_with_their_rights(open_folder: Path) -> None:
    needs("root")
    open_folder.chmod(0o1777)
    roots = [make_root(open_folder, uid) for uid in (61001, 61002)]
    victim = open_folder / "victim"
    victim.mkdir(mode=0o700)
    (victim / "file").write_text("root's own")
    planted = open_folder / "stager-61003"
    planted.symlink_to(victim)  # a link in the place of a node root
    foreign = open_folder / "stager-61004"
    foreign.mkdir()  # not that user's
    Path(env_path(str(roots[0]), IDS[2]), "out").symlink_to(victim)
    incoming = roots[1] / "incoming" / f"{IDS[1]}.1"
    incoming.symlink_to(victim)
    aged(roots[0])
    command = [sys.executable, "-m", "bundle", "clean-node", "--days", "7", str(open_folder)]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == list(map(str, roots))
    assert [environments(root) for root in roots] == [IDS[:2]] * 2
    assert (victim / "file").read_text() == "root's own"
    assert foreign.is_dir()
    assert planted.is_symlink()


def test_a_user_cannot_lead_root_out_of_a_node_root(open_folder: Path) -> None:
    """An environment belongs to a directory that its user may not change: root does not help."""
    needs("root")
    root = make_root(open_folder, 61001)
    locked = Path(env_path(str(root), IDS[2]), "of-root")
    locked.mkdir(mode=0o700)
    (locked / "file").touch()
    aged(root)
    (done,) = clean_node([str(open_folder)], Retention(days=7), dry_run=False)
    assert {problem.code for problem in done.problems} == {ProblemCode.NOT_REMOVED}
    assert any(path.name == "file" for path in root.rglob("file"))


def test_a_user_who_kills_the_process_keeps_out_nobody_else(
    open_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs("root")
    open_folder.chmod(0o1777)
    roots = [make_root(open_folder, uid) for uid in (61001, 61002)]
    real = clean_node_module._clean

    def killed(root: str, *rest: Any) -> NodeCleanup:
        if os.geteuid() == 61001:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(root, *rest)

    monkeypatch.setattr(clean_node_module, "_clean", killed)
    first, second = clean_node([str(open_folder)], Retention(days=7), dry_run=False)
    assert [problem.values["why"] for problem in first.problems] == [
        "the process that cleans it was ended"
    ]
    assert second.problems == ()
    assert [environments(root) for root in roots] == [IDS, IDS[:2]]


def test_the_command(tmp_path: Path) -> None:
    root = make_root(tmp_path)
    stager = Path(sys.executable).with_name("stager")
    command = [stager, "clean-node", "--days", "7", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = f"{root}: 1 environment, 1.0 kB freed, 2 items kept\n"
    assert (done.returncode, done.stdout, done.stderr) == (0, said, "")
