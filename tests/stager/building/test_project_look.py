"""The last look at a project: it holds while nothing has changed, and not a moment longer."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from stager.building.current_bundle import sources_of_project
from stager.config.load import load
from stager.core.store import Store
from stager.layers import source

SETTINGS = "[environment]\nrequirements = []\n"


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A project whose look is remembered, though it is small and new."""
    monkeypatch.setattr(source, "_FEWEST", 1)
    monkeypatch.setattr(source, "SETTLED_NS", -(1 << 62))
    folder = tmp_path / "project"
    (folder / "a" / "b").mkdir(parents=True)
    (folder / "a" / "b" / "one.py").write_text("x = 1\n")
    (folder / "a" / "data.txt").write_text("1")
    (folder / "link").symlink_to("a/data.txt")
    (folder / "stager.toml").write_text(SETTINGS)
    return folder


def look(root, *, remembered=True):
    store = Store(root.parent / "store")
    store.make_folder(store.projects)
    return sources_of_project(load(root), store, root / "pylock.toml", remembered=remembered)[0]


def in_place(root):
    file = root / "a" / "b" / "one.py"
    status = file.stat()
    file.write_text("x = 2\n")
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


def other_link(root):
    (root / "link").unlink()
    (root / "link").symlink_to("a/b/one.py")


CHANGES: dict[str, Callable[[Path], object]] = {
    "content, with the old size and time": in_place,
    "a new file far down": lambda root: (root / "a" / "b" / "two.py").write_text(""),
    "an empty file": lambda root: (root / "a" / "data.txt").write_text(""),
    "another name": lambda root: (root / "a" / "b").rename(root / "a" / "c"),
    "another mode": lambda root: (root / "a" / "b" / "one.py").chmod(0o755),
    "another target": other_link,
    "an ignored file": lambda root: (root / ".gitignore").write_text("*.txt\n/link\n"),
    "a setting": lambda root: (root / "stager.toml").write_text(
        SETTINGS + '[project]\nexclude = ["/a/b"]\n'
    ),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_any_change_is_seen(root, change):
    first = look(root)
    again = look(root)
    assert first.tree is not None
    assert again.tree is None, "nothing was read"
    assert again.digest == first.digest
    time.sleep(0.02)  # more than a tick of the file system's clock
    change(root)
    seen = look(root)
    assert seen.digest == look(root, remembered=False).digest != first.digest


def test_a_file_that_came_and_went_costs_no_look(root):
    first = look(root)
    (root / ".mark").write_text("")
    (root / ".mark").unlink()
    again = look(root)
    assert (again.tree, again.digest) == (None, first.digest)


def test_what_has_just_changed_is_looked_at_again(root, monkeypatch):
    """A second change in the same tick of the file system's clock would leave the same times."""
    monkeypatch.setattr(source, "SETTLED_NS", 3600 * 10**9)
    look(root)
    assert look(root).tree is not None
