"""The view of a mounted environment: one for all, or a message that it cannot be made."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bundle.format.manifest import Manifest
from bundle.launch.exec_command import view
from stager.core.store import Store
from tests.support.bundles import make_bundle
from tests.support.wheelhouse import make_wheel


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    """That of a small bundle."""
    wheel = make_wheel(tmp_path / "wheels", "alpha")
    return make_bundle(Store(tmp_path / "offline"), [wheel], decompressor=None).manifest


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """What is mounted."""
    (tmp_path / "mounted" / "lib").mkdir(parents=True)
    return tmp_path / "mounted"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A node root."""
    (tmp_path / "node" / "jobs").mkdir(parents=True)
    return tmp_path / "node"


def test_of_several_at_a_time_one_is_made(manifest: Manifest, place: Path, root: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        args = (str(place), manifest, str(root), sys.executable)
        made = {done.environment for done in pool.map(lambda _: view(*args), range(16))}
    assert [str(path) for path in (root / "jobs").iterdir()] == [*made]
    assert (Path(*made) / "lib").samefile(place / "lib")


def test_one_that_cannot_take_its_place_is_an_error(
    manifest: Manifest, place: Path, root: Path
) -> None:
    """And not an environment that is not there."""
    args = (str(place), manifest, str(root), sys.executable)
    final = Path(view(*args).environment)
    final.rename(root / "other")
    final.symlink_to("nowhere")
    with pytest.raises(NotADirectoryError):
        view(*args)
    assert os.listdir(root / "jobs") == [final.name]
