"""What staging is going to take: every case, and from how many nodes on it pays."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bundle.driver.forecast import Nodes, forecast, staging, staging_work
from bundle.driver.plan import excerpt_size
from bundle.format.manifest import Layer, Manifest, Part
from bundle.protocol.codec import encode
from bundle.protocol.enumerations import Action, Launcher, TransferWay
from bundle.protocol.events import StagingWork
from bundle.protocol.job import ASSUMED, Requires
from stager.config.job_settings import JobOptions
from stager.config.load import load
from stager.forecast import (
    LUSTRE,
    NFS,
    Basis,
    Setting,
    cold,
    estimate,
    from_files,
    from_shared,
    one_changed,
    pays_from,
    planned,
    setting_of,
    unchanged,
)
from stager.jobs.preparation import prepare
from tests.support.building import Project
from tests.support.demo_project import ZERO, config

SIZES = {"small": (1_000, 10), "middling": (400_000, 60), "torch": (300_000_000, 30_000)}
FAST = replace(LUSTRE, name="fast", call=1e-6, calls=1e9, node=1e12, all=1e15)


def layer(name: str, kind: str = "wheel") -> Layer:
    size, files = SIZES.get(name, (1_000, 5))
    return Layer(id=ZERO, kind=kind, name=name, version="1", head=ZERO, head_size=1, size=size,
                 unpacked_size=4 * size, files=files)  # fmt: skip


MANIFEST = Manifest(
    name="demo",
    requires=Requires(python="3.11", machine="x86_64", libc="glibc", libc_version="2.28"),
    node=Part(name="node.pyz", sha256=ZERO, size=1),
    decompressor=None,
    layers=(layer("torch"), layer("demo", "project"), layer("small"), layer("middling")),
    packages=("torch",),
    imports=("torch",),
)
SETTING = Setting(
    bundle=Path("/b.tar"),
    manifest=MANIFEST,
    size=300_500_000,
    ranks=2,
    cpus=4,
    launcher=Launcher.TORCHRUN,
    relayed=True,
    basis=Basis(),
)


def test_the_three_cases() -> None:
    nodes = Nodes(8, cpus=4, ranks=2)
    work = staging_work(MANIFEST.layers, MANIFEST.layers, SETTING.size)
    assert cold(SETTING, 8) == forecast([staging(work, nodes)], nodes)
    assert unchanged(SETTING, 8) == forecast([], nodes)
    assert SETTING.changed is not None
    assert SETTING.changed.name == "middling"
    sent = excerpt_size(SETTING.changed.members)
    delta = StagingWork(sent=sent, bytes=1_600_000, files=60, linked=MANIFEST.files - 60)
    assert one_changed(SETTING, 8) == forecast([staging(delta, nodes)], nodes)
    assert unchanged(SETTING, 8).total < one_changed(SETTING, 8).total < cold(SETTING, 8).total  # type: ignore[union-attr]


def test_a_bundle_without_packages() -> None:
    bare = replace(SETTING, manifest=replace(MANIFEST, layers=(layer("demo", "project"),)))
    assert one_changed(bare, 8) is None
    result = estimate(bare, [8])
    assert (result.changed, result.forecasts[0].one_changed) == (None, None)


def test_running_from_shared_files_starts_the_launcher_too() -> None:
    waiting = from_shared(MANIFEST.files, MANIFEST.unpacked_size, SETTING.nodes(8), NFS)
    assert from_files(SETTING, 8, NFS) == pytest.approx(unchanged(SETTING, 8).launch + waiting)


def test_from_how_many_nodes_on_it_pays() -> None:
    assert pays_from(SETTING, LUSTRE) == 1
    assert pays_from(SETTING, FAST) is None
    few = [layer("small"), replace(layer("middling"), files=300)]
    small = replace(SETTING, manifest=replace(MANIFEST, layers=tuple(few)), size=500_000)
    count = pays_from(small, NFS)
    assert count is not None
    assert count > 1
    assert cold(small, count).total < from_files(small, count, NFS)
    assert cold(small, count - 1).total >= from_files(small, count - 1, NFS)


def test_the_report() -> None:
    report = encode(estimate(SETTING, [1, 512]))
    assert report["bundle_bytes"] == SETTING.size
    assert (report["nproc_per_node"], report["cpus"], report["launcher"]) == (2, 4, "torchrun")
    assert report["rates"]["basis"].startswith("assumed")
    assert report["rates"]["link"] == ASSUMED.link
    one, many = report["forecasts"]
    assert (one["nodes"], one["world_size"], one["width"], one["levels"]) == (1, 2, 1, 1)
    assert (many["world_size"], many["width"], many["levels"]) == (1024, 2, 9)
    assert one["cold"] == cold(SETTING, 1).to_json()
    assert list(one["shared"]) == list(report["pays_from"]) == ["lustre", "nfs"]
    assert report["verdict"] == (
        "staging pays: against Lustre from 1 node on, against NFS from 1 node on"
    )
    few = replace(SETTING, manifest=replace(MANIFEST, layers=(layer("small"),)))
    assert "against Lustre never" in estimate(few, [1]).verdict


def test_measured_rates_are_used_and_named() -> None:
    slow = Basis(rates=ASSUMED.scaled(send=10.0), jobs=2, nodes=16)
    measured = replace(SETTING, basis=slow)
    assert cold(measured, 8).send == pytest.approx(10 * cold(SETTING, 8).send)
    assert estimate(measured, [8]).rates.basis == "measured on 2 jobs of up to 16 nodes"


def test_what_a_dry_run_would_ask_of_slurm(project: Project, tmp_path: Path) -> None:
    packed = project.settings("alpha", more='[launch]\nlauncher = "srun"').build().packed
    options = JobOptions(command=("train.py",), nodes=(3, 3), log_dir=tmp_path, allocation="slurm")
    prepared = prepare(
        load(project.root),
        options,
        (packed.path, packed.manifest),
        action=Action.RUN,
        source="salloc",
    )
    job = planned(prepared, ("salloc", "--nodes=3", "--export=HF_TOKEN=hunter2"))
    assert job.argv == ("salloc", "--nodes=3", "--export=HF_TOKEN=***")
    assert (job.bundle, job.id) == (packed.path, packed.manifest.id)
    assert (job.transfer, job.bytes_at_most, job.nodes) == ("auto", packed.size, (3, 3))
    assert (job.forecast.nodes, job.forecast.measured) == (3, False)


@pytest.mark.parametrize("way", list(TransferWay))
def test_a_dry_run_heeds_the_way_that_is_asked_for(
    project: Project, tmp_path: Path, way: TransferWay
) -> None:
    packed = project.settings("alpha").build().packed
    options = JobOptions(nodes=(40, 40), log_dir=tmp_path, allocation="slurm", transfer=way)
    bundle = packed.path, packed.manifest
    prepared = prepare(load(project.root), options, bundle, action=Action.VERIFY, source="salloc")
    job = planned(prepared, ("salloc",))
    assert job.transfer is way
    assert job.bytes_at_most == (0 if way is TransferWay.SHARED else packed.size)
    work = staging_work(packed.manifest.layers, packed.manifest.layers, packed.size)
    nodes = Nodes(40, cpus=1, ranks=1)
    relayed = staging(work, nodes).send
    sends = {
        TransferWay.SBCAST: staging(work, nodes, relayed=False).send,
        TransferWay.SHARED: packed.size / (NFS.all / 40),
    }
    assert job.forecast.seconds.send == pytest.approx(sends.get(way, relayed), abs=0.001)


def test_the_settings_of_a_project(tmp_path: Path) -> None:
    bundle = tmp_path / "b.tar"
    plain = setting_of(config(tmp_path), bundle, MANIFEST, Basis())
    assert plain.size == MANIFEST.size
    assert (plain.ranks, plain.cpus, plain.launcher) == (1, 1, "torchrun")
    tables = {
        "cluster": {"cpus-per-task": 8},
        "launch": {"nproc-per-node": 2, "launcher": "srun"},
    }
    more = setting_of(config(tmp_path, **tables), bundle, MANIFEST, Basis())
    assert (more.ranks, more.cpus, more.launcher) == (2, 8, "srun")
    without = setting_of(config(tmp_path, launch=tables["launch"]), bundle, MANIFEST, Basis())
    assert without.cpus == 2
