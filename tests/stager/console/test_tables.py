"""Tables of results, as lines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bundle.protocol.codec import decode, encode
from bundle.protocol.enumerations import Action, NodeFault
from bundle.protocol.events import AllReduceMeasured
from stager.console import tables
from stager.console.job_result import Console
from stager.console.tables import (
    MOST_ROWS,
    format_failed_nodes,
    format_trace,
    propose_pruning,
    summarize_trace,
)
from stager.core import toml
from stager.incidents.node_history import FaultHistory, NodeHistory, NodesResult
from stager.jobs.outcome import Outcome, make_verify_result
from stager.tracing import TracedPackage, TraceResult, UnreadFiles
from tests.support.events import job_ends, record
from tests.support.outcomes import job

# --- The lines of ``stager nodes`` ---------------------------------------------------------------


def test_a_nodes_name_is_never_shortened() -> None:
    """Nor the name of its cluster, which is told where there are several."""
    name = "gpu-a100-rack17-node0042"
    fault = FaultHistory(
        fault=NodeFault.DISK_FULL, times=3, last=0.0, job_id="5872090791784171", project="demo",
        code="no-room", cause="the environment does not fit; needs 2 GB, 1 GB are free",
    )  # fmt: skip
    nodes = tuple(
        NodeHistory(node=name, cluster=cluster, times=3, last=0.0, faults=(fault,))
        for cluster in ("alpha", "beta")
    )
    result = NodesResult(days=7, nodes=nodes, forgotten=None)
    _, *short = format_failed_nodes(result, whole=False)
    assert [line.startswith(f"{name} (alpha)") for line in short] == [True, False]
    assert short[0].endswith("5872090791784171 disk full: the en...")
    _, *whole = format_failed_nodes(result, whole=True)
    assert whole[1].endswith(f"5872090791784171 disk full: {fault.cause}")


# --- What a smoke test did not read, as lines for a file, a table, and lines to paste ------------


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
    parts = [part(f"{LONG}{n}/\x1b[31m", package="a-name-that-is-too-long") for n in range(50)]
    shown = format_trace(traced(*parts))
    assert len(shown) == 1 + MOST_ROWS + 1
    assert all(len(line) <= 80 and line.isprintable() for line in shown)
    assert "..." in shown[1]
    assert shown[1].split()[-3:] == ["2", "1.0", "MB"]
    assert shown[-1].split() == ["30", "more", "60", "30.0", "MB"]
    assert format_trace(traced()) == []


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
    assert toml.loads("\n".join(pasted), Path("x")) == {"prune": ["headers", "p:/p/test/", odd]}
    assert list(propose_pruning(traced(prune=("headers",)))) == []


# --- What ``verify --deep`` measured, in words -------------------------------------------------


def measurements(*rates: float) -> dict[str, Any]:
    pairs = [
        {"a": "n1", "b": f"n{number}", "gb_per_s": rate, "latency_us": 50.4}
        for number, rate in enumerate(rates, 2)
    ]
    seen = {"seconds": 0.0879, "gb_per_s": 0.191, "pairs": pairs}
    return {"world_size": 6, "nodes": ["n1"], "backend": "gloo", "bytes": 16 << 20, **seen}


def measured(*rates: float) -> AllReduceMeasured:
    return decode(AllReduceMeasured, measurements(*rates))


def outcome(deep: dict[str, Any] | None) -> Outcome:
    ended = job_ends(ok=True, **({"deep": deep} if deep else {}))
    return Outcome(job=job(), bundle=Path("/b"), result=ended)


def test_a_line_a_pair_and_the_slowest_named(capsys: pytest.CaptureFixture[str]) -> None:
    found = {"all_reduce": measurements(1.873, 0.5), "skipped": ""}
    assert Console().show_verify(outcome(found)) == 0
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
    assert Console().show_verify(outcome(deep)) == 0
    assert capsys.readouterr().out == ""
    result = make_verify_result(outcome(deep)).deep
    assert (result and {key: encode(result)[key] for key in deep or ()}) == deep


def test_of_many_pairs_the_slowest_are_shown() -> None:
    many = measured(*(1 + number / 10 for number in range(30, 0, -1)))
    assert tables.format_pairs(many)[0] == "PAIR n1 n31 -> 1.10 GB/s 50 us"
    assert len(tables.format_pairs(many)) == tables.SHOWN
    assert tables.summarize_network(many)[1] == (
        "30 pairs of nodes, shown are 20; slowest: n1 and n31, 1.10 GB/s"
    )


def test_the_ranks_own_words_are_for_the_log(capsys: pytest.CaptureFixture[str]) -> None:
    for verbose, shown in (
        (True, ["local1: ALL-REDUCE {}", "local1: a traceback"]),
        (False, ["a traceback"]),
    ):
        console = Console(verbose=verbose)
        console.job(replace(job(), action=Action.VERIFY), Path("/b"))
        said = {"event": "output", "node": "local1", "head": True}
        console.event(record(**said, phase="launch", lines=["ALL-REDUCE {}"]))
        console.event(record(**said, phase="probe", lines=["a traceback"]))
        assert capsys.readouterr().out.splitlines() == shown
