"""What earlier jobs took: kept, damaged, and turned into rates."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from bundle.driver.forecast import Nodes, a_step, staging
from bundle.protocol.events import Record, StagingWork
from bundle.protocol.job import ASSUMED
from stager import forecast
from stager.core.store import Store
from stager.forecast import (
    FILE,
    KEPT,
    Basis,
    JobTimer,
    Seen,
    basis,
    find_known_rates,
    read_history,
    record_times,
)
from tests.support.events import record as event_record
from tests.support.past_jobs import SEEN, WORK, as_expected


def test_what_is_kept_is_read_again(tmp_path: Path) -> None:
    store = Store(tmp_path / "root")
    assert read_history(store) == ()
    assert not store.root.exists()
    assert record_times(store, SEEN)
    other = replace(SEEN, send=None, unpack=None, nodes=6)
    assert record_times(store, other)
    assert read_history(store) == (SEEN, other)
    assert json.loads((store.root / FILE).read_text())["version"] == forecast.VERSION


def test_only_the_last_few_are_kept(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for number in range(1, KEPT + 4):
        record_times(store, replace(SEEN, nodes=number))
    assert [one.nodes for one in read_history(store)] == list(range(4, KEPT + 4))


def raw(**changed: Any) -> dict[str, Any]:
    return {"version": forecast.VERSION, "jobs": [{**asdict(SEEN), **changed}]}


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "null",
        "[" * 100_000,
        json.dumps({"version": 99, "jobs": []}),
        json.dumps({"jobs": []}),
        json.dumps({"version": forecast.VERSION, "jobs": 7}),
        json.dumps({"version": forecast.VERSION, "jobs": [7]}),
        json.dumps(raw(colour="red")),
        json.dumps(raw(nodes=0)),
        json.dumps(raw(nodes="3")),
        json.dumps(raw(step=-1)),
        json.dumps(raw(stage=float("nan"))),
        json.dumps(raw(send="fast")),
        json.dumps(raw(work={"sent": 1})),
        json.dumps(raw(work=[])),
        json.dumps(raw(work={**asdict(WORK), "files": -1})),
    ],
)
def test_a_damaged_file_counts_as_none_and_is_begun_anew(tmp_path: Path, content: str) -> None:
    store = Store(tmp_path)
    (tmp_path / FILE).write_text(content)
    assert read_history(store) == ()
    assert find_known_rates(store) == Basis()
    assert record_times(store, SEEN)
    assert read_history(store) == (SEEN,)


def test_a_root_that_cannot_be_written_is_no_failure(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert record_times(Store(tmp_path / "file" / "root"), SEEN) is False


# --- rates ---------------------------------------------------------------------------------------


def test_without_jobs_rates_are_assumed() -> None:
    assert basis(()) == Basis(rates=ASSUMED, jobs=0, nodes=0)
    assert basis(()).text == "assumed; a job that sends its bundle measures them"


@pytest.mark.parametrize("factor", [0.25, 1.0, 3.0])
@pytest.mark.parametrize("relayed", [True, False])
def test_rates_are_those_that_explain_what_was_seen(factor: float, relayed: bool) -> None:
    jobs = [as_expected(nodes, factor=factor, relayed=relayed) for nodes in (3, 6)]
    found = basis(jobs)
    expected = ASSUMED.scaled(send=factor, unpack=factor, step=factor)
    assert asdict(found.rates) == pytest.approx(asdict(expected))
    assert found.text == "measured on 2 jobs of up to 6 nodes"
    alone = basis([as_expected(nodes=1)])
    assert alone.text == "measured on 1 job of up to 1 node"


def test_nodes_that_were_one_machine_do_not_make_a_cluster_look_slow() -> None:
    """Fitted to two nodes, the model then speaks of six."""
    two, six = (Nodes(count, cpus=2, sharing=count) for count in (2, 6))
    rates = ASSUMED.scaled(send=2.0, unpack=3.0, step=1.5)
    made = staging(WORK, two, rates, relayed=False)
    seen = replace(SEEN, nodes=2, cpus=2, step=a_step(two, rates), send=made.send)
    found = basis([replace(seen, unpack=made.unpack)], one_machine=True).rates
    assert asdict(found) == pytest.approx(asdict(rates))
    assert staging(WORK, six, found).seconds == pytest.approx(staging(WORK, six, rates).seconds)


def test_one_job_that_was_disturbed_does_not_count() -> None:
    jobs = [as_expected(), as_expected(factor=50.0), as_expected()]
    assert asdict(basis(jobs).rates) == pytest.approx(asdict(ASSUMED))


def test_where_only_the_whole_is_known_it_stands_for_both() -> None:
    one = as_expected(factor=2.0, send=None, unpack=None)
    found = basis([one]).rates
    assert asdict(found) == pytest.approx(asdict(ASSUMED.scaled(send=2.0, unpack=2.0, step=2.0)))


def test_a_small_delivery_says_nothing_of_rates() -> None:
    small = StagingWork(sent=200_000, bytes=500_000, files=80, linked=34_000)
    found = basis([as_expected(work=small, send=9.0, unpack=9.0)]).rates
    assert asdict(found) == pytest.approx(asdict(ASSUMED))


def test_a_clock_that_jumped_is_kept_within_bounds() -> None:
    assert basis([as_expected(send=1e9, step=0.0)]).rates.link == pytest.approx(ASSUMED.link / 100)


# --- what a job shows ----------------------------------------------------------------------------


def plan(*hows: str) -> dict[str, Any]:
    work = asdict(WORK)
    groups = [{"nodes": ["n1", "n2", "n3"], "how": how, "work": work} for how in hows]
    return {"event": "plan", "cpus": 4, "groups": groups}


def ends() -> list[dict[str, Any]]:
    return [
        {"event": "end", "phase": "preflight", "seconds": 0.5},
        {"event": "end", "phase": "unpack", "seconds": 6.0},
    ]


def unpacked(*seconds: float, ok: bool = True) -> list[dict[str, Any]]:
    return [
        {"event": "unpack", "node": f"n{n}", "ok": ok, "unpack_seconds": one}
        for n, one in enumerate(seconds)
    ]


def seen(*events: dict[str, Any]) -> Seen | None:
    watch = JobTimer()
    for event in events:
        watch.take(event_record(**event))
    return watch.seen()


def test_what_a_job_shows() -> None:
    sent = {"event": "sent", "seconds": 2.5}
    assert seen(plan("sbcast"), sent, *unpacked(3.0, 4.0, 2.0), *ends()) == SEEN
    bare = replace(SEEN, send=None, unpack=None)
    assert seen(plan("present", "sbcast"), *ends()) == bare
    relayed = seen(plan("relay"), {**sent, "relayed": True}, *unpacked(3.0, 4.0, 2.0), *ends())
    assert relayed == replace(SEEN, relayed=True)


@pytest.mark.parametrize(
    "events",
    [
        [],
        ends(),
        [plan(), *ends()],
        [plan("present"), *ends()],
        [plan("shared"), *ends()],
        [plan("sbcast")],
        [plan("sbcast"), ends()[0]],
        [plan("sbcast", "shared"), *ends()],
        [plan("sbcast", "sbcast"), *ends()],
        [plan("sbcast"), *unpacked(1.0, ok=False), *ends()],
        [plan("sbcast"), *[{"event": "sent", "seconds": 1.0}] * 2, *ends()],
    ],
)
def test_a_job_that_shows_nothing(events: list[dict[str, Any]]) -> None:
    """Nothing was sent, it did not come to an end, or not at the first try."""
    assert seen(*events) is None


def test_a_job_is_kept_as_it_goes(tmp_path: Path) -> None:
    store, told = Store(tmp_path), list[Record]()
    events = [event_record(**event) for event in (plan("sbcast"), *ends())]
    with forecast.keep_times(store, told.append) as listen:
        for event in events:
            listen(event)
    assert told == events
    assert [one.stage for one in read_history(store)] == [6.0]


def test_a_job_that_ends_badly_is_not_kept(tmp_path: Path) -> None:
    def interrupted() -> None:
        with forecast.keep_times(Store(tmp_path), lambda event: None) as listen:
            for event in [plan("sbcast"), *ends()]:
                listen(event_record(**event))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert read_history(Store(tmp_path)) == ()
