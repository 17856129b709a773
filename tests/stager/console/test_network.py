"""What ``verify --deep`` measured, in words: lines for a pipe, a table for a terminal."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console as RichConsole

from bundle.protocol.codec import decode, encode
from bundle.protocol.enumerations import Action
from bundle.protocol.events import AllReduceMeasured
from stager.console import tables
from stager.console.job_result import Console
from stager.jobs.outcome import Outcome, verify_result
from tests.support.events import job_ends, record
from tests.support.outcomes import job


def measurements(*rates: float) -> dict[str, Any]:
    pairs = [
        {"a": "n1", "b": f"n{number}", "gb_per_s": rate, "latency_us": 50.4}
        for number, rate in enumerate(rates, 2)
    ]
    return {
        "world_size": 6, "nodes": ["n1"], "backend": "gloo", "bytes": 16 << 20,
        "seconds": 0.0879, "gb_per_s": 0.191, "pairs": pairs,
    }  # fmt: skip


def measured(*rates: float) -> AllReduceMeasured:
    return decode(AllReduceMeasured, measurements(*rates))


def outcome(deep: dict[str, Any] | None) -> Outcome:
    ended = job_ends(ok=True, deep=deep) if deep else job_ends(ok=True)
    return Outcome(job=job(), bundle=Path("/b"), result=ended)


def test_a_line_a_pair_and_the_slowest_named(capsys: pytest.CaptureFixture[str]) -> None:
    found = {"all_reduce": measurements(1.873, 0.5), "skipped": ""}
    assert Console().verified(outcome(found)) == 0
    out, err = capsys.readouterr()
    assert out.splitlines() == ["PAIR n1 n2 -> 1.87 GB/s 50 us", "PAIR n1 n3 -> 0.50 GB/s 50 us"]
    assert err.splitlines()[:2] == [
        "all-reduce of 16.8 MB over 6 ranks (gloo): 0.088 s, 0.19 GB/s",
        "2 pairs of nodes; slowest: n1 and n3, 0.50 GB/s",
    ]


@pytest.mark.parametrize("deep", [None, {"all_reduce": None, "skipped": "no torch"}])
def test_nothing_was_measured(
    deep: dict[str, Any] | None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert Console().verified(outcome(deep)) == 0
    assert capsys.readouterr().out == ""
    result = verify_result(outcome(deep)).deep
    assert (result and {key: encode(result)[key] for key in deep or ()}) == deep


def test_one_node_has_no_pairs() -> None:
    assert tables.format_pairs(measured()) == []
    assert len(tables.summarize_network(measured())) == 1


def test_of_many_pairs_the_slowest_are_shown() -> None:
    many = measured(*(1 + number / 10 for number in range(30, 0, -1)))
    assert tables.format_pairs(many)[0] == "PAIR n1 n31 -> 1.10 GB/s 50 us"
    assert len(tables.format_pairs(many)) == tables.SHOWN
    assert tables.summarize_network(many)[1] == (
        "30 pairs of nodes, shown are 20; slowest: n1 and n31, 1.10 GB/s"
    )


def test_the_table_marks_the_slowest() -> None:
    file = io.StringIO()
    shown = RichConsole(file=file, force_terminal=True, width=80, color_system="standard")
    shown.print(tables.pair_table(measured(1.5, 0.5, 2.5)))
    lines = file.getvalue().splitlines()
    assert "GB/s" in lines[0]
    assert "latency/us" in lines[0]
    assert ["\x1b[33m" in line for line in lines[1:]] == [False, True, False]


@pytest.mark.parametrize("verbose", [False, True])
def test_the_ranks_own_words_are_for_the_log(
    verbose: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    console = Console(verbose=verbose)
    console.job(replace(job(), action=Action.VERIFY), Path("/b"))
    said = {"event": "output", "node": "local1", "head": True}
    console.event(record(**said, phase="launch", lines=["ALL-REDUCE {}"]))
    console.event(record(**said, phase="probe", lines=["a traceback"]))
    shown = ["local1: ALL-REDUCE {}", "local1: a traceback"] if verbose else ["a traceback"]
    assert capsys.readouterr().out.splitlines() == shown
