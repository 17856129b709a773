"""scripts/test: where it refuses to start, which signals the tests begin with, how it ends."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.needs import needs
from tests.support.processes import run

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
STUBS = """
make_venv() { :; }
fill_venv() { :; }
extras() { :; }
say() { :; }
"""
# In place of the environment's Python: notes which signals are ignored; fails with the named part.
SHOW = """#!/bin/sh
case $1 in tests/support/requirements.py) exit ;; esac
grep SigIgn /proc/self/status >>"$TRACE"
case " $* " in *" ${FAILING:-nothing} "*) exit 1 ;; esac
"""
CTRL_C = 0b110  # SIGINT and SIGQUIT, as bits of a signal mask


def checkout(folder: Path) -> Path:
    """A checkout as scripts/test sees it, with an environment that only says how it was started."""
    shutil.copytree(SCRIPTS, folder / "scripts")
    with (folder / "scripts" / "environment.sh").open("a") as handle:
        handle.write(STUBS)
    python = folder / ".venv-test" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(SHOW)
    python.chmod(0o755)
    return folder


@pytest.fixture(params=["/tmp", "/var/tmp"])
def folder(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A checkout below the one directory that nodes have for themselves, and below another."""
    made = Path(tempfile.mkdtemp(prefix="stager-testing-", dir=request.param))
    yield checkout(made)
    shutil.rmtree(made)


def run_tests(folder: Path, *arguments: str, before: str = ":") -> tuple[int, str, list[int]]:
    """Exit status, what is said, and the signals ignored by each pytest that is started."""
    trace = folder / "trace"
    done = run(
        ["bash", "-c", f'{before}; exec bash scripts/test "$@"', "bash", *arguments],
        cwd=folder,
        env={**os.environ, "TRACE": str(trace), "CI": "false"},
    )
    lines = trace.read_text().splitlines() if trace.exists() else []
    return done.returncode, done.stderr, [int(line.split()[1], 16) for line in lines]


@pytest.mark.parametrize("arguments", [(), ("-x", "tests/slurm/test_ends.py"), ("tests/",)])
def test_a_checkout_that_slurm_nodes_cannot_see(arguments: tuple[str, ...], folder: Path) -> None:
    needs("root")
    code, said, started = run_tests(folder, *arguments)
    if folder.is_relative_to("/tmp"):
        assert (code, started) == (1, [])
        assert f"error: this checkout is in {folder}, which the tests' Slurm nodes" in said
        assert "clone it elsewhere" in said
    else:
        assert (code, said) == (0, "")
        assert len(started) == (1 if arguments else 2)


def test_ctrl_c_works_in_tests_that_a_script_starts_in_the_background(folder: Path) -> None:
    arguments = () if folder.is_relative_to("/var/tmp") else ("tests/bundle",)
    code, said, started = run_tests(folder, *arguments, before='trap "" INT QUIT')
    assert (code, said) == (0, "")
    assert len(started) == (1 if arguments else 2)
    assert [mask & CTRL_C for mask in started] == [0] * len(started)


@pytest.mark.parametrize("folder", ["/var/tmp"], indirect=True)
@pytest.mark.parametrize("part", ["tests/stager", "tests/slurm"])
def test_one_part_that_fails_is_enough(
    part: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAILING", part)
    code, _, started = run_tests(folder)
    assert (code, len(started)) == (1, 2)
