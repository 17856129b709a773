"""Checkpoints on the disk: whole or not at all, found by what they say, never trusted unread."""

from __future__ import annotations

import json

import pytest

from trainer.config import TrainerError
from trainer.engine import saving

torch = pytest.importorskip("torch")


def put(out, name, step, **state):
    saving.write_checkpoint(out / name, saving.pack_state({"step": step, **state}), step)
    return out / name


def test_the_newest_is_the_one_with_most_steps(tmp_path):
    put(tmp_path, "checkpoint_epoch_1.pt", 100)
    put(tmp_path, "checkpoint_step_90.pt", 90)
    newest = put(tmp_path, "checkpoint_step_110.pt", 110)
    assert [note.step for note in saving.list_complete(tmp_path)] == [90, 100, 110]
    note, data = saving.find_newest(tmp_path)
    assert (note.path, saving.load_state(data, "x")["step"]) == (newest, 110)


def test_a_damaged_one_is_not_counted_when_old_ones_go(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    put(out, "checkpoint_step_20.pt", 20)
    put(out, "checkpoint_step_60.pt", 60).write_bytes(b"damaged")
    assert saving.find_newest(out)[0].step == 20
    put(out, "checkpoint_step_21.pt", 21)
    saving.remove_older_checkpoints(out, 1)
    assert saving.find_newest(out)[0].step == 21
    (out / "checkpoint_step_21.pt").write_bytes(b"damaged, too")
    for _ in "ab":  # and not silently from the beginning when it is tried again
        with pytest.raises(TrainerError, match=r"no checkpoint in .* can be used"):
            saving.find_newest(out)


def test_one_that_is_damaged_or_without_its_note_is_passed_over(tmp_path, capsys):
    put(tmp_path, "checkpoint_epoch_1.pt", 100)
    put(tmp_path, "checkpoint_epoch_5.pt", 500).with_suffix(".json").unlink()
    put(tmp_path, "checkpoint_epoch_3.pt", 300).with_suffix(".json").write_text('{"step": 3')
    put(tmp_path, "checkpoint_epoch_4.pt", 400).unlink()
    path = put(tmp_path, "checkpoint_epoch_2.pt", 200)
    data = bytearray(path.read_bytes())
    data[500] ^= 4
    path.write_bytes(data)
    note, _ = saving.find_newest(tmp_path)
    assert note.step == 100
    assert f"warning: {path} is damaged" in capsys.readouterr().out


def test_only_the_newest_stay(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    for epoch in range(1, 6):
        put(out, f"checkpoint_epoch_{epoch}.pt", epoch * 10)
    put(out, saving.BEST, 20)
    saving.remove_older_checkpoints(out, 2)
    assert sorted(path.name for path in out.iterdir()) == [
        "best.json", "best.pt", "checkpoint_epoch_4.json", "checkpoint_epoch_4.pt",
        "checkpoint_epoch_5.json", "checkpoint_epoch_5.pt",
    ]  # fmt: skip
    saving.remove_checkpoints(out)
    assert not list(out.iterdir())


def test_what_cannot_be_written_is_told(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(TrainerError, match="cannot be written: Not a directory"):
        put(tmp_path / "file", "checkpoint_epoch_1.pt", 1)


def test_nothing_in_a_checkpoint_is_run(tmp_path):
    class Trap:
        def __reduce__(self):
            return (print, ("it was run",))

    path = tmp_path / "checkpoint_epoch_1.pt"
    torch.save({"model": Trap()}, path)
    with pytest.raises(TrainerError, match="cannot be loaded"):
        saving.load_state(path.read_bytes(), path.name)


def test_any_reader_of_torch_can_read_it(tmp_path):
    path = put(tmp_path, "checkpoint_epoch_1.pt", 1, model={"w": torch.ones(3)})
    assert torch.load(path, weights_only=True)["model"]["w"].tolist() == [1, 1, 1]
    assert json.loads(path.with_suffix(".json").read_text())["bytes"] == path.stat().st_size
