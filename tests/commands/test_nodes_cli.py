"""``stager nodes``, and the command that hears of a failure, as a person starts them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from time import time

import pytest

from stager.cli.node_commands import MOST_DAYS
from stager.incidents.node_history import DAY, KEPT_DAYS, keep_incidents
from tests.support.building import Project
from tests.support.fake_slurm import slurm_commands
from tests.support.incidents import FULL, LOST, incidents_of
from tests.support.processes import run

STAGER = str(Path(sys.executable).with_name("stager"))
LOCAL = ("--allocation", "local", "--nodes", "1", "--log-dir", "logs")


@pytest.fixture
def failed(project: Project) -> Project:
    """A project on whose cluster two nodes have failed."""
    now = time()
    for days, node, problem in (
        (1, "n2", FULL),
        (2, "n2", FULL),
        (3, "n2", LOST),
        (30, "n3", FULL),
    ):
        incidents = incidents_of({node: [problem]}, ended=now - days * DAY, job_id=str(100 + days))
        assert keep_incidents(project.store, incidents, now)
    return project


def test_nothing_is_remembered(project: Project) -> None:
    done = project.stager("nodes")
    assert (done.returncode, done.stdout) == (0, "")
    assert "no node is remembered to have failed in the last 7 days" in done.stderr
    assert "failures of programs do not count" in done.stderr
    assert not (project.store.root / "incidents").exists()


def test_a_folder_without_a_project_has_the_usual_offline_root(tmp_path: Path) -> None:
    done = run([STAGER, "nodes", "--json"], cwd=tmp_path)
    assert json.loads(done.stdout)["nodes"] == []


def test_a_table_for_a_pipe(failed: Project) -> None:
    done = failed.expect("nodes")
    lines = done.stdout.splitlines()
    assert [line.split()[:2] for line in lines] == [["node", "times"], ["n2", "2"], ["n2", "1"]]
    assert "101       disk full: the environment" in lines[1]
    assert "103       node failure: launch gave no" in lines[2]
    assert max(map(len, lines)) <= 80
    assert "\x1b" not in done.stdout
    assert "--avoid-bad" in done.stderr


def test_more_days_and_forgetting(failed: Project) -> None:
    def nodes(*options: str) -> dict[str, int]:
        report = json.loads(failed.stager("nodes", "--json", *options).stdout)
        assert report["schema"] == 1
        return {node["node"]: node["times"] for node in report["nodes"]}

    assert nodes() == {"n2": 3}
    assert nodes("--days", "60") == {"n2": 3, "n3": 1}
    done = failed.stager("nodes", "--forget", "n[2,7]", "--days", "60")
    assert "forgotten: 3 failures" in done.stderr
    assert nodes("--days", "60") == {"n3": 1}
    assert MOST_DAYS == KEPT_DAYS


HEARING = "import sys; open('heard.json', 'w').write(sys.stdin.read()); print('I know')"


@pytest.mark.full
def test_the_verdict_of_a_failed_verify_is_heard(project: Project) -> None:
    (project.root / "hear.py").write_text(HEARING)
    project.settings("alpha", more='[launch]\nbackend = "gloo"').build()
    hook = f"{sys.executable} hear.py"
    project.expect("verify", *LOCAL, "--on-failure", hook)
    assert not (project.root / "heard.json").exists()

    bad = {"STAGER_NODE_ROOT": "/proc"}
    done = project.expect("verify", "--json", *LOCAL, "--on-failure", hook, code=3, env=bad)
    assert (project.root / "heard.json").read_text() == done.stdout
    assert json.loads(done.stdout)["ok"] is False
    assert done.stderr.endswith("I know\n")

    plain = project.expect("verify", *LOCAL, "--on-failure", "false", code=3, env=bad)
    assert "warning: the on-failure command failed: exit status 1: false" in plain.stderr
    dry = project.expect(
        "verify", *LOCAL, "--dry-run", "--on-failure", "echo told", code=3, env=bad
    )
    assert "told" not in dry.stderr + dry.stdout


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """Commands in the place of Slurm's, which accept a job that is gone at once."""
    gone = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"
    accept = "cat >/dev/null; echo 4711"
    return slurm_commands(tmp_path / "slurm", sbatch=accept, sinfo="true", squeue=gone)


BATCH = ("--batch", "--log-dir", "logs", "--", "train.py")


def test_the_setting_is_for_all_jobs_and_batch_jobs_say_that_they_have_none(
    project: Project, slurm: dict[str, str]
) -> None:
    project.settings("alpha", more='[launch]\nlauncher = "srun"\non-failure = "echo told"').build()
    (project.root / "train.py").write_text("")
    done = project.stager("run", *BATCH, env=slurm)
    assert (done.returncode, done.stdout) == (0, "4711\n"), done.stderr
    assert "--on-failure needs --wait: a submitted job is not watched" in done.stderr
    assert "told\n" not in done.stderr
    (note,) = (project.store.root / "pending-jobs").iterdir()
    assert json.loads(note.read_text())["job_id"] == "4711"

    bad = {"STAGER_NODE_ROOT": "/proc"}
    done = project.expect("verify", *LOCAL, code=3, env=bad)
    assert "told\n" in done.stderr


@pytest.mark.full
def test_a_job_that_leaves_no_result_is_heard_of_and_stays_pending(
    project: Project, slurm: dict[str, str]
) -> None:
    project.settings("alpha", more='[launch]\nlauncher = "srun"\non-failure = "cat"').build()
    (project.root / "train.py").write_text("")
    done = project.expect("run", "--json", "--wait", *BATCH, code=3, env=slurm)
    report = json.loads(done.stdout)
    assert "job 4711 left no result" in report["error"]["message"]
    assert done.stdout in done.stderr
    assert len(list((project.store.root / "pending-jobs").iterdir())) == 1
    assert (project.root / "logs" / ".refused.json").exists()  # diagnose knows of it
