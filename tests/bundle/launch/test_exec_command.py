"""What runs without a launcher: its rank, what it can import, and the view of an image."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bundle.launch.exec_command import find_trainer, make_view, read_step_variables
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
    "changed", [{"SLURM_STEP_NUM_TASKS": "1"}, {"RANK": "0"}, {"SLURM_STEP_ID": None}]
)
def test_what_is_no_rank_by_slurm(changed: dict[str, str | None]) -> None:
    """A batch script has the job's number of tasks, and would wait for ranks that nobody starts."""
    variables = {**STEP, **changed}
    assert read_step_variables({k: v for k, v in variables.items() if v is not None}) == {}


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


def test_of_several_views_at_a_time_one_is_made(tmp_path: Path) -> None:
    """One that cannot take its place is an error, and not an environment that is not there."""
    wheel = make_wheel(tmp_path / "wheels", "alpha")
    manifest = make_bundle(Store(tmp_path / "offline"), [wheel], decompressor=None).manifest
    place, root = tmp_path / "mounted", tmp_path / "node"
    (place / "lib").mkdir(parents=True)
    (root / "jobs").mkdir(parents=True)
    args = (str(place), manifest, str(root), sys.executable)
    with ThreadPoolExecutor(8) as pool:
        made = {done.environment for done in pool.map(lambda _: make_view(*args), range(16))}
    assert [str(path) for path in (root / "jobs").iterdir()] == [*made]
    final = Path(*made)
    assert (final / "lib").samefile(place / "lib")
    final.rename(root / "other")
    final.symlink_to("nowhere")
    with pytest.raises(NotADirectoryError):
        make_view(*args)
    assert os.listdir(root / "jobs") == [final.name]
