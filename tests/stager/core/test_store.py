"""The offline root: nothing half-written under a final name, one build at a time."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from stager.core.errors import SpaceError, StagerError
from stager.core.store import Store, measure_tree, remove
from tests.support.building import left_behind
from tests.support.users import as_user

REPO = Path(__file__).resolve().parents[3]
HOLD = """
import sys
from pathlib import Path
from stager.core.store import Store
store = Store(Path(sys.argv[1]))
"""


def start(code, *arguments):
    """A second process that uses a store; it says what it reached, a line at a time."""
    argv, pipe = [sys.executable, "-c", HOLD + code, *map(str, arguments)], subprocess.PIPE
    return subprocess.Popen(argv, stdin=pipe, stdout=pipe, text=True, cwd=REPO)


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "deep" / "root")


def leftovers(store):
    files = (path for path in store.root.rglob("*") if path.is_file())
    return [path for path in files if not path.name.endswith(".lock")]


def test_a_file_where_a_folder_belongs_and_the_reverse(store):
    store.make_folder(store.root)
    (store.root / "seals").write_text("x")
    with pytest.raises(StagerError, match="seals: File exists") as caught:
        _ = store.seals
    assert "move it away" in caught.value.hint
    (store.programs / "a.pyz").mkdir()
    refused = pytest.raises(StagerError, match=r"cannot write .*: Is a directory")
    with refused as caught, store.publish(store.programs / "a.pyz") as partial:
        partial.write_bytes(b"x")
    assert "move it away" in caught.value.hint


def test_a_published_file_appears_whole_and_a_failed_block_keeps_what_was_there(store):
    final = store.layers / "a.tar.zst"
    with store.publish(final) as partial:
        partial.write_bytes(b"content")
        assert not final.exists()
        assert partial.stat().st_dev == store.root.stat().st_dev
        # What is just being published without the lock is not swept.
        with start("with store.lock(): print('inside')", store.root) as process:
            assert process.communicate(timeout=300)[0] == "inside\n"
    assert final.read_bytes() == b"content"
    with contextlib.suppress(ValueError), store.publish(final) as partial:
        partial.write_bytes(b"half")
        raise ValueError("mine")
    with pytest.raises(StagerError, match=str(final)), store.publish(final):
        pass  # nothing was written
    assert final.read_bytes() == b"content"
    assert leftovers(store) == [final]


def test_kill_9_while_publishing_leaves_no_final_file(store):
    code = """
with store.lock(), store.publish(store.layers / 'a') as partial:
    partial.write_bytes(b'half')
    print('written', flush=True)
    sys.stdin.read()
"""
    with start(code, store.root) as process:
        assert process.stdout.readline() == "written\n"
        process.send_signal(signal.SIGKILL)
        assert process.wait(timeout=300) == -signal.SIGKILL
    assert not (store.layers / "a").exists()
    assert [path.read_bytes() for path in (store.root / "tmp").rglob("a")] == [b"half"]
    with store.lock():  # the kernel dropped the dead holder's lock, and the next one sweeps
        assert not (store.root / "tmp").exists()
        with store.publish(store.layers / "a") as partial:
            partial.write_bytes(b"whole")
    assert (store.layers / "a").read_bytes() == b"whole"


def test_what_a_user_had_in_tmp_stays(store):
    """An offline root may be a directory that was used for something else before."""
    mine = store.root / "tmp" / "mine" / "results.csv"
    mine.parent.mkdir(parents=True)
    mine.write_text("r")
    (store.root / "tmp" / "new-notes").write_text("n")
    left_over = left_behind(store, "prove")
    with store.lock():
        assert not left_over.exists()
    names = {path.name for path in (store.root / "tmp").iterdir()}
    assert (names, mine.read_text()) == ({"mine", "new-notes"}, "r")


def test_a_signal_just_after_a_scratch_directory_is_made_leaves_nothing(store, monkeypatch):
    made: list[Path] = []

    def interrupted(self, folder):
        if folder.parent.name != "tmp":
            return
        assert folder.is_dir()
        made.append(folder)
        raise KeyboardInterrupt

    monkeypatch.setattr(Store, "open_up", interrupted)
    with pytest.raises(KeyboardInterrupt), store.scratch("spool"):
        pytest.fail("the block began")
    assert [folder.exists() for folder in made] == [False]


def test_too_little_space_says_need_have_where_and_the_setting(store):
    free = shutil.disk_usage(store.root.parents[1]).free
    store.require_space(1, "a small file")
    with pytest.raises(SpaceError) as caught:
        store.require_space(free * 2, "the layers")
    for part in ("the layers", "need", "have", str(store.root)):
        assert part in caught.value.message
    assert "OFFLINE_ROOT" in caught.value.hint
    assert "offline-root" in caught.value.hint


def test_a_full_disk_while_writing_is_a_space_error(store):
    final = store.layers / "a"

    refused = pytest.raises(SpaceError, match=str(final))
    with refused as caught, store.publish(final) as partial:
        partial.write_bytes(b"half")
        Path("/dev/full").write_bytes(b"x")  # the kernel's own ENOSPC
    assert "OFFLINE_ROOT" in caught.value.hint
    assert leftovers(store) == []


def test_the_lock_tells_who_has_to_wait(store):
    told: list[str] = []
    with store.lock(lambda: told.append("waiting")):
        assert told == []
        code = "with store.lock(lambda: print('waiting', flush=True)): print('inside', flush=True)"
        process = start(code, store.root)
        assert process.stdout.readline() == "waiting\n"
    with process:
        assert process.stdout.readline() == "inside\n"


DEPTH = 2100
"""More than Python recurses, and more than a path can name."""


@pytest.fixture
def outside(tmp_path):
    made = tmp_path / "outside"
    made.mkdir()
    (made / "precious").write_text("mine")
    return made


def test_few_open_files_are_enough(tmp_path, nested):
    tree = nested(tmp_path / "tree", 30)
    (tree / "wide" / "inner").mkdir(parents=True)
    code = (
        f"import resource, sys; sys.path.insert(0, {str(REPO)!r})\n"
        "from bundle.node.removal import delete\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (9, 9))\n"
        f"delete({str(tree)!r})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert not tree.exists()


def test_links_are_removed_and_not_followed(tmp_path, outside):
    tree = tmp_path / "tree"
    (tree / "inner" / "deeper").mkdir(parents=True)
    for place in (tree, tree / "inner", tree / "inner" / "deeper"):
        (place / "link").symlink_to(outside)
        (place / "to-file").symlink_to(outside / "precious")
        (place / "broken").symlink_to("nowhere")
        (place / "file").write_text("x" * 10)
    os.mkfifo(tree / "inner" / "pipe")
    links = [path for path in tree.rglob("*") if path.is_symlink()]
    assert measure_tree(tree) == 30 + sum(len(os.readlink(path)) for path in links)
    assert remove(tree)
    assert not tree.exists()
    link = tmp_path / "link"
    link.symlink_to(outside)
    assert remove(link)
    assert not link.is_symlink()
    assert (outside / "precious").read_text() == "mine"
    assert remove(tmp_path / "nothing here")
    (tmp_path / "file").write_text("x")
    assert remove(tmp_path / "file")


REMOVE = """
import sys
from pathlib import Path
from stager.core.store import remove
tree = Path(sys.argv[1])
for name in ("mine/closed", "mine"): (tree / name).chmod(0)
sys.exit(remove(tree))
"""


@pytest.mark.needs("root")
def test_what_cannot_be_removed_is_told_and_the_rest_goes(tmp_path):
    """Directories that are closed to their owner go, too."""
    tree = tmp_path / "tree"
    (tree / "theirs" / "inner").mkdir(parents=True)
    (tree / "theirs" / "file").write_text("x")
    (tree / "mine" / "closed").mkdir(parents=True)
    (tree / "file").write_text("x")
    for path in (tmp_path, tree, tree / "mine", tree / "mine" / "closed", tree / "file"):
        os.chown(path, 52342, 52342)
    argv = as_user(52342, [sys.executable, "-c", REMOVE, str(tree)])
    done = subprocess.run(argv, cwd=REPO, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"{tree} could not be removed, or not all of it: Permission denied" in done.stderr
    assert [path.name for path in tree.iterdir()] == ["theirs"]


def test_no_depth_is_too_great(tmp_path, nested):
    store = Store(tmp_path / "store")
    tree = nested(left_behind(store, "prove") / "tree", DEPTH)
    assert measure_tree(tree) == 0
    with store.lock():
        assert not (store.root / "tmp").exists()
