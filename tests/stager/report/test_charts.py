"""Curves of a training, and the charts that show them."""

from __future__ import annotations

import json
import math
import os
import random
from pathlib import Path

import pytest

from stager.logs.job_record import read_events
from stager.report.charts import (
    Curves,
    Epoch,
    LineChart,
    anchor,
    decimal,
    duration,
    find_curves,
    percent,
    read_curves,
    thin_out,
    ticks,
    time_ticks,
)
from tests.support.stories import T0, Told, went_well

# --- What a training has said of itself, found among a job's outputs and read --------------------


def left(folder: Path, when: float, *lines: object) -> Path:
    """A file of metrics, written last at a time."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "metrics.jsonl"
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(f"{text}\n" for text in texts))
    os.utime(path, (when, when))
    return path


def found(told: Told, run_dir: Path, *outputs: str) -> list[Curves]:
    files = told.write(run_dir=str(run_dir), outputs=list(outputs))
    return find_curves(files, files.read_job(), read_events(files.events))


STEP = {"step": 1, "epoch": 0.5, "loss": 2.0, "lr": 0.1, "samples_per_second": 100.0, "seconds": 1}


def test_steps_and_epochs(tmp_path: Path) -> None:
    again = {**STEP, "step": 3, "samples_per_second": 120.0}
    path = left(
        tmp_path,
        T0,
        STEP,
        {**STEP, "step": 2, "loss": 1.0},
        {"step": 2, "epoch": 1, "avg_loss": 1.5, "accuracy": 0.75, "seconds": 2},
        {**again, "loss": 0.5},
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
    paths = [curves.path for curves in found(told, tmp_path / "run", *outputs)]
    expected = [tmp_path / "run" / name / "metrics.jsonl" for name in ("out", "runs/b")]
    assert paths == [str(path) for path in expected]
    everything = found(told, tmp_path / "run", ".")
    assert [Path(curves.path).parent.name for curves in everything] == ["other", "out"]


@pytest.mark.parametrize(
    ("after", "own"),
    # One second in, the nodes are still looked at: no rank can have written it.
    [(-1000, False), (1, False), (30, True), (62.7, True), (1000, False)],
)
def test_another_jobs_curves_are_not_this_ones(tmp_path: Path, after: float, own: bool) -> None:
    path = left(tmp_path / "out", T0 + after, STEP)
    curves = found(went_well(tmp_path / "logs", ["a"]), tmp_path, "out")
    assert [one.path for one in curves] == ([str(path)] if own else [])


def test_results_that_got_another_name_on_their_way_home(tmp_path: Path) -> None:
    left(tmp_path / "out", T0 - 9, STEP)
    mine = left(tmp_path / "out.1", T0 + 62, {**STEP, "loss": 9.0})
    told = went_well(tmp_path / "logs", ["a"])
    told.lines.insert(-1, json.dumps({"event": "collected", "renamed": {"out": "out.1"}}))
    curves = found(told, tmp_path, "out")
    assert [(one.path, one.loss) for one in curves] == [(str(mine), ((1.0, 9.0),))]


# --- Charts: round numbers on axes, lines in their places, amounts in words ----------------------


@pytest.mark.parametrize(
    ("low", "high", "texts"),
    [
        (0, 2.3, ["0", "0.5", "1.0", "1.5", "2.0", "2.5"]),
        (501, 560, ["500", "520", "540", "560"]),
        (0, 34_000, ["0", "10,000", "20,000", "30,000", "40,000"]),
        (3, 3, ["2.6", "2.8", "3.0", "3.2", "3.4"]),
        (0, 0, ["-1.0", "-0.5", "0", "0.5", "1.0"]),
    ],
)
def test_ticks_are_round(low: float, high: float, texts: list[str]) -> None:
    assert [text for _, text in ticks(low, high)] == texts


def test_ticks_for_any_numbers() -> None:
    chance = random.Random(5)
    for _ in range(2000):
        low = chance.uniform(-1, 1) * 10 ** chance.uniform(-9, 14)
        high = low + abs(chance.gauss(0, 1)) * 10 ** chance.uniform(-9, 14)
        found = ticks(low, high)
        width = found[-1][0] - found[0][0]
        assert 2 <= len(found) <= 8, (low, high, found)
        assert found[0][0] <= low + 1e-9 * width
        assert found[-1][0] >= high - 1e-9 * width


@pytest.mark.parametrize(
    ("seconds", "texts", "unit"),
    [
        (0.3, ["0", "0.05", "0.10", "0.15", "0.20", "0.25", "0.30"], "seconds"),
        (300, ["0", "1", "2", "3", "4", "5"], "minutes"),
        (86400, ["0", "5", "10", "15", "20"], "hours"),
        (0, ["0"], "seconds"),
    ],
)
def test_times_are_round_on_a_clock(seconds: float, texts: list[str], unit: str) -> None:
    found, named = time_ticks(seconds)
    assert ([text for _, text in found], named) == (texts, unit)
    assert all(0 <= value <= seconds + 1e-9 for value, _ in found)


def test_amounts_in_words() -> None:
    told = [duration(seconds) for seconds in (0, 0.084, 12.34, 59.96, 185, 3599.6, 7800, 90_000)]
    assert told == [
        *("0.00 s", "0.08 s", "12.3 s", "1 min 0 s", "3 min 5 s", "1 h 0 min", "2 h 10 min"),
        "25 h 0 min",
    ]
    assert (decimal(0.123456), decimal(123456.7)) == ("0.1235", "123,457")
    assert (percent(-1), percent(1 / 3), percent(7)) == ("0%", "33.33%", "100%")


def test_a_line_keeps_its_peaks() -> None:
    points = [(float(x), math.sin(x / 50)) for x in range(10_000)]
    points[7777] = (7777.0, 99.0)
    points[3333] = (3333.0, -99.0)
    found = thin_out(points)
    assert len(found) <= 402
    assert {points[0], points[-1], points[7777], points[3333]} <= set(found)
    assert list(found) == sorted(found)
    assert thin_out(points[:400]) == points[:400]


def test_a_line_is_where_its_numbers_are() -> None:
    points = [(0, 0.0), (5, 10.0), (10, 5.0)]
    numbers = LineChart("Loss", "mean", points, dots=[((5, 10.0), "top")])
    assert numbers.path == "M0 1000L500 0L1000 500"
    assert (numbers.find_share(5), numbers.find_pixels(10.0)) == (0.5, 10)
    assert [(text, y) for y, text in numbers.grid][::5] == [("0", 200), ("10", 10)]
    shares = [share for share, _ in numbers.labels]
    assert list(map(percent, shares)) == ["0%", "20%", "40%", "60%", "80%", "100%"]
    anchors = ["start", "middle", "middle", "middle", "middle", "end"]
    assert list(map(anchor, shares)) == anchors
    assert numbers.words == "Loss, mean: 0 at step 0, 5 at step 10"
