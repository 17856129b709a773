"""What became of the ranks: records of the wrapper, and reports that torchrun really printed."""

import json
from pathlib import Path
from typing import Any

import pytest

from bundle.launch.rank_results import (
    CAUSE,
    ENDED,
    LOST_PEER,
    explain_oom_kills,
    find_failures,
    make_record,
    parse_report,
    select_program_lines,
    weigh_exit,
)
from bundle.protocol.codec import decode
from bundle.protocol.messages import FailureRecord

SAMPLES = Path(__file__).resolve().parents[2] / "samples"
KILLED = (SAMPLES / "torchrun-2.13-sigkill.txt").read_text().splitlines()
CRASHED = (SAMPLES / "torchrun-2.13-sigsegv-and-exit.txt").read_text().splitlines()


def record(job_dir: Path, rank: int, **changes: Any) -> FailureRecord:
    (job_dir / "failures").mkdir(exist_ok=True)
    content = {"v": 1, "node": "node01", "rank": rank, "local_rank": rank, "pid": 4242}
    content |= {"exit_code": 1, "exception": "ValueError", "message": "no", "time": 10.0}
    content |= {"lines": ["Traceback", "ValueError: no"], **changes}
    (job_dir / "failures" / f"{rank}.json").write_text(json.dumps(content))
    return decode(FailureRecord, content, strict=False)


def test_the_killed_rank_comes_first_with_the_last_that_was_written(tmp_path: Path) -> None:
    found = find_failures(str(tmp_path), "node01", KILLED, 99.0)
    assert [(one.rank, one.exit_code) for one in found] == [(1, -9), (0, -15), (2, -15)]
    assert found[0] == FailureRecord(
        node="node01",
        rank=1,
        local_rank=1,
        exit_code=-9,
        exception="",
        message="",
        lines=(
            "[RANK 1] WORLD_SIZE=3",
            "[RANK 2] WORLD_SIZE=3",
            "[RANK 0] WORLD_SIZE=3",
            "rank: 1 is about to be killed",
        ),
        time=99.0,
    )


def test_a_report_is_read_also_where_its_beginning_is_lost() -> None:
    """Only the last lines of a node are kept; the root cause is at the very end."""
    assert parse_report(CRASHED) == [(2, 2, 7), (0, 0, -15), (1, 1, -11)]
    last = KILLED.index("Root Cause (first observed failure):")
    assert parse_report(KILLED[last:]) == [(1, 1, -9)]
    assert parse_report(KILLED[last + 5 :]) == []


def test_nothing_of_torchruns_own_is_taken_for_the_programs() -> None:
    assert [one.lines for one in find_failures("/absent", "node01", CRASHED, 1.0)] == [(), (), ()]


def test_of_a_rank_that_ended_itself_its_last_words_count(tmp_path: Path) -> None:
    record(tmp_path, 0, exception="SystemExit", message="2", exit_code=2, lines=["a traceback"])
    record(tmp_path, 1, exception="ValueError", message="no", lines=["a traceback"])
    own = {0: ["train.py: error: no such option"], 1: ["step 1"]}
    for words, lines in ((own, tuple(own[0])), ({}, ("a traceback",))):
        found = find_failures(str(tmp_path), "node01", [], 99.0, words)
        assert {one.rank: one.lines for one in found} == {0: lines, 1: ("a traceback",)}


def test_the_earliest_cause_comes_first(tmp_path: Path) -> None:
    lost = "[/x.cc:81] Connection closed by peer [127.0.0.1]:1"
    record(tmp_path, 4, time=4.0, exception="RuntimeError", message=lost)
    record(tmp_path, 5, time=7.0)
    own = record(tmp_path, 1, exit_code=1, time=6.0)
    record(tmp_path, 3, time=1.0, exit_code=143)
    found = find_failures(str(tmp_path), "node01", KILLED, 99.0)
    assert [one.rank for one in found] == [1, 5, 4, 3, 0, 2]
    assert found[0] == own


def test_weights() -> None:
    lost = "Connection reset by peer"
    for one in ((1, "ValueError", "no"), (-9, "", ""), (-6, "", ""), (1, "", lost)):
        assert weigh_exit(*one) == CAUSE  # of the last one nothing was raised
    assert [weigh_exit(-15, "", ""), weigh_exit(143, "SystemExit", "143")] == [ENDED] * 2
    for exception, message in (("RuntimeError", lost), ("BrokenPipeError", "")):
        assert weigh_exit(1, exception, message) == LOST_PEER


@pytest.mark.parametrize(
    "content",
    [
        b"null",
        b"\xff",
        b'{"rank":[],"node":"","local_rank":1,"exit_code":1,"exception":"","message":"",'
        b'"lines":[],"time":1}',
    ],
)
def test_what_is_no_record_leaves_the_word_to_torchrun(tmp_path: Path, content: bytes) -> None:
    own = record(tmp_path, 2, exit_code=7)
    (tmp_path / "failures" / "1.json").write_bytes(content)
    (tmp_path / "failures" / "3.json").mkdir()
    for name in (".0.json.123", "notes.txt"):
        (tmp_path / "failures" / name).write_text("half")
    found = {one.rank: one for one in find_failures(str(tmp_path), "node01", KILLED, 99.0)}
    assert (sorted(found), found[1].exit_code, found[2]) == ([0, 1, 2], -9, own)


def test_lines_marked_as_another_ranks_are_not_a_ranks_own() -> None:
    """PyTorch marks tracebacks so, and a rank that was killed leaves none."""
    said = ["plain", "[rank2]: Traceback", "[rank12]: x", "[rank3]: mine", "[rank 3] no mark"]
    assert select_program_lines(said, 3) == ["plain", "[rank3]: mine", "[rank 3] no mark"]


def test_a_kill_while_the_kernel_killed_for_memory_is_told() -> None:
    ranks = [make_record("n", rank, rank, code, [], 1.0) for rank, code in enumerate((1, -9, -15))]
    first, explained, last = explain_oom_kills(ranks, 3, 4)
    assert [first, last] == [ranks[0], ranks[2]]
    assert "1 oom-kill event on this node" in explained.lines[-1]
    assert "2 oom-kill events" in explain_oom_kills(ranks, 3, 5)[1].lines[-1]
    for before, after in ((3, 3), (None, 4), (3, None), (None, None)):
        assert explain_oom_kills(ranks, before, after) == ranks


PRINTED = [
    "ERROR: training failed",
    "Traceback (most recent call last):",
    '  File "/home/u/train.py", line 4, in main',
    "    load()",
    *['  File "/e/lib/python3.11/site-packages/lib.py", line 1, in load', "    load()"] * 20,
    "lib.errors.DataError: row 7: no label",
]


def test_what_a_program_has_caught_and_printed_last_is_its_own_error(tmp_path: Path) -> None:
    """It returned the status, so the exit has nothing to do with the exception any more."""
    record(tmp_path, 2, exception="SystemExit", message="1")
    report = ["  rank      : 2 (local_rank: 2)", "  exitcode  : 1 (pid: 7)"]
    (found,) = find_failures(
        str(tmp_path), "node01", report, 9.0, {2: [*PRINTED, "", "see the docs"]}
    )
    assert (found.exception, found.message) == ("DataError", "row 7: no label")
    assert found.lines[:2] == tuple(PRINTED[2:4])
    assert (len(found.lines), found.lines[-1]) == (20, PRINTED[-1])
    # The same of one that os._exit has ended, without a record; not of one that has gone on.
    assert make_record("n", 0, 0, 1, PRINTED, 1.0).exception == "DataError"
    steps = [f"step {number}" for number in range(10)]
    assert make_record("n", 0, 0, 1, [*PRINTED, *steps], 1.0).exception == ""
    assert make_record("n", 0, 0, -9, PRINTED, 1.0).exception == ""
