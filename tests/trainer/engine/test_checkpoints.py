"""Which checkpoint a run goes on from, and which it clears away."""

from __future__ import annotations

import json

import pytest

from trainer.config import TrainerError, parse
from trainer.engine.checkpoints import Start, find, prepare, write_metrics


def options(out, *arguments):
    return parse(["tiny-bert", "--out", str(out), *arguments])


def saved(out, step, epoch):
    """A folder with the files that the Trainer leaves."""
    folder = out / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    for name in ("model.safetensors", "optimizer.pt", "scheduler.pt"):
        (folder / name).touch()
    state = {"global_step": step, "epoch": epoch}
    (folder / "trainer_state.json").write_text(json.dumps(state), encoding="utf-8")
    return folder


def test_the_newest_complete_one_is_found_by_number_not_by_name(tmp_path):
    saved(tmp_path, 9, 0.9)
    older = saved(tmp_path, 10, 1.0)
    for step, lost in ((20, "trainer_state.json"), (30, "optimizer.pt"), (40, "model.safetensors")):
        (saved(tmp_path, step, step / 10) / lost).unlink()
    (saved(tmp_path, 50, 5.0) / "trainer_state.json").write_text('{"glob', encoding="utf-8")
    assert find(options(tmp_path), 10) == Start(checkpoint=older, epochs_done=1.0)


def test_one_of_another_number_of_ranks_is_refused(tmp_path):
    saved(tmp_path, 20, 1.0)
    with pytest.raises(TrainerError, match="20 steps an epoch, and this run has 10"):
        find(options(tmp_path), 10)


def test_a_finished_run_is_replaced(tmp_path):
    folder = saved(tmp_path, 10, 1.0)
    mine = tmp_path / "checkpoint-notes"
    mine.mkdir()
    write_metrics(tmp_path, {"accuracy": 1.0})
    assert prepare(options(tmp_path), 10) == Start()
    assert not folder.exists()
    assert not (tmp_path / "metrics.json").exists()
    assert mine.is_dir()


def test_an_unfinished_run_is_not_thrown_away(tmp_path):
    folder = saved(tmp_path, 10, 1.0)
    with pytest.raises(TrainerError, match="did not finish") as error:
        prepare(options(tmp_path), 10)
    assert "--resume" in error.value.hint
    assert folder.is_dir()
    assert prepare(options(tmp_path, "--resume"), 10).checkpoint == folder


def test_an_output_folder_is_made_or_named(tmp_path):
    out = tmp_path / "new" / "out"
    assert prepare(options(out, "--resume"), 10) == Start()
    assert out.is_dir()
    (tmp_path / "file").touch()
    with pytest.raises(TrainerError, match="cannot be used"):
        prepare(options(tmp_path / "file" / "out"), 10)


def test_metrics_are_whole_and_leave_nothing_beside_them(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    write_metrics(out, {"accuracy": 0.5, "world_size": 4})
    found = {entry.name: json.loads(entry.read_text()) for entry in out.iterdir()}
    assert found == {"metrics.json": {"accuracy": 0.5, "world_size": 4}}
