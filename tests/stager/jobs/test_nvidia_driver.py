"""Where the driver of a project's nodes is looked for, in which order."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bundle.protocol.enumerations import Action
from bundle.protocol.messages import GpuFacts, PreflightAnswer
from bundle.system.processes import CompletedCommand
from stager.jobs.nvidia_driver import find_driver
from stager.lock.resolver import KnownDriver
from tests.support.gpu_machines import OPEN_MODULE, nvidia_smi
from tests.support.jobs import PLAIN


def last_job(folder: Path, job_id: str, project: str, *drivers: str) -> None:
    """Write what the driver of a job writes."""
    folder.mkdir(exist_ok=True)
    job = replace(PLAIN, id=job_id, name=project, action=Action.RUN)
    (folder / f"job.{job_id}.json").write_text(json.dumps(job.to_json()))
    lines = []
    for number, driver in enumerate(drivers):
        answer = PreflightAnswer(f"n{number}", gpus=GpuFacts(driver) if driver else None)
        lines.append({"time": 1.0, "job_id": job_id, "phase": "preflight", **answer.to_json()})
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / f"events.{job_id}.jsonl").write_text(text)


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    nvidia_smi(tmp_path / "bin", "NVIDIA L4, 23034, 535.54.03, [N/A]")
    srun = tmp_path / "bin" / "srun"
    srun.write_text("#!/bin/sh\nexit 99\n")
    srun.chmod(0o755)
    return {"PATH": f"{tmp_path}/bin:/usr/bin:/bin"}


def test_the_allocation_counts_first(env: dict[str, str], tmp_path: Path) -> None:
    last_job(tmp_path, "8", "demo", "570.26")
    env |= {"SLURM_JOB_ID": "9", "SLURM_JOB_NODELIST": "n[1-3]"}
    answer = OPEN_MODULE.format("580.65.06") + OPEN_MODULE.format("550.54.14")
    asked: list[list[str]] = []

    def run(argv: list[str], **_: object) -> CompletedCommand:
        asked.append(argv)
        return CompletedCommand(tuple(argv), 1, answer, stderr)

    stderr = ""
    found = find_driver("demo", env, log_dir=tmp_path, run=run)
    assert found == KnownDriver(version="550.54.14", where="allocation 9")
    assert asked[0][-2:] == ["cat", "/proc/driver/nvidia/version"]
    assert {"--nodes=3", "--nodelist=n[1-3]", "--ntasks-per-node=1"} <= set(asked[0])
    answer, stderr = "", "cat: /proc/driver/nvidia/version: No such file or directory"
    found = find_driver("demo", env, log_dir=tmp_path, run=run)
    assert found == KnownDriver(version="", where="allocation 9")
    stderr = "srun: error: Job/step already completing or completed"
    found = find_driver("demo", env, log_dir=tmp_path, run=run)
    assert found.where == "the nodes of job 8"


def test_then_the_projects_last_job_then_this_machine(env: dict[str, str], tmp_path: Path) -> None:
    logs = tmp_path / "logs"

    def found() -> tuple[str, str]:
        driver = find_driver("demo", env, log_dir=logs)
        return driver.version, driver.where

    assert found() == ("535.54.03", "this machine")
    last_job(logs, "5", "demo", "590.44.01", "580.65.06")
    last_job(logs, "6", "another", "470.1")
    assert found() == ("580.65.06", "the nodes of job 5")
    last_job(logs, "7", "demo", "", "")
    assert found() == ("", "the nodes of job 7")
