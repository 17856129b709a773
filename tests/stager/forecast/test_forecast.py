"""What staging is going to take: every case, and from how many nodes on it pays."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from bundle.driver.forecast import (
    Nodes,
    forecast,
    forecast_staging,
    forecast_step,
    measure_staging_work,
)
from bundle.driver.plan import excerpt_size
from bundle.format.manifest import Layer
from bundle.protocol.codec import encode
from bundle.protocol.enumerations import Action, Launcher, TransferWay
from bundle.protocol.events import Record, StagingWork
from bundle.protocol.job import ASSUMED
from stager.config.job_settings import JobOptions
from stager.config.load import load
from stager.core.store import Store
from stager.forecast import (
    BYTES,
    CALLS,
    FILE,
    FILES,
    KEPT,
    LUSTRE,
    NFS,
    VERSION,
    KnownRates,
    MeasuredJob,
    Setting,
    SharedFiles,
    estimate,
    estimate_from_files,
    estimate_rates,
    estimate_shared_reads,
    find_break_even,
    find_known_rates,
    forecast_cold,
    forecast_one_changed,
    forecast_unchanged,
    keep_times,
    measure_job,
    plan_job,
    read_history,
    record_times,
)
from stager.jobs.preparation import prepare
from tests.support.building import Project
from tests.support.demo_project import ZERO, manifest
from tests.support.events import record as event_record
from tests.support.past_jobs import SEEN, WORK, as_expected

SIZES = {"small": (1_000, 10), "middling": (400_000, 60), "torch": (300_000_000, 30_000)}
FAST = LUSTRE._replace(name="fast", call=1e-6, calls=1e9, node=1e12, all=1e15)


def layer(name: str, kind: str = "wheel") -> Layer:
    size, files = SIZES.get(name, (1_000, 5))
    return Layer(id=ZERO, kind=kind, name=name, version="1", head=ZERO, head_size=1, size=size,
                 unpacked_size=4 * size, files=files)  # fmt: skip


MANIFEST = replace(
    manifest("torch"),
    layers=(layer("torch"), layer("demo", "project"), layer("small"), layer("middling")),
)
SETTING = Setting(
    bundle=Path("/b.tar"),
    manifest=MANIFEST,
    ranks=2,
    cpus=4,
    launcher=Launcher.TORCHRUN,
    relayed=True,
    basis=KnownRates(),
)


def test_the_three_cases() -> None:
    nodes = Nodes(8, cpus=4, ranks=2)
    work = measure_staging_work(MANIFEST.layers, MANIFEST.layers, MANIFEST.size)
    assert forecast_cold(SETTING, 8) == forecast([forecast_staging(work, nodes)], nodes)
    assert forecast_unchanged(SETTING, 8) == forecast([], nodes)
    changed = SETTING.choose_changed()
    assert changed is not None
    assert changed.name == "middling"
    sent = excerpt_size(changed.members)
    delta = StagingWork(sent=sent, bytes=1_600_000, files=60, linked=MANIFEST.files - 60)
    assert forecast_one_changed(SETTING, 8) == forecast([forecast_staging(delta, nodes)], nodes)


def test_from_how_many_nodes_on_it_pays() -> None:
    assert find_break_even(SETTING, LUSTRE) == 1
    assert find_break_even(SETTING, FAST) is None
    few = [layer("small"), replace(layer("middling"), files=300)]
    small = replace(SETTING, manifest=replace(MANIFEST, layers=tuple(few)))
    count = find_break_even(small, NFS)
    assert count is not None
    assert count > 1
    assert forecast_cold(small, count).total < estimate_from_files(small, count, NFS)
    assert forecast_cold(small, count - 1).total >= estimate_from_files(small, count - 1, NFS)


def test_the_report() -> None:
    report = encode(estimate(SETTING, [1, 512]))
    assert report["bundle_bytes"] == MANIFEST.size
    assert (report["nproc_per_node"], report["cpus"], report["launcher"]) == (2, 4, "torchrun")
    assert report["rates"]["basis"].startswith("assumed")
    assert report["rates"]["link"] == ASSUMED.link
    names = ("nodes", "world_size", "width", "levels")
    shapes = [tuple(each[name] for name in names) for each in report["forecasts"]]
    assert shapes == [(1, 2, 1, 1), (512, 1024, 2, 9)]
    one = report["forecasts"][0]
    assert one["cold"] == forecast_cold(SETTING, 1).to_json()
    assert list(one["shared"]) == list(report["pays_from"]) == ["lustre", "nfs"]
    assert report["verdict"] == (
        "staging pays: against Lustre from 1 node on, against NFS from 1 node on"
    )
    few = replace(SETTING, manifest=replace(MANIFEST, layers=(layer("demo", "project"),)))
    bare = estimate(few, [1])
    assert "against Lustre never" in bare.verdict
    assert (bare.changed, bare.forecasts[0].one_changed) == (None, None), "it has no packages"


def test_what_a_dry_run_would_ask_of_slurm(project: Project, tmp_path: Path) -> None:
    packed = project.settings("alpha").build().packed
    layers, size = packed.manifest.layers, packed.manifest.size
    work, nodes = measure_staging_work(layers, layers, size), Nodes(40, cpus=1, ranks=1)
    sends = {
        TransferWay.SBCAST: forecast_staging(work, nodes, relayed=False).send,
        TransferWay.SHARED: size / (NFS.all / 40),
    }
    for way in TransferWay:
        options = JobOptions(nodes=(40, 40), log_dir=tmp_path, allocation="slurm", transfer=way)
        bundle = (packed.path, packed.manifest)
        prepared = prepare(
            load(project.root), options, bundle, action=Action.VERIFY, source="salloc"
        )
        job = plan_job(prepared, ("salloc", "--export=HF_TOKEN=hunter2"))
        assert job.argv == ("salloc", "--export=HF_TOKEN=***")
        assert (job.bundle, job.id, job.nodes) == (packed.path, packed.manifest.id, (40, 40))
        assert (job.transfer, job.bytes_at_most) == (way, size * (way is not TransferWay.SHARED))
        assert (job.forecast.nodes, job.forecast.measured) == (40, False)
        expected = sends.get(way, forecast_staging(work, nodes).send)
        assert job.forecast.seconds.send == pytest.approx(expected, abs=0.001)


# --- What earlier jobs took: kept, damaged, and turned into rates -------------------------------


def test_what_is_kept_is_read_again(tmp_path: Path) -> None:
    store = Store(tmp_path / "root")
    assert read_history(store) == ()
    assert not store.root.exists()
    record_times(store, SEEN)
    other = replace(SEEN, send=None, unpack=None, nodes=6)
    record_times(store, other)
    assert read_history(store) == (SEEN, other)
    assert json.loads((store.root / FILE).read_text())["version"] == VERSION
    for number in range(1, KEPT + 4):
        record_times(store, replace(SEEN, nodes=number))
    assert [one.nodes for one in read_history(store)] == list(range(4, KEPT + 4))
    (tmp_path / "file").write_text("")
    record_times(Store(tmp_path / "file" / "root"), SEEN)  # which cannot be written


def raw(**changed: Any) -> dict[str, Any]:
    return {"version": VERSION, "jobs": [{**asdict(SEEN), **changed}]}


DAMAGED = [
    *({"version": 99, "jobs": []}, {"jobs": []}),
    *({"version": VERSION, "jobs": jobs} for jobs in (7, [7])),
    *(raw(nodes=0), raw(nodes="3"), raw(step=-1), raw(stage=float("nan")), raw(send="fast")),
    *(
        raw(colour="red"),
        raw(work={"sent": 1}),
        raw(work=[]),
        raw(work={**asdict(WORK), "files": -1}),
    ),
]


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "null", "[" * 100_000, *map(json.dumps, DAMAGED)]
)
def test_a_damaged_file_counts_as_none_and_is_begun_anew(tmp_path: Path, content: str) -> None:
    store = Store(tmp_path)
    (tmp_path / FILE).write_text(content)
    assert read_history(store) == ()
    assert find_known_rates(store) == KnownRates()
    record_times(store, SEEN)
    assert read_history(store) == (SEEN,)


# --- rates ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [0.25, 1.0, 3.0])
@pytest.mark.parametrize("relayed", [True, False])
def test_rates_are_those_that_explain_what_was_seen(factor: float, relayed: bool) -> None:
    jobs = [as_expected(nodes, factor=factor, relayed=relayed) for nodes in (3, 6)]
    found = estimate_rates(jobs)
    expected = ASSUMED.scale_rates(send=factor, unpack=factor, step=factor)
    assert asdict(found.rates) == pytest.approx(asdict(expected))
    assert found.text == "measured on 2 jobs of up to 6 nodes"


def test_nodes_that_were_one_machine_do_not_make_a_cluster_look_slow() -> None:
    """Fitted to two nodes, the model then speaks of six."""
    two, six = (Nodes(count, cpus=2, sharing=count) for count in (2, 6))
    rates = ASSUMED.scale_rates(send=2.0, unpack=3.0, step=1.5)
    made = forecast_staging(WORK, two, rates, relayed=False)
    seen = replace(SEEN, nodes=2, cpus=2, step=forecast_step(two, rates), send=made.send)
    found = estimate_rates([replace(seen, unpack=made.unpack)], one_machine=True).rates
    assert asdict(found) == pytest.approx(asdict(rates))
    assert forecast_staging(WORK, six, found).seconds == pytest.approx(
        forecast_staging(WORK, six, rates).seconds
    )


def test_what_says_little_of_rates_changes_none() -> None:
    """A small delivery, one job that was disturbed; and a clock that jumped is kept in bounds."""
    small = StagingWork(sent=200_000, bytes=500_000, files=80, linked=34_000)
    disturbed = [as_expected(), as_expected(factor=50.0), as_expected()]
    for jobs in ([as_expected(work=small, send=9.0, unpack=9.0)], disturbed):
        assert asdict(estimate_rates(jobs).rates) == pytest.approx(asdict(ASSUMED))
    jumped = estimate_rates([as_expected(send=1e9, step=0.0)])
    assert jumped.rates.link == pytest.approx(ASSUMED.link / 100)
    assert jumped.text == f"measured on 1 job of up to {as_expected().nodes} nodes"


# --- what a job shows ----------------------------------------------------------------------------


def plan(*hows: str) -> dict[str, Any]:
    work = asdict(WORK)
    groups = [{"nodes": ["n1", "n2", "n3"], "how": how, "work": work} for how in hows]
    return {"event": "plan", "cpus": 4, "groups": groups}


ENDS = [
    {"event": "end", "phase": "preflight", "seconds": 0.5},
    {"event": "end", "phase": "unpack", "seconds": 6.0},
]


def unpacked(*seconds: float, ok: bool = True) -> list[dict[str, Any]]:
    return [
        {"event": "unpack", "node": f"n{n}", "ok": ok, "unpack_seconds": one}
        for n, one in enumerate(seconds)
    ]


def seen(*events: dict[str, Any]) -> MeasuredJob | None:
    return measure_job(event_record(**event) for event in events)


def test_what_a_job_shows() -> None:
    sent = {"event": "sent", "seconds": 2.5}
    answers = unpacked(3.0, 4.0, 2.0)
    assert seen(plan("sbcast"), sent, *answers, *ENDS) == SEEN
    assert seen(plan("present", "sbcast"), *ENDS) == replace(SEEN, send=None, unpack=None)
    relayed = seen(plan("relay"), {**sent, "relayed": True}, *answers, *ENDS)
    assert relayed == replace(SEEN, relayed=True)


@pytest.mark.parametrize(
    "events",
    [
        ENDS,
        [plan(), *ENDS],
        [plan("present"), *ENDS],
        [plan("shared"), *ENDS],
        [plan("sbcast"), ENDS[0]],
        [plan("sbcast", "shared"), *ENDS],
        [plan("sbcast", "sbcast"), *ENDS],
        [plan("sbcast"), *unpacked(1.0, ok=False), *ENDS],
        [plan("sbcast"), *[{"event": "sent", "seconds": 1.0}] * 2, *ENDS],
    ],
)
def test_a_job_that_shows_nothing(events: list[dict[str, Any]]) -> None:
    """Nothing was sent, it did not come to an end, or not at the first try."""
    assert seen(*events) is None


def test_a_job_is_kept_as_it_goes_unless_it_ends_badly(tmp_path: Path) -> None:
    store, told = Store(tmp_path), list[Record]()
    events = [event_record(**event) for event in (plan("sbcast"), *ENDS)]
    with suppress(KeyboardInterrupt), keep_times(store, told.append) as listen:
        for event in events:
            listen(event)
        raise KeyboardInterrupt
    assert told == events
    assert read_history(store) == ()
    with keep_times(store, told.append) as listen:
        for event in events:
            listen(event)
    assert [one.stage for one in read_history(store)] == [6.0]


# --- Running from a shared file system: the published figures that the rates were taken from ----


SIZE = int(BYTES)
IMPORT = 5.5
"""Seconds of the reference import with all files at hand; published times have them in."""


@pytest.mark.parametrize(
    ("nodes", "share", "shared", "own", "published"),
    [
        # Frontier: from Lustre and from NFS; eight ranks a node are a guess.
        (Nodes(8, ranks=8), 1.0, LUSTRE, IMPORT, pytest.approx(57, rel=0.05)),
        (Nodes(8, ranks=8), 1.0, NFS, IMPORT, pytest.approx(244, rel=0.05)),
        # An import of torch makes 17,800 of the reference's 71,270 path calls.
        (Nodes(2048, ranks=12), 17_800 / CALLS, LUSTRE, 1.7, pytest.approx(120, rel=0.1)),
    ],
)
def test_published_times_are_met(
    nodes: Nodes, share: float, shared: SharedFiles, own: float, published: object
) -> None:
    waiting = estimate_shared_reads(int(FILES * share), int(SIZE * share), nodes, shared)
    assert waiting + own == published
