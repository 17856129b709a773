"""The command that runs a build on a node."""

from __future__ import annotations

from pathlib import Path

import pytest

from stager.config.load import Config, parse
from stager.slurm.request import make_build_launcher


@pytest.fixture
def config(tmp_path: Path) -> Config:
    cluster = {"nodes": 4, "partition": "gpu", "gpus-per-node": 1, "salloc-args": ["--mem=8G"]}
    data = {"environment": {"requirements": ["numpy"]}, "cluster": cluster}
    return parse(data, root=tmp_path, source=tmp_path / "stager.toml")


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    srun = tmp_path / "srun"
    srun.write_text("#!/bin/sh\n")
    srun.chmod(0o755)
    return {"PATH": str(tmp_path)}


def test_without_slurm_this_machine_is_the_node(config: Config) -> None:
    assert make_build_launcher(config, {"PATH": "/nowhere"}) == ()


def test_a_step_of_the_allocation(config: Config, env: dict[str, str]) -> None:
    begin = make_build_launcher(config, {**env, "SLURM_JOB_ID": "7", "SLURM_CPUS_ON_NODE": "16"})
    assert begin[:4] == ("srun", "--job-name=stager-build", "--nodes=1", "--ntasks=1")
    assert {"--cpus-per-task=16", "--overlap"} <= set(begin)


def test_a_job_of_its_own(config: Config, env: dict[str, str]) -> None:
    begin = make_build_launcher(config, env)
    assert begin[0] == "srun"
    assert {"--nodes=1", "--partition=gpu", "--gpus-per-node=1", "--mem=8G"} <= set(begin)
    assert "--overlap" not in begin
