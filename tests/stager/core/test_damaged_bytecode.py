"""Compiled modules that were cut short: a real copy of the program, with real files cut."""

from __future__ import annotations

import compileall
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from stager.core.damaged_bytecode import find_damaged_file


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A copy of the program, compiled."""
    folder, repo = tmp_path_factory.mktemp("copy"), Path(__file__).resolve().parents[3]
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("stager", "bundle"):
        shutil.copytree(repo / name, folder / name, ignore=ignored)
        assert compileall.compile_dir(folder / name, quiet=2, workers=1)
    return folder


@pytest.mark.parametrize(
    ("module", "command"),
    [
        ("stager/config/load", "build"),  # of a command, imported within typer
        ("stager/core/errors", "--version"),  # of the command line itself
        ("stager/jobs/preparation", "verify --json --allocation local"),
    ],
)
def test_a_compiled_file_that_was_cut_short_is_named(copy, module, command):
    source = copy / f"{module}.py"
    (file,) = source.parent.glob(f"__pycache__/{source.stem}.cpython-*.pyc")
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    argv, env = [sys.executable, "-m", "stager"], {**os.environ, "PYTHONPATH": str(copy)}
    done = subprocess.run(
        [*argv, *command.split()], cwd=copy, env=env, capture_output=True, text=True, check=False
    )
    file.write_bytes(whole)
    assert done.returncode == 1
    if "--json" in command:  # for scripts
        assert "error" in json.loads(done.stdout), done.stdout
    else:
        assert done.stdout == ""
    first, second = filter(None, done.stderr.splitlines())
    assert first.startswith(f"error: {file} is damaged: ")
    assert second.startswith("hint: remove that file")


def test_the_end_of_standard_input_is_something_else():
    with pytest.raises(EOFError) as caught:
        raise EOFError
    assert find_damaged_file(caught.value) == find_damaged_file(None) == ""
