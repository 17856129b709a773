"""What a training has said of itself, found among a job's outputs and read."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from stager.logs.job_record import read_events
from stager.report.charts import Curves, Epoch, find_curves, read_curves
from tests.support.stories import T0, Told, went_well


def left(folder: Path, when: float, *lines: object) -> Path:
    """A file of metrics, written last at a time."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "metrics.jsonl"
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(f"{text}\n" for text in texts))
    os.utime(path, (when, when))
    return path


def found(told: Told, run_dir: Path, *outputs: str) -> tuple[list[Curves], list[Path]]:
    files = told.write(run_dir=str(run_dir), outputs=list(outputs))
    return find_curves(files, files.read_job(), read_events(files.events))


STEP = {"step": 1, "epoch": 0.5, "loss": 2.0, "lr": 0.1, "samples_per_second": 100.0, "seconds": 1}


def test_steps_and_epochs(tmp_path: Path) -> None:
    path = left(
        tmp_path,
        T0,
        STEP,
        {**STEP, "step": 2, "loss": 1.0},
        {"step": 2, "epoch": 1, "avg_loss": 1.5, "accuracy": 0.75, "seconds": 2},
        {**STEP, "step": 3, "loss": 0.5, "samples_per_second": 120.0},
        {**STEP, "step": 3, "loss": 0.6},  # done again, from a checkpoint
    )
    curves = read_curves(path)
    assert curves.loss == ((1.0, 2.0), (2.0, 1.0), (3.0, 0.6))
    assert curves.rate == ((1.0, 100.0), (2.0, 100.0), (3.0, 100.0))
    assert curves.epochs == (Epoch(step=2, epoch=1, loss=1.5, accuracy=0.75),)


@pytest.mark.parametrize(
    "line",
    [
        "", "{", "[1]", "null", "[" * 100_000, '{"step": 1}', '{"loss": 1}',
        '{"step": "1", "loss": 1}', '{"step": 1, "loss": NaN}', '{"step": 1, "loss": 1e999}',
        '{"step": 1, "loss": true}', f'{{"step": 1, "loss": 1{"0" * 400}}}',
        '{"step": 1, "loss": 1e300}', '{"step": 1, "loss": "<script>"}',
    ],
)  # fmt: skip
def test_other_lines_do_no_harm(tmp_path: Path, line: str) -> None:
    assert read_curves(left(tmp_path, T0, line)).is_empty
    assert read_curves(left(tmp_path, T0, line, STEP)).loss == ((1.0, 2.0),)


def test_pipes_links_and_what_is_not_there(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(left(tmp_path, T0, STEP))
    for name in ("pipe", "link", "none", "."):
        assert read_curves(tmp_path / name).is_empty


def test_only_what_the_jobs_outputs_are(tmp_path: Path) -> None:
    told, during = went_well(tmp_path / "logs", ["a"]), T0 + 30
    left(tmp_path / "run" / "out", during, STEP)
    left(tmp_path / "run" / "runs" / "b", during, STEP)
    left(tmp_path / "run" / "other", during, STEP)
    left(tmp_path / "secret", during, STEP)
    outputs = ["out", "runs/*", "../secret", "/etc", "", "none", "bad[**"]
    paths = [curves.path for curves in found(told, tmp_path / "run", *outputs)[0]]
    expected = [tmp_path / "run" / name / "metrics.jsonl" for name in ("out", "runs/b")]
    assert paths == [str(path) for path in expected]
    everything = found(told, tmp_path / "run", ".")[0]
    assert [Path(curves.path).parent.name for curves in everything] == ["other", "out"]


@pytest.mark.parametrize(
    ("when", "own"),
    [
        (T0 - 1000, False),
        (T0 + 1, False),  # while the nodes were looked at: no rank can have
        (T0 + 30, True),
        (T0 + 62.7, True),
        (T0 + 1000, False),
    ],
)
def test_another_jobs_curves_are_not_this_ones(tmp_path: Path, when: float, own: bool) -> None:
    path = left(tmp_path / "out", when, STEP)
    curves, others = found(went_well(tmp_path / "logs", ["a"]), tmp_path, "out")
    assert [one.path for one in curves] == ([str(path)] if own else [])
    assert others == ([] if own else [path])


def test_a_job_that_launched_nothing_has_none(tmp_path: Path) -> None:
    left(tmp_path / "out", T0 + 1, STEP)
    told = Told(tmp_path / "logs").say("job", nodes=["a"]).phase("preflight", 2.0, ["a"])
    assert found(told.say("result", ok=True), tmp_path, "out")[0] == []


def test_results_that_got_another_name_on_their_way_home(tmp_path: Path) -> None:
    left(tmp_path / "out", T0 - 9, STEP)
    mine = left(tmp_path / "out.1", T0 + 62, {**STEP, "loss": 9.0})
    told = went_well(tmp_path / "logs", ["a"])
    told.lines.insert(-1, json.dumps({"event": "collected", "renamed": {"out": "out.1"}}))
    curves, _ = found(told, tmp_path, "out")
    assert [(one.path, one.loss) for one in curves] == [(str(mine), ((1.0, 9.0),))]


def test_a_job_from_before_events_had_times(tmp_path: Path) -> None:
    told = went_well(tmp_path / "logs", ["a"])
    told.lines = [line.replace('"time": 1', '"was": 1') for line in told.lines]
    left(tmp_path / "out", T0 - 9, STEP)
    assert len(found(told, tmp_path, "out")[0]) == 1
