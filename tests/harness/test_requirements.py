"""Tests that lack something are skipped with a reason and a remedy, are counted, and fail in CI."""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.support import requirements
from tests.support.processes import run

REPO = Path(__file__).resolve().parents[2]
MARKED = "tests/commands/test_starting.py"  # has one test with the mark, which needs strace


def run_python(folder: Path, *arguments: str, ci: bool = False) -> tuple[int, str]:
    """Exit status and output of Python where ``PATH`` has no program."""
    variables = {"PATH": str(folder), requirements.SKIPPED_FILE: str(folder / "noted")}
    env = {**os.environ, **variables, "CI": str(ci).lower()}
    argv = [sys.executable, *arguments]
    done = run(argv, cwd=REPO, env=env)
    return done.returncode, done.stdout


def test_a_test_that_lacks_a_program_is_skipped_or_fails_in_ci(tmp_path: Path) -> None:
    argv = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "needs", MARKED)
    code, said = run_python(tmp_path, *argv)
    assert code == 0, said
    reason = "needs strace (not found: strace): apt-get install strace"
    assert "tests/support/needs.py:" in said
    assert reason in said
    assert said.endswith("skipped: 1 needs strace (apt-get install strace)\n")
    assert requirements.total(tmp_path / "noted") == {"strace": 1}

    (tmp_path / "noted").unlink()
    code, said = run_python(tmp_path, *argv, ci=True)
    assert code == 1
    assert "apt-get install strace; in CI this test must run" in said
    assert requirements.total(tmp_path / "noted") == {}


def test_the_packages_to_install_are_listed(tmp_path: Path) -> None:
    _, said = run_python(tmp_path, "tests/support/requirements.py")
    assert {"strace", "zstd", "git", "gcc"} <= set(said.splitlines())


def test_what_several_runs_skipped_is_added_up(tmp_path: Path) -> None:
    noted = tmp_path / "noted"
    noted.write_text('{"Slurm": 2, "other reasons": 1}\n{"Slurm": 1}\n{}\n')
    total = requirements.total(noted)
    assert total == {"Slurm": 3, "other reasons": 1}
    said = requirements.summary(total)
    assert said.startswith("skipped: 3 need Slurm")
    assert said.endswith(", 1 for other reasons (said above)")
    assert requirements.summary(Counter()) == "skipped: none"


@pytest.mark.parametrize("name", requirements.REQUIREMENTS)
def test_a_reason_leads_back_to_its_requirement(name: str) -> None:
    reason = requirements.reason(name, "detail")
    title = requirements.REQUIREMENTS[name].title
    assert requirements.title_of(f"Skipped: {reason}") == title
    assert requirements.title_of("Skipped: something else") == requirements.OTHERS
