"""Data sets by name from a cache of the hub, with the real library and no network."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bundle.environment import hub_datasets

PACKAGE = Path(__file__).resolve().parents[3] / "bundle" / "environment"
COMMIT = "c" * 40
CARD = """---
configs:
- config_name: default
  data_files:
  - split: train
    path: data/train-*
  - split: test
    path: data/test-*
dataset_info:
  features:
  - name: text
    dtype: string
  splits:
  - name: train
    num_bytes: 1
    num_examples: 2
  - name: test
    num_bytes: 1
    num_examples: 1
---
"""
LOAD = """
import _stager_patches, json
_stager_patches.activate()
from datasets import load_dataset
found = {}
data = load_dataset("org/whole")
found["org/whole"] = {split: len(rows) for split, rows in data.items()}
found["org/part"] = len(load_dataset("org/part", split="train"))
rows = load_dataset("org/whole", split="train", revision="main")
found["cache"] = rows.cache_files[0]["filename"]
try:
    load_dataset("org/none")
except Exception as error:
    found["none"] = type(error).__name__
print(json.dumps(found))
"""


def snapshot(cache: Path, name: str, *files: str) -> Path:
    repository = cache / f"datasets--org--{name}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    data = repository / "snapshots" / COMMIT / "data"
    data.mkdir(parents=True)
    (data.parent / "README.md").write_text(CARD)
    for number, file in enumerate(files):
        (data / file).write_text("text\n" + "some words\n" * (2 - number))
    return repository


def test_a_metric_is_read_from_its_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``evaluate.loading`` 0.4 has it; that library is not among those of the tests."""
    script = tmp_path / "spaces--org--f1" / "snapshots" / COMMIT / "f1.py"
    script.parent.mkdir(parents=True)
    (tmp_path / "spaces--org--f1" / "refs").mkdir()
    (tmp_path / "spaces--org--f1" / "refs" / "main").write_text(COMMIT)

    class Local:
        def __init__(self, path: str, **settings: object) -> None:
            self.found = (path, settings["module_type"])

        def get_module(self) -> tuple[str, object]:
            return self.found

    class Hub(SimpleNamespace):
        def get_module(self) -> str:
            return "asked the hub"

    loading: Any = SimpleNamespace(
        HubEvaluationModuleFactory=Hub, LocalEvaluationModuleFactory=Local
    )
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert hub_datasets.has_hub_spaces(loading)
    hub_datasets.read_spaces(loading)
    assert not hub_datasets.has_hub_spaces(loading)
    given = {"revision": None, "module_type": "metric", "download_config": None,
             "download_mode": None, "dynamic_modules_path": None}  # fmt: skip
    assert Hub(name="org/f1", **given).get_module() == (str(script), "metric")
    assert Hub(name="org/other", **given).get_module() == "asked the hub"


def test_a_data_set_is_found_by_name_and_nothing_is_written_to_it(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    cache = tmp_path / "hub"
    snapshot(cache, "whole", "train-0.csv", "test-0.csv")
    part = snapshot(cache, "part", "train-0.csv")
    (part / ".stager-part").mkdir()
    (part / ".stager-part" / COMMIT).write_text("data/test-0.csv\n")
    for name in ("patches", "hub_datasets"):
        shutil.copy(PACKAGE / f"{name}.py", tmp_path / f"_stager_{name}.py")
    before = sorted(cache.rglob("*"))
    done = subprocess.run(
        [sys.executable, "-c", LOAD],
        env={
            **os.environ,
            "PYTHONPATH": str(tmp_path),
            "STAGER_PATCHES": "hub-datasets",
            "HF_HUB_CACHE": str(cache),
            "HF_HOME": str(tmp_path / "home"),
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "patch applied: hub-datasets" in done.stderr
    found = json.loads(done.stdout)
    assert found["org/whole"] == {"train": 2, "test": 1}
    assert found["org/part"] == 2
    # Named by its commit, so that a later bundle's environment finds what was prepared.
    assert found["cache"].startswith(str(tmp_path / "home"))
    assert COMMIT in found["cache"]
    assert found["none"] == "ConnectionError"
    assert sorted(cache.rglob("*")) == before
