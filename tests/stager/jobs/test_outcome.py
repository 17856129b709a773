"""The figures that a training job leaves in its outputs."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from stager.jobs import outcome
from stager.jobs.outcome import Figures


def leave(folder: Path, **figures: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.json").write_text(json.dumps(figures))
    return folder


def test_numbers_in_outputs_are_found(tmp_path: Path) -> None:
    leave(tmp_path / "out", accuracy=0.9, name="x", ok=True, steps=7)
    leave(tmp_path / "runs" / "b", loss=1)
    leave(tmp_path / "runs" / "a", loss=2)
    leave(tmp_path / "elsewhere", loss=3)
    found = outcome.read_figures(tmp_path, ["out/", "runs/*", "none", "out"], {})
    assert found == (
        Figures(path=tmp_path / "out", metrics={"accuracy": 0.9, "steps": 7}),
        Figures(path=tmp_path / "runs" / "a", metrics={"loss": 2}),
        Figures(path=tmp_path / "runs" / "b", metrics={"loss": 1}),
    )
    everything = outcome.read_figures(leave(tmp_path, loss=4), ["./"], {})
    assert [one.metrics for one in everything] == [{"loss": 3}, {"loss": 4}, found[0].metrics]


def test_an_earlier_jobs_figures_are_not_this_ones(tmp_path: Path) -> None:
    """Whatever the clocks say: only what was written since counts."""
    path = leave(tmp_path / "out", loss=1) / "metrics.json"
    before = outcome.read_output_times(tmp_path, ["out"])
    assert outcome.read_figures(tmp_path, ["out"], before) == ()
    os.utime(path, (0, 0))
    assert len(outcome.read_figures(tmp_path, ["out"], before)) == 1


@pytest.mark.parametrize(
    "text", ["", "[1]", "{", '{"loss": "small"}', "x" * (1 << 17), "[" * 60_000, '{"loss": NaN}',
             f'{{"loss": 1{"0" * 400}}}', '{"\\u001b[2Jx": 1}', '{"loss": Infinity}'],
)  # fmt: skip
def test_other_files_of_that_name_do_no_harm(tmp_path: Path, text: str) -> None:
    leave(tmp_path / "out")
    (tmp_path / "out" / "metrics.json").write_text(text)
    outputs = ["out", "/abs", "**bad**/[", "../x", "n" * 300, ""]
    assert outcome.read_figures(tmp_path, outputs, {}) == ()


def test_pipes_and_links_are_not_read(tmp_path: Path) -> None:
    for name in ("pipe", "link"):
        (tmp_path / name).mkdir()
    os.mkfifo(tmp_path / "pipe" / "metrics.json")
    secret = leave(tmp_path / "secret", loss=1) / "metrics.json"
    (tmp_path / "link" / "metrics.json").symlink_to(secret)
    assert outcome.read_figures(tmp_path, ["pipe", "link"], {}) == ()


def test_the_line(tmp_path: Path) -> None:
    figures = {"accuracy": 0.98312, "loss": 0.05, "samples_per_second": 12345.6, "steps": 3}
    trained = Figures(path=Path("/p/out"), metrics=figures)
    assert outcome.format_figures(trained) == "accuracy 0.983, loss 0.05, 12,346 samples/s: /p/out"
    trained = Figures(path=Path("/p/o\x1bt"), metrics={"perplexity": 12.5})
    assert outcome.format_figures(trained) == "perplexity 12.5: /p/o?t"
