"""The mark in the run directory by which nodes know it for the same one."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from bundle.driver.collect import run_dir_marker
from stager.pack.bundle import Packed
from tests.support.jobs import job_for
from tests.support.namespaces import namespace


def test_it_is_there_for_as_long_as_it_is_looked_for(single: Packed, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    job = job_for(single, tmp_path / "run")
    with run_dir_marker(job) as first, run_dir_marker(job) as second:
        assert first != second  # two jobs may look at the same time
        assert sorted(os.listdir(tmp_path / "run")) == sorted([first, second])
        assert first.startswith(".stager-4711-")
        assert stat.S_IMODE((tmp_path / "run" / first).stat().st_mode) == 0o600
    assert os.listdir(tmp_path / "run") == []


def test_it_goes_whatever_happens(single: Packed, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    job = job_for(single, tmp_path / "run")
    with pytest.raises(RuntimeError), run_dir_marker(job):
        raise RuntimeError("in the middle")
    assert os.listdir(tmp_path / "run") == []
    with run_dir_marker(job) as name:
        (tmp_path / "run" / name).unlink()  # by somebody else


def test_without_a_run_directory_here_there_is_none(single: Packed, tmp_path: Path) -> None:
    with run_dir_marker(job_for(single, tmp_path, run_dir=str(tmp_path / "absent"))) as name:
        assert name == ""


def test_a_directory_that_is_read_only(single: Packed, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    log = job_for(single, tmp_path / "run").to_json()
    code = (
        "from bundle.protocol.job import parse\nfrom bundle.driver.collect import run_dir_marker\n"
        f"with run_dir_marker(parse({log!r})) as name: print(json.dumps(name))\n"
    )
    mount = f"mount -t tmpfs -o ro none '{tmp_path}/run'"
    assert namespace("-m", mount, code) == ""
