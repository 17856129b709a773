"""The job value: settings, options and bundle put together, and what is refused beforehand."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bundle.protocol.enumerations import Action, Allocation, Backend, Stage, TransferWay
from bundle.protocol.job import Job
from stager.config.job_settings import JobOptions
from stager.core.errors import ConfigError, StagerError
from stager.jobs.job_description import apply_options, assign_number, make_job
from stager.slurm.request import make_request
from tests.support.demo_project import config, manifest


def make(root: Path, options: JobOptions, action: Action = Action.RUN, **tables: Any) -> Any:
    """Make a job: a local one, unless the options say another allocation."""
    if options.allocation == "auto":
        options = replace(options, allocation=Allocation.LOCAL)
    bundle = root / "demo.pkgs.tar"
    return make_job(config(root, **tables), options, bundle, manifest("torch", "numpy"), action)


def test_the_job_says_what_the_far_side_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    job = make(tmp_path, JobOptions(command=("a.py",)))
    assert (job.name, job.allocation, job.action) == ("demo", "local", "run")
    assert (job.run_dir, job.bundle) == (str(tmp_path), str(tmp_path / "demo.pkgs.tar"))
    assert (job.bundle_id, job.packages) == (manifest("torch", "numpy").id, ("torch", "numpy"))
    assert job.log_dir == str(Path(os.environ["HOME"], "slurm_logs"))
    assert job.room[0] >= 2_000_000
    assert job.import_modules is False
    assert make(tmp_path, JobOptions(), action=Action.VERIFY).import_modules is True
    job = assign_number(job)
    assert Job.from_json(job.to_json()) == job
    (tmp_path / "file").write_text("")
    with pytest.raises(StagerError, match="log directory") as caught:
        make(tmp_path, JobOptions(command=("a.py",), log_dir=tmp_path / "file" / "logs"))
    assert "--log-dir" in caught.value.hint


def test_ids_differ_even_at_the_same_moment(tmp_path: Path) -> None:
    """Two jobs of one id would meet at one port, and write into each other's logs."""
    options = JobOptions(log_dir=tmp_path / "logs", command=("a",))
    with ThreadPoolExecutor(4) as pool:
        ids = list(pool.map(lambda _: assign_number(make(tmp_path, options)).id, range(80)))
    assert len(set(ids)) == 80
    assert all(number.isdecimal() for number in ids)
    logs = {path.name for path in (tmp_path / "logs").glob("events.*")}
    assert logs == {f"events.{number}.jsonl" for number in ids}


@pytest.mark.parametrize(
    ("tables", "options", "message", "hint"),
    [
        ({"launch": {"launcher": "srun"}}, {}, "launch.launcher", "processes"),
        ({"launch": {"launcher": "srun", "max-restarts": 2}}, {}, "launch.max-restarts", ""),
        ({"launch": {"launcher": "srun"}, "cluster": {"nodes": "1:2"}}, {}, "--nodes 1:2", ""),
        ({}, {"transfer": TransferWay.RELAY}, "nothing is sent to this machine", ""),
        ({}, {"stage": Stage.ALWAYS}, "nothing is sent to this machine", ""),
        ({}, {"command": ()}, "nothing to run", "as in: -- train.py"),
        ({"launch": {"watch": False}}, {"hang_timeout": 60.0}, "--hang-timeout", "watch = false"),
        ({}, {"nodes": (1, 2), "spares": 1}, "--spares 1: a job of --nodes 1:2", "fixed number"),
        ({}, {"nodes": (2, 2), "min_nodes": 3}, "3 must work, and the job asks for 2 nodes", ""),
        ({"cluster": {"transfer": "relay", "stage": "never"}}, {"allocation": "slurm"},
         "contradicts stage", "leave one of them out"),
        ({"cluster": {"transfer": "shared", "stage": "always"}}, {"allocation": "slurm"},
         "contradicts stage", "leave one of them out"),
    ],
)  # fmt: skip
def test_what_a_job_cannot_do_is_refused_before_anything_is_written(
    tmp_path: Path, tables: dict[str, Any], options: dict[str, Any], message: str, hint: str
) -> None:
    asked = JobOptions(**{"command": ("a.py",), "log_dir": tmp_path / "logs", **options})
    with pytest.raises(ConfigError, match=message) as caught:
        make(tmp_path, asked, **tables)
    assert hint in caught.value.hint
    assert not (tmp_path / "logs").exists()


def test_a_bundle_without_torch_is_verified_and_not_run(tmp_path: Path) -> None:
    options = JobOptions(allocation=Allocation.LOCAL, command=("a.py",), log_dir=tmp_path)
    args = (config(tmp_path), options, tmp_path / "b.tar", manifest("numpy"))
    with pytest.raises(ConfigError, match="torch is not in the bundle"):
        make_job(*args, Action.RUN)
    make_job(*args, Action.VERIFY)
    make(tmp_path, replace(options, command=()), action=Action.VERIFY)


def test_a_job_for_slurm_is_not_bound_yet(tmp_path: Path) -> None:
    """Its number and its nodes are the allocation's, which may not stand before it waits."""
    options = JobOptions(allocation=Allocation.SLURM, command=("a.py",), log_dir=tmp_path / "logs")
    job = make(tmp_path, options, cluster={"nodes": 3, "min-nodes": 2, "cpus-per-task": 4})
    assert (job.allocation, job.id, job.nodes) == ("slurm", "", ())
    assert (job.wanted, job.min_nodes, job.cpus_per_task) == (None, 2, 4)
    job = assign_number(job)
    assert Job.from_json(job.to_json()) == job
    assert list((tmp_path / "logs").glob("*.jsonl")) == []
    assert make(tmp_path, options, launch={"launcher": "srun"}).launch.launcher == "srun"


def test_spare_nodes_come_on_top_of_those_with_ranks(tmp_path: Path) -> None:
    tables = {"cluster": {"nodes": 2, "spares": 2}, "launch": {"retries": 3}}
    options = JobOptions(command=("a.py",), log_dir=tmp_path / "logs")
    job = make(tmp_path, options, **tables)
    assert (job.nodes, job.spares) == (("local1", "local2", "local3", "local4"), 2)
    assert job.launch.retries == 3
    job = make(tmp_path, replace(options, spares=0, retries=0), **tables)
    assert (len(job.nodes), job.spares, job.launch.retries) == (2, 0, 0)


def test_options_win_over_settings_or_add_to_them(tmp_path: Path) -> None:
    tables = {
        "cluster": {"nodes": 3, "exclude": "n1", "stage": "never", "container-mounts": ["/a:/a"]},
        "launch": {
            "pass-env": ["HF_TOKEN"],
            "nproc-per-node": 2,
            "interface": "eth9",
            "hang-timeout": 30,
        },
        "project": {"name": "demo", "outputs": ["out"], "command": ["a.py"]},
    }
    options = JobOptions(
        nodes=(2, 4), min_nodes=2, stage=Stage.ALWAYS, exclude="n2", pass_env=("WANDB_API_KEY",),
        container_image="/i.sqsh", container_mounts=("/b:/b",), partition="gpu", time="5",
        account="lab", dry_run=True, deep=True, allocation=Allocation.SLURM,
        log_dir=tmp_path / "logs", outputs=("more/*.csv", "out"), nproc_per_node=4,
        backend=Backend.GLOO, interface="lo", command=("b.py",), hang_timeout=0.0,
    )  # fmt: skip
    plain = make(tmp_path, JobOptions(log_dir=tmp_path / "logs"), **tables)
    job = make(tmp_path, options, **tables)
    assert plain.nodes == ("local1", "local2", "local3")
    for asked, expected in (
        (plain.launch, (("a.py",), 2, "auto", "eth9")),
        (job.launch, (("b.py",), 4, "gloo", "lo")),
    ):
        said = (asked.command, asked.nproc_per_node, asked.backend, asked.interface)
        assert said == expected
    assert (job.wanted, job.launch.elastic, job.min_nodes) == ((2, 4), (2, 4), 2)
    assert (job.stage, job.dry_run, job.deep) == ("always", True, True)
    assert job.outputs == ("out", "more/*.csv")
    assert job.launch.pass_env == ("HF_TOKEN", "WANDB_API_KEY")
    assert (plain.launch.hang_timeout, job.launch.hang_timeout) == (1800.0, 0.0)
    assert job.launch.watch
    assert not make(tmp_path, options, launch={"watch": False}).launch.watch
    assert job.launch.container_image == "/i.sqsh"
    assert job.launch.container_mounts == ("/a:/a", "/b:/b")
    settled = apply_options(config(tmp_path, **tables), options).cluster
    assert (settled.exclude, settled.partition, settled.time) == ("n1,n2", "gpu", "5")


def test_images_of_apptainer_are_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "here"
    (here / "sandbox").mkdir(parents=True)
    monkeypatch.chdir(here)
    monkeypatch.setenv("HOME", str(tmp_path))
    given = {
        "x.sif": f"{here}/x.sif",
        "~/x.sif": f"{tmp_path}/x.sif",
        "./sandbox": f"{here}/sandbox/",
        "/elsewhere/sandbox/": "/elsewhere/sandbox/",
        "sandbox": "sandbox",  # pyxis takes it for the name of an image
        "nvcr.io#nvidia/pytorch:24.01-py3": "nvcr.io#nvidia/pytorch:24.01-py3",
        "docker://lab/x.sif": "docker://lab/x.sif",
    }
    for named, expected in given.items():
        options = JobOptions(container_image=named)
        assert apply_options(config(tmp_path), options).cluster.container_image == expected
    setting = {"cluster": {"container-image": "images/x.sif"}}
    found = apply_options(config(tmp_path, **setting), JobOptions()).cluster.container_image
    assert found == f"{tmp_path}/images/x.sif"


@pytest.mark.parametrize(
    ("cluster", "options", "stage", "transfer"),
    [
        ({}, {}, Stage.AUTO, "auto"),
        ({"stage": "never"}, {}, Stage.NEVER, "auto"),
        # Who names a way of transfer has decided whether the bundle is sent.
        ({"transfer": "relay"}, {}, Stage.ALWAYS, "relay"),
        ({"transfer": "sbcast", "stage": "always"}, {}, Stage.ALWAYS, "sbcast"),
        ({"transfer": "shared"}, {}, Stage.NEVER, "shared"),
        # An option counts more than the other setting.
        ({"transfer": "relay"}, {"stage": Stage.NEVER}, Stage.NEVER, "auto"),
        ({"stage": "never"}, {"transfer": TransferWay.RELAY}, Stage.ALWAYS, "relay"),
        # One machine sends nothing to itself.
        ({"transfer": "relay"}, {"allocation": "local"}, Stage.AUTO, "auto"),
        ({"stage": "always"}, {"allocation": "local"}, Stage.AUTO, "auto"),
    ],
)
def test_how_the_bundle_gets_there(
    tmp_path: Path, cluster: dict[str, Any], options: dict[str, Any], stage: Stage, transfer: str
) -> None:
    asked = JobOptions(**{"command": ("a.py",), "allocation": "slurm", **options})
    job = make(tmp_path, asked, cluster=cluster)
    assert (job.stage, job.transfer) == (stage, transfer)


def test_a_container_of_pyxis_is_not_left_out_without_a_word(tmp_path: Path) -> None:
    """A directory that is not there looks like one. The settings may be a cluster's."""
    options = JobOptions(command=("a.py",), allocation="local")
    for image in ("nvcr.io#nvidia/pytorch:24.01-py3", "./none", "/i.sqsh"):
        with pytest.raises(ConfigError, match="pyxis plugin starts such containers") as caught:
            make(tmp_path, replace(options, container_image=image))
        assert image in caught.value.message
        assert make(tmp_path, options, cluster={"container-image": image}).nodes == ("local1",)
    assert make(tmp_path, replace(options, container_image="x.sif")).launch.is_run_by_apptainer


def test_a_directory_that_apptainer_cannot_bind_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be left out of the container without a word."""
    options = JobOptions(command=("a.py",), container_image="x.sif")
    odd, plain = tmp_path / "lr=1,wd=0", tmp_path / "plain"
    odd.mkdir()
    plain.mkdir()
    monkeypatch.chdir(plain)
    make(plain, options)
    make(plain, replace(options, log_dir=Path("12:30")))  # only the driver writes there
    for root, tables, refused in (
        (odd, {}, str(odd)),
        (plain, {"cluster": {"node-root": "/tmp/a:b"}}, "/tmp/a:b"),
    ):
        with pytest.raises(ConfigError, match=f"cannot bind {refused}"):
            make(root, options, **tables)
    monkeypatch.chdir(odd)
    with pytest.raises(ConfigError, match="cannot bind") as caught:
        make(plain, options)
    assert "rename it" in caught.value.hint
    make(plain, replace(options, container_image=None))


def test_results_of_trackers_in_the_bundle_come_home(tmp_path: Path) -> None:
    bundle = manifest("torch", "wandb", "tensorboard")
    options = JobOptions(allocation=Allocation.LOCAL, command=("a.py",))
    own = config(tmp_path, project={"outputs": ["out", "runs/"]})
    job = make_job(own, options, tmp_path / "demo.pkgs.tar", bundle, Action.RUN)
    assert job.outputs == ("out", "runs/", "wandb")
    assert job.tracked == ("wandb",)
    assert make(tmp_path, options).tracked == ()
    verified = make_job(own, options, tmp_path / "demo.pkgs.tar", bundle, Action.VERIFY)
    assert verified.tracked == ()


def test_an_option_changes_nothing_that_the_site_has_fixed(tmp_path: Path) -> None:
    fixed = replace(config(tmp_path), fixed=("cluster.partition", "launch"))
    assert apply_options(fixed, JobOptions(qos="long")).cluster.qos == "long"
    with pytest.raises(ConfigError, match=r"fixed by your site in .*: cluster.partition, launch.b"):
        apply_options(fixed, JobOptions(partition="mine", backend="nccl"))
    make_request(fixed, {"SALLOC_OPTS": "--mem=1G"})
    with pytest.raises(ConfigError, match=r"-p mine: cluster.partition is fixed by your site"):
        make_request(fixed, {"SALLOC_OPTS": "-p mine"})


def test_ids_differ_at_one_moment_in_different_log_directories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They share a node root, and there a directory of that name."""
    ids = []
    for moment in range(1795406000123000000, 1795406000126000000, 1000000):
        monkeypatch.setattr(time, "time_ns", lambda now=moment: now)
        for number in range(3):
            options = JobOptions(log_dir=tmp_path / f"logs{number}", command=("a",))
            ids.append(assign_number(make(tmp_path, options)).id)
    assert len(set(ids)) == 9
    assert [one[:10] for one in ids] == ["5406000123"] * 3 + ["5406000124"] * 3 + ["5406000125"] * 3
