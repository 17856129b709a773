"""``stager estimate`` as a user meets it: text, JSON, a terminal, earlier jobs, errors."""

from __future__ import annotations

import json

import pytest

from tests.support.building import Project
from tests.support.fake_slurm import slurm_commands

CASES = ["nothing there yet", "nothing changed", "alpha changed", "run from Lustre", "run from NFS"]


@pytest.fixture
def built(project: Project) -> Project:
    project.build()
    return project


def test_lines_fit_80_columns_and_need_no_slurm(built: Project) -> None:
    done = built.expect("estimate", "--nodes", "10000,1", "--nodes", "8", env={"PATH": "/nowhere"})
    *rows, verdict = done.stdout.splitlines()
    assert rows[0].split() == [
        *("nodes", "case", "preflight", "send", "unpack", "stage", "probe", "launch", "total")
    ]
    assert [row.split()[0] for row in rows[1:]] == [
        count for count in ("1", "8", "10000") for _ in CASES
    ]
    assert [row[7:25].strip() for row in rows[1:6]] == CASES
    assert max(map(len, [*done.stdout.splitlines(), *done.stderr.splitlines()])) <= 80
    assert verdict.startswith("staging pays: against Lustre ")
    assert "rates: assumed" in done.stderr
    assert "\x1b" not in done.stdout
    quiet = built.stager("estimate", "--nodes", "1,8,10000", "--quiet")
    assert (quiet.stdout, quiet.stderr) == (done.stdout, "")


def test_the_former_name_does_the_same_and_is_not_listed(built: Project) -> None:
    done = built.stager("plan", "--nodes", "1,8", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == built.stager("estimate", "--nodes", "1,8", "--json").stdout
    listed = [line.split()[:1] for line in built.stager("--help").stdout.splitlines()]
    assert ["estimate"] in listed
    assert ["plan"] not in listed


def test_the_settings_say_how_many_nodes(built: Project) -> None:
    built.settings("alpha", more="[cluster]\nnodes = '2:5'\n")
    report = json.loads(built.stager("estimate", "--json").stdout)
    assert [one["nodes"] for one in report["forecasts"]] == [5]


def test_a_dry_run_says_how_long_it_would_take(built: Project) -> None:
    """Outside of an allocation; Slurm's commands only have to be there."""
    slurm = slurm_commands(built.root / "bin")
    options = ("--nodes", "3", "--dry-run", "--log-dir", "logs", "--launcher", "srun")
    asked = ("run", *options, "--json", "--", "train.py")
    report = json.loads(built.stager(*asked, env=slurm).stdout)
    assert report["forecast"]["nodes"] == 3
    assert report["forecast"]["measured"] is False
    assert report["forecast"]["seconds"]["total"] > report["forecast"]["seconds"]["stage"] > 0
    told = built.expect("verify", *options, env=slurm)
    assert "expected on 3 nodes that have nothing of it yet: preflight " in told.stderr
