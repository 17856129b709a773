"""Getting a job ready: commands for one machine, variables that are not set, how it starts."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bundle.protocol.enumerations import Action
from bundle.redaction.secret_names import is_secret
from stager.config.job_settings import JobOptions
from stager.core.errors import ConfigError
from stager.core.store import Store
from stager.jobs.preparation import (
    Prepared,
    driver_start,
    load_project,
    prepare,
    script_facts,
    source_of,
)
from tests.support.bundles import make_bundle
from tests.support.demo_project import config, manifest


@pytest.fixture(autouse=True)
def _project_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script is in the working directory, so no test needs a real bundle."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")


def make(root: Path, *command: str, source: Any = "salloc", **more: Any) -> Prepared:
    tables = more.pop("tables", {})
    options = JobOptions(command=command, log_dir=root / "logs", **more)
    bundle = root / "demo.pkgs.tar"
    bundle.write_bytes(b"x" * 1000)
    return prepare(
        config(root, **tables),
        options,
        (bundle, manifest("torch")),
        action=Action.RUN,
        source=source,
    )


def test_a_command_for_one_machine_becomes_one_for_each_rank(tmp_path: Path) -> None:
    command = [
        "torchrun",
        "--nproc_per_node=4",
        "--max-restarts=2",
        "--standalone",
        "train.py",
        "--lr",
        "1",
    ]
    made = make(tmp_path, *command)
    assert made.job.launch.command == ("train.py", "--lr", "1")
    assert (made.job.launch.nproc_per_node, made.job.launch.max_restarts) == (4, 2)
    assert any("--standalone" in note for note in made.notes)
    assert made.config.launch.nproc_per_node == 4


def test_the_command_line_wins_over_what_the_command_says(tmp_path: Path) -> None:
    made = make(tmp_path, "torchrun", "--nproc-per-node=4", "train.py", nproc_per_node=2)
    assert made.job.launch.nproc_per_node == 2
    in_settings = {"project": {"name": "demo", "command": ["python", "train.py", "-v"]}}
    assert make(tmp_path, tables=in_settings).job.launch.command == ("train.py", "-v")


@pytest.mark.parametrize(
    ("given", "named", "nodes", "expected"),
    [
        (("n[1-4]",), (), None, 4),  # hosts on the command line count more than a number elsewhere
        (("n[1-4]",), (), (3, 3), 3),
        ((), ("n[1-4]",), None, 2),
        ((), ("n[1-4]",), (3, 3), 3),
    ],
)
def test_how_many_of_the_hosts_are_used(
    given: tuple[str, ...],
    named: tuple[str, ...],
    nodes: tuple[int, int] | None,
    expected: int,
    tmp_path: Path,
) -> None:
    tables = {"cluster": {"nodes": 2, "hosts": [*named]}}
    made = make(tmp_path, "train.py", source="ssh", hosts=given, nodes=nodes, tables=tables)
    assert list(made.job.nodes) == [f"n{number}" for number in range(1, expected + 1)]


def test_hosts_that_the_site_has_fixed_are_used_and_not_changed(tmp_path: Path) -> None:
    site = replace(config(tmp_path, cluster={"hosts": ["n[1-2]"]}), fixed=("cluster.hosts",))
    options, bundle = JobOptions(command=("train.py",)), tmp_path / "demo.pkgs.tar"
    made = prepare(site, options, (bundle, manifest("torch")), action=Action.RUN, source="ssh")
    assert made.job.nodes == ("n1", "n2")
    with pytest.raises(ConfigError, match=r"fixed by your site in .*: cluster\.hosts"):
        source_of(replace(options, hosts=("n9",)), site, batch=False)


def test_a_secret_that_is_not_set_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    made = make(tmp_path, "train.py", pass_env=("HF_TOKEN",))
    assert made.notes[0] == "pass-env: HF_TOKEN not set here, so no rank gets a value"
    monkeypatch.setenv("HF_TOKEN", "hunter2")
    made = make(tmp_path, "train.py", pass_env=("HF_TOKEN",))
    assert "HF_TOKEN" not in "".join(made.notes)
    assert "hunter2" not in repr(made)


def test_a_rendezvous_of_the_shell_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_PORT", "29500")
    made = make(tmp_path, "train.py")
    assert made.notes == ("MASTER_PORT of this shell not used: each job has its own",)


def test_a_secret_that_is_withheld_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its name alone; what only Slurm's commands need is nothing that a user misses."""
    for name in [name for name in os.environ if is_secret(name)]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SLURM_JWT", "hunter2")
    assert make(tmp_path, "train.py").notes == ()
    monkeypatch.setenv("HF_TOKEN", "hunter2")
    made = make(tmp_path, "train.py")
    assert made.notes == ("not given to the ranks: HF_TOKEN (give it with --pass-env HF_TOKEN)",)
    monkeypatch.setenv("API_KEY", "hunter3")
    made = make(tmp_path, "train.py")
    several = "not given to the ranks: API_KEY, HF_TOKEN (give one with --pass-env NAME)"
    assert made.notes == (several,)
    assert make(tmp_path, "train.py", pass_env=("HF_TOKEN", "API_KEY")).notes == ()
    assert "hunter" not in repr(made)


def test_a_block_that_does_not_count_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once for each run, and only where it asks for packages that the settings do not name."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if is_secret(name)]:
        monkeypatch.delenv(name)
    block = '# /// script\n# dependencies = ["numpy"]\n# ///\n'
    Path("train.py").write_text(block)
    (note,) = make(tmp_path, "torchrun", "train.py", "--lr", "1").notes
    assert note == (
        "train.py: its own block (PEP 723) does not count, the packages are those of stager.toml; "
        'to install what it asks for, add "train.py" to environment.requirements'
    )
    named = {"environment": {"requirements": ["./train.py"]}}
    assert make(tmp_path, "train.py", tables=named).notes == ()
    assert make(tmp_path, "train.py", bundle_id="0" * 12).notes == ()
    for text in ("", block.replace('"numpy"', ""), block.replace("]", "")):
        Path("train.py").write_text(text)
        assert make(tmp_path, "train.py").notes == ()


def test_how_the_driver_starts(tmp_path: Path) -> None:
    env = {
        "PATH": "/bin", "HF_TOKEN": "hunter2", "RANK": "3", "SALLOC_OPTS": "-v",
        "SBATCH_ACCOUNT": "lab",
    }  # fmt: skip
    asks = driver_start(make(tmp_path, "train.py", nodes=(2, 2)), env)
    assert asks.asks_slurm
    assert asks.argv[0] == "salloc"
    assert asks.argv[-3:] == ("--kill-command=TERM", "--no-kill", "-v")
    assert asks.environment is not None
    assert not {"HF_TOKEN", "RANK"} & set(asks.environment)
    assert asks.environment["SBATCH_ACCOUNT"] == "lab"
    passed = driver_start(make(tmp_path, "train.py", pass_env=("HF_TOKEN",)), env)
    assert passed.environment is not None
    assert passed.environment["HF_TOKEN"] == "hunter2"
    for source in ("local", "inside"):
        here = driver_start(make(tmp_path, "train.py", source=source), env)
        assert (here.asks_slurm, here.argv, here.environment) == (False, (), None)


def test_the_facts_of_a_batch_script(tmp_path: Path) -> None:
    tables = {"cluster": {"partition": "torch", "exclude": "n1", "salloc-args": ["--mem=1G"]}}
    made = make(tmp_path, "train.py", source="sbatch", nproc_per_node=2, tables=tables)
    packed = make_bundle(Store(tmp_path / "store"), [], decompressor=None).path
    made = replace(made, bundle=packed)
    facts = script_facts(made, {"SALLOC_OPTS": "-x n2 -v"}, b"program", requeue=True)
    asked = facts.request
    assert (asked.partition, asked.exclude, facts.requeue) == ("torch", "n1,n2", True)
    assert asked.salloc_args == ("--mem=1G", "-v")
    assert (facts.bundle_bytes, facts.job.cpus_per_task) == (packed.stat().st_size, 2)


def test_slurms_own_variable_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = tmp_path / "bin"
    found.mkdir()
    monkeypatch.setenv("PATH", str(found))
    settings = config(tmp_path)
    assert source_of(JobOptions(), settings, batch=False) == "local"
    with pytest.raises(ConfigError, match="the job needs 2 nodes"):
        source_of(JobOptions(nodes=(2, 2)), settings, batch=False)
    for name in ("salloc", "sbatch", "srun", "sbcast", "scontrol", "squeue"):
        (found / name).write_text("#!/bin/sh\n")
        (found / name).chmod(0o755)
    assert source_of(JobOptions(nodes=(2, 2)), settings, batch=False) == "salloc"
    assert source_of(JobOptions(), settings, batch=True) == "sbatch"
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    assert source_of(JobOptions(), settings, batch=False) == "inside"


def test_settings_that_are_wrong_are_told_though_a_bundle_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_project(tmp_path / "some.pkgs.tar").name == tmp_path.name
    (tmp_path / "stager.toml").write_text("[launch]\nlaunchr = 1\n")
    with pytest.raises(ConfigError, match="problem"):
        load_project(tmp_path / "some.pkgs.tar")


def test_a_launch_line_changes_nothing_that_the_site_has_fixed(tmp_path: Path) -> None:
    site = replace(config(tmp_path), fixed=("launch.max-restarts",))
    options = JobOptions(command=("torchrun", "--max-restarts=2", "train.py"))
    bundle = (tmp_path / "demo.pkgs.tar", manifest("torch"))
    with pytest.raises(ConfigError, match=r"--max-restarts=2: launch.max-restarts is fixed by"):
        prepare(site, options, bundle, action=Action.RUN, source="salloc")
