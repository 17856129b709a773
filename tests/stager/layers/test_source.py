"""A layer's name: it changes with everything that shapes its bytes, and with nothing else."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest

from stager.config.load import load
from stager.core.errors import ConfigError
from stager.core.values import Digest, Target
from stager.layers import source as layersource
from stager.layers.source import LayerSource, layer_id, project_sources
from tests.support.building import HOST
from tests.support.trees import paths, write

WHEEL = LayerSource(kind="wheel", name="a", version="1", digest=Digest.of(b"a"), size=1)
PROJECT = LayerSource(kind="project", name="p", digest=Digest.of(b"p"), prefix="project", size=1)


def test_sizes_places_and_labels_do_not_count():
    assert layer_id(replace(PROJECT, name="other"), HOST) == layer_id(PROJECT, HOST)
    for source in (WHEEL, PROJECT):
        other = replace(source, size=99, wheel=Path("/elsewhere/a.whl"))
        assert layer_id(other, HOST) == layer_id(source, HOST)


def test_content_kind_names_and_place_count():
    for source, changes in (
        (WHEEL, {"digest": Digest.of(b"b")}),
        (WHEEL, {"kind": "asset"}),
        (WHEEL, {"name": "b"}),
        (WHEEL, {"version": "2"}),
        (PROJECT, {"digest": Digest.of(b"b")}),
        (PROJECT, {"prefix": "elsewhere"}),
        (PROJECT, {"kind": "asset"}),
    ):
        assert layer_id(replace(source, **changes), HOST) != layer_id(source, HOST)


def test_the_python_counts_where_there_is_bytecode_and_the_platform_does_not():
    other = Target(python="3.99", platform=HOST.platform)
    older = Target(python=HOST.python, platform="manylinux_2_17_x86_64")
    for source, counts in ((WHEEL, True), (PROJECT, True), (replace(PROJECT, kind="asset"), False)):
        assert (layer_id(source, other) != layer_id(source, HOST)) is counts
        assert layer_id(source, older) == layer_id(source, HOST)


def test_the_tools_count(monkeypatch):
    before = layer_id(WHEEL, HOST)
    with monkeypatch.context() as patched:
        patched.setattr(importlib.util, "MAGIC_NUMBER", b"next")
        assert layer_id(WHEEL, HOST) != before
    monkeypatch.setattr(layersource, "describe_compression", lambda *, sampled: "zstd-9.9.9")
    assert layer_id(WHEEL, HOST) != before


@pytest.fixture
def folder(tmp_path):
    """A project that needs nothing."""
    (tmp_path / "stager.toml").write_text("[environment]\nrequirements = []\n")
    return tmp_path


def test_what_is_left_out_is_told_once(folder):
    (folder / "nodes" / "dead").symlink_to("/nowhere")
    notes: list[str] = []
    sources = project_sources(load(folder), [folder / "store"], notes.append)
    assert [source.kind for source in sources] == ["project", "trainer"]
    (note,) = notes
    assert note.startswith("nodes/dead -> /nowhere: ")


def test_an_offline_root_in_the_projects_own_place_is_refused(folder):
    """Each bundle would hold all earlier ones."""
    config = load(folder)
    with pytest.raises(ConfigError, match="the offline root is the project's own folder"):
        project_sources(config, (folder, folder / "pylock.toml"))


def test_results_of_trackers_and_those_of_earlier_runs_stay_out(folder):
    """Else each run that brings them home would make the bundle stale."""
    write(folder, *(f"{name}/x" for name in ("wandb", "wandb.1", "mlflow.db.12", "sub/wandb")))
    write(folder, "mlflow.db")
    sources = project_sources(load(folder), (), tracked=("wandb", "mlflow.db"))
    assert paths(sources[0].tree) == ["stager.toml", "sub/wandb/x"]


@pytest.mark.parametrize(("limit", "value"), [("LARGE_PROJECT", 100), ("MANY_FILES", 3)])
def test_a_large_project_is_told_which_folder_makes_it_so(folder, monkeypatch, limit, value):
    """By its size, and by the number of its files."""
    monkeypatch.setattr(layersource, limit, value)
    write(folder, "data/train/a-file-of-some-length.bin", "data/train/another-file.bin", "train.py")
    size = sum(path.stat().st_size for path in (folder / "data/train").iterdir())
    notes: list[str] = []
    project_sources(load(folder), own=(), note=notes.append, tracked=())
    assert f", data/ alone {size} bytes in 2 files: name data in assets.paths" in notes[0]
