"""``diagnose`` of what has failed before its launch, and not of an older job that went well."""

from __future__ import annotations

import json
import stat
from dataclasses import replace
from typing import Any

import pytest

from tests.support.building import Project
from tests.support.small_torch import with_small_torch

LOCAL = ("--allocation", "local", "--log-dir", "logs")


@pytest.fixture
def ready(project: Project) -> Project:
    """A project that can be run, whose newest job is a verify that went well."""
    verified(with_small_torch(project, ""))
    return project


def verified(project: Project) -> None:
    project.expect("verify", *LOCAL)


def diagnosed(project: Project, *job: str) -> tuple[dict[str, Any], str]:
    """What ``diagnose`` says as JSON, and its first line."""
    options = [*job, "--log-dir", "logs"]
    report = json.loads(project.stager("diagnose", "--json", *options).stdout)
    return report, project.stager("diagnose", *options).stdout.splitlines()[0]


@pytest.mark.full
def test_a_run_that_was_refused_is_the_newest(ready: Project) -> None:
    older, line = diagnosed(ready)
    assert (older["ok"], older["first_failure"], older["before_launch"]) == (True, None, False)
    assert line.endswith(": it ended well")

    done = ready.expect("run", *LOCAL, "--", "nosuch.py", code=1)
    report, line = diagnosed(ready)
    assert (report["ok"], report["job_id"], report["before_launch"]) == (False, "", True)
    first = report["first_failure"]
    assert first["cause"].startswith("there is no script nosuch.py")
    assert f"error: {first['cause']}\nhint: {first['hint']}\n" in done.stderr
    assert line.startswith("`stager run` failed at ")
    assert line.endswith(", before its job began")
    note = ready.root / "logs" / ".refused.json"
    assert stat.S_IMODE(note.stat().st_mode) == 0o600
    assert diagnosed(ready, older["job_id"])[0] == older, "a job that is named is that job"

    shown = ready.stager("logs", "--log-dir", "logs")
    job = older["job_id"]
    assert shown.stderr.startswith(f"newest job: {job}, verify of project, 20")
    other = ready.root / "another-project"
    other.mkdir()
    (other / "stager.toml").write_text("")
    (other / "logs").symlink_to(note.parent)
    elsewhere = replace(ready, root=other)
    assert diagnosed(elsewhere)[0]["job_id"] == job, "it is told in its own project only"

    verified(ready)
    report, line = diagnosed(ready)
    assert (report["ok"], report["before_launch"]) == (True, False)
    note.write_text("{")
    assert diagnosed(ready)[0] == report


@pytest.mark.full
def test_a_job_that_failed_on_its_nodes_before_the_launch(ready: Project) -> None:
    ready.expect("run", *LOCAL, "--interface", "nosuch0", "--", "train.py", code=3)
    report, line = diagnosed(ready)
    assert report["first_failure"]["class"] == "interface"
    assert report["before_launch"]
    assert line.endswith("local1 failed first, before the launch")
    assert not (ready.root / "logs" / ".refused.json").exists()
    (ready.root / "train.py").write_text("raise SystemExit(7)\n")
    assert ready.stager("run", *LOCAL, "--", "train.py").returncode == 3
    report, line = diagnosed(ready)
    assert (report["first_failure"]["exit_code"], report["before_launch"]) == (7, False)
    assert "before" not in line


@pytest.mark.full
@pytest.mark.parametrize("planned", [("run", "--", "train.py"), ("clean",)])
def test_what_is_only_planned_is_not_the_newest_job(
    ready: Project, planned: tuple[str, ...]
) -> None:
    older, _ = diagnosed(ready)
    command, *arguments = planned
    ready.expect(command, "--dry-run", *LOCAL, *arguments)
    assert diagnosed(ready)[0] == older
    shown = ready.stager("logs", "--log-dir", "logs")
    assert shown.stderr.startswith(f"newest job: {older['job_id']}, verify of project, ")
