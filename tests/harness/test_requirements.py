"""Tests that lack something are skipped with a reason and a remedy, are counted, and fail in CI."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.support import requirements

REPO = Path(__file__).resolve().parents[2]
MARKED = "tests/commands/test_starting.py"  # has one test with the mark, which needs strace
FILE = REPO / "tests" / "support" / "requirements.py"


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    """A directory for ``PATH`` in which no program is."""
    folder = tmp_path / "empty"
    folder.mkdir()
    return folder


def run_pytest(path: Path, noted: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the marked test where ``PATH`` has no program."""
    env = {**os.environ, "PATH": str(path), requirements.SKIPPED_FILE: str(noted), **variables}
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "needs", MARKED]
    return subprocess.run(argv, cwd=REPO, env=env, capture_output=True, text=True, check=False)


def test_a_test_that_lacks_a_program_is_skipped_with_what_to_install(
    empty: Path, tmp_path: Path
) -> None:
    done = run_pytest(empty, tmp_path / "noted", CI="false")
    assert done.returncode == 0, done.stdout
    reason = "needs strace (not found: strace): apt-get install strace"
    assert "tests/support/needs.py:" in done.stdout
    assert reason in done.stdout
    assert done.stdout.endswith("skipped: 1 needs strace (apt-get install strace)\n")
    assert requirements.total(tmp_path / "noted") == {"strace": 1}


def test_in_ci_it_fails_instead(empty: Path, tmp_path: Path) -> None:
    done = run_pytest(empty, tmp_path / "noted", CI="true")
    assert done.returncode == 1
    assert "apt-get install strace; in CI this test must run" in done.stdout
    assert requirements.total(tmp_path / "noted") == {}


def test_the_packages_to_install_are_listed(empty: Path) -> None:
    argv = [sys.executable, str(FILE)]
    env = {**os.environ, "PATH": str(empty)}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=True)
    assert {"strace", "zstd", "git", "gcc"} <= set(done.stdout.splitlines())


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
