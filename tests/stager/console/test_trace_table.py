"""What a smoke test did not read, as lines for a file, a table, and lines to paste."""

from __future__ import annotations

import io
import sys
from typing import Any

import pytest
from rich.console import Console

from stager.console.tables import (
    MOST_ROWS,
    format_trace,
    make_trace_table,
    propose_pruning,
    summarize_trace,
)
from stager.tracing import TracedPackage, TraceResult, UnreadFiles

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

LONG = "transformers/models/" + "a_very_long_name/" * 4


def part(path: str = "p/test/", size: int = 1_000_000, **more: Any) -> UnreadFiles:
    values = {"package": "p", "files": 2, "pattern": f"p:/{path}", "reason": "", **more}
    return UnreadFiles(path=path, bytes=size, **values)


def traced(*parts: UnreadFiles, prune: tuple[str, ...] = ()) -> TraceResult:
    package = TracedPackage(
        name="idle", version="1", files=3, bytes=10, files_read=1, bytes_read=1, used=False
    )
    proposed = tuple(part.pattern for part in parts if part.pattern is not None)
    return TraceResult(
        command=("train.py",), job_id="1", log_dir="/logs", gpus=0, files=34_904,
        bytes=1_391_605_076, files_read=3_351, bytes_read=731_000_000, packages=(package,),
        unread=parts, proposed=proposed, proposed_files=2 * len(proposed),
        proposed_bytes=1_000_000 * len(proposed), prune=prune,
    )  # fmt: skip


def test_lines_fit_80_columns_and_are_not_many() -> None:
    parts = [part(f"{LONG}{number}/", package="a-name-that-is-too-long") for number in range(50)]
    shown = format_trace(traced(*parts))
    assert len(shown) == 1 + MOST_ROWS + 1
    assert all(len(line) <= 80 for line in shown)
    assert "..." in shown[1]
    assert shown[1].split()[-3:] == ["2", "1.0", "MB"]
    assert shown[-1].split() == ["30", "more", "60", "30.0", "MB"]
    assert format_trace(traced()) == []


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_of_a_terminal_fits_too(width: int) -> None:
    stream = io.StringIO()
    Console(file=stream, width=width).print(
        make_trace_table(traced(part(LONG), part("p/\x1b[31m/")))
    )
    assert all(len(line) <= width for line in stream.getvalue().splitlines())
    assert "\x1b" not in stream.getvalue()


def test_the_summary_says_what_was_read_and_what_to_think_of() -> None:
    gpu = part("", pattern=None, reason="for a GPU, and the test ran without one")
    said = list(summarize_trace(traced(gpu, prune=("tests",))))
    assert said[0] == "the smoke test read 3,351 files of 34,904, 731.0 MB of 1.4 GB"
    assert "it passed without what environment.prune leaves out" in said
    assert "nothing was read of idle, metadata aside" in said
    assert any("files for a GPU are not proposed" in line for line in said)
    assert said[-1] == "nothing is proposed to be left out"
    assert "nothing is proposed to be left out" not in summarize_trace(traced(part()))
    assert format_trace(traced(gpu))[1].split()[1:3] == ["(for", "a"]


def test_a_proposal_can_be_pasted_with_what_is_there_already() -> None:
    odd = r"p:/p/\[odd]\*.a"
    pasted = list(propose_pruning(traced(part(), part(pattern=odd), prune=("headers",))))
    assert "without 4 files, 2.0 MB" in pasted[0]
    assert tomllib.loads("\n".join(pasted)) == {"prune": ["headers", "p:/p/test/", odd]}
    assert list(propose_pruning(traced(prune=("headers",)))) == []
