"""Removing trees: however deep, whoever's, without following a link or ending a command."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from stager.core.store import Store, remove, size_of
from tests.support.building import left_behind
from tests.support.users import as_user

DEPTH = 2100
"""More than Python recurses, and more than a path can name."""
REPO = Path(__file__).resolve().parents[3]


@pytest.fixture
def outside(tmp_path):
    made = tmp_path / "outside"
    made.mkdir()
    (made / "precious").write_text("mine")
    return made


def test_no_depth_is_too_great(tmp_path, nested):
    tree = nested(tmp_path / "tree", DEPTH)
    assert size_of(tree) == 0
    assert remove(tree)
    assert not tree.exists()


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
    assert size_of(tree) == 30 + sum(len(os.readlink(p)) for p in tree.rglob("*") if p.is_symlink())
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


@pytest.mark.needs("root")
def test_directories_closed_to_their_owner_go_too(tmp_path):
    code = (
        "import sys\nfrom pathlib import Path\nfrom stager.core.store import remove\n"
        "tree = Path(sys.argv[1])\n(tree / 'a' / 'b' / 'c').mkdir(parents=True)\n"
        "(tree / 'a' / 'b' / 'file').write_text('x')\n"
        "for path in (tree / 'a' / 'b' / 'c', tree / 'a' / 'b', tree / 'a'): path.chmod(0)\n"
        "sys.exit(not remove(tree))\n"
    )
    mine = tmp_path / "mine"
    mine.mkdir()
    os.chown(mine, 52342, 52342)
    argv = as_user(52342, [sys.executable, "-c", code, str(mine / "tree")])
    done = subprocess.run(argv, cwd=REPO, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not (mine / "tree").exists()


@pytest.mark.needs("root")
def test_what_cannot_be_removed_is_told_and_the_rest_goes(tmp_path):
    tree = tmp_path / "tree"
    (tree / "theirs" / "inner").mkdir(parents=True)
    (tree / "theirs" / "file").write_text("x")
    (tree / "mine" / "inner").mkdir(parents=True)
    (tree / "file").write_text("x")
    for path in (tmp_path, tree, tree / "mine", tree / "mine" / "inner", tree / "file"):
        os.chown(path, 52342, 52342)
    code = (
        "import sys\nfrom pathlib import Path\nfrom stager.core.store import remove\n"
        "sys.exit(remove(Path(sys.argv[1])))\n"
    )
    argv = as_user(52342, [sys.executable, "-c", code, str(tree)])
    done = subprocess.run(argv, cwd=REPO, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"{tree} could not be removed, or not all of it: Permission denied" in done.stderr
    assert [path.name for path in tree.iterdir()] == ["theirs"]


def test_a_deep_tree_does_not_jam_a_store(tmp_path, nested):
    store = Store(tmp_path / "store")
    nested(left_behind(store, "prove") / "tree", DEPTH)
    with store.lock():
        assert not (store.root / "tmp").exists()
