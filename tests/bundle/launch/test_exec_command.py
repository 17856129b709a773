"""What runs without a launcher: its rank, what it can import, and the view of an image."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bundle.format.manifest import Manifest
from bundle.launch.exec_command import find_trainer, make_view, read_step_variables
from bundle.launch.wrapper import find_src_folder
from stager.core.store import Store
from tests.support.bundles import make_bundle
from tests.support.wheelhouse import make_wheel

STEP = {
    "SLURM_JOB_ID": "41",
    "SLURM_STEP_ID": "1",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_NODELIST": "n[07-09]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}


def test_a_task_of_a_step_is_a_rank() -> None:
    assert read_step_variables(STEP) == {
        "RANK": "3",
        "WORLD_SIZE": "5",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "NODE_RANK": "1",
        "MASTER_ADDR": "n07",
        "MASTER_PORT": "20042",
    }
    assert (
        read_step_variables({**STEP, "MASTER_PORT": "5", "MASTER_ADDR": "h"})["MASTER_PORT"] == "5"
    )


@pytest.mark.parametrize(
    "changed",
    [{"SLURM_STEP_NUM_TASKS": "1"}, {"RANK": "0"}, {"SLURM_STEP_ID": None}],
)
def test_what_is_no_rank_by_slurm(changed: dict[str, str | None]) -> None:
    """A batch script has the job's number of tasks, and would wait for ranks that nobody starts."""
    variables = {**STEP, **changed}
    assert read_step_variables({k: v for k, v in variables.items() if v is not None}) == {}


def test_a_src_layout_has_its_packages_in_src(tmp_path: Path) -> None:
    assert find_src_folder(str(tmp_path)) is None
    (tmp_path / "src").mkdir()
    assert find_src_folder(str(tmp_path)) == str(tmp_path / "src")
    (tmp_path / "src" / "__init__.py").touch()  # a package that is called so
    assert find_src_folder(str(tmp_path)) is None


@pytest.mark.parametrize("name", ["trainer", "trainer.py"])
def test_the_trainer_hides_no_package(tmp_path: Path, name: str) -> None:
    packages, site = tmp_path / "pkgs", tmp_path / ".stager" / "site"
    packages.mkdir()
    variables = {"STAGER_ENV": str(tmp_path), "STAGER_TRAINER": str(site)}
    assert find_trainer(variables) == []
    site.mkdir(parents=True)
    assert find_trainer(variables) == [str(site)]
    (packages / name).mkdir()
    assert find_trainer(variables) == []


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
        made = {done.environment for done in pool.map(lambda _: make_view(*args), range(16))}
    assert [str(path) for path in (root / "jobs").iterdir()] == [*made]
    assert (Path(*made) / "lib").samefile(place / "lib")


def test_one_that_cannot_take_its_place_is_an_error(
    manifest: Manifest, place: Path, root: Path
) -> None:
    """And not an environment that is not there."""
    args = (str(place), manifest, str(root), sys.executable)
    final = Path(make_view(*args).environment)
    final.rename(root / "other")
    final.symlink_to("nowhere")
    with pytest.raises(NotADirectoryError):
        make_view(*args)
    assert os.listdir(root / "jobs") == [final.name]
