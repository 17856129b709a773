"""What rank 0 says, and what it takes back when a run goes on from a checkpoint."""

from __future__ import annotations

import json

import pytest

from trainer.config import TrainerError
from trainer.engine import progress
from trainer.engine.progress import Progress, remove_later_steps


def lines(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def out(tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    return folder


def test_a_line_a_second_at_most_and_the_last_one(out, capsys, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    told = Progress(out, 10, speaks=True)
    for step in range(1, 11):
        now[0] += 7200 if step == 5 else 0.3
        told.step(step, step / 10, 0.5, 1e-3, 8)
    told.epoch(1, 20, 0.2345678, 0.92341)
    told.close()
    *said, epoch = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in said] == ["4/10", "5/10", "9/10", "10/10"]
    assert said[0] == "step 4/10 epoch 0.40 loss 0.5000 lr 1.00e-03 27 samples/s eta 0:02"
    assert said[1].endswith(" eta 2:00:01")
    assert epoch == "Epoch 1 - Avg Loss: 0.234568, Accuracy: 92.34%"
    assert [line["step"] for line in lines(out) if "lr" in line] == [*range(1, 11)]
    assert told.rows == 80


def test_only_one_rank_speaks(out, capsys):
    told = Progress(out, 1, speaks=False)
    told.step(1, 1.0, 0.5, 1e-3, 8)
    told.epoch(1, 1, 0.5, 0.9)
    told.close()
    assert (capsys.readouterr().out, list(out.iterdir()), told.rows) == ("", [], 8)


def test_what_lies_behind_a_checkpoint_is_taken_back(out):
    text = "".join(json.dumps({"step": step, "loss": 1}) + "\n" for step in range(1, 31))
    (out / "metrics.jsonl").write_text(text + '{"step": 31, "lo')
    assert remove_later_steps(out, 24) == 6
    assert [line["step"] for line in lines(out)] == [*range(1, 25)]
    assert remove_later_steps(out, 24) == 0
    assert remove_later_steps(out / "none", 5) == 0


def test_a_log_that_cannot_be_written(tmp_path):
    with pytest.raises(TrainerError, match=r"metrics\.jsonl cannot be written"):
        Progress(tmp_path / "none", 1, speaks=True)


def test_tensorboard_gets_the_same_figures_two_a_second(out, monkeypatch):
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    told = Progress(out, 12, speaks=True)
    for step in range(1, 13):
        told.step(step, step / 12, 0.5 / step, 1e-3, 8)
        now[0] += 0.125
    told.epoch(1, 12, 0.25, 0.75)
    told.close()
    monkeypatch.undo()
    board = accumulators.EventAccumulator(str(out / "tensorboard"))
    board.Reload()
    loss = {line["step"]: line["loss"] for line in lines(out) if "loss" in line}
    assert [(one.step, one.value) for one in board.Scalars("loss")] == [
        (step, pytest.approx(loss[step])) for step in (1, 5, 9, 12)
    ]
    assert [one.value for one in board.Scalars("accuracy")] == [0.75]
