"""The files of a job: its description, and where a command writes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from bundle.protocol.enumerations import LogMode
from stager.core.errors import StagerError
from stager.logs.job_files import (
    JobFiles,
    KeptJob,
    KeptLaunch,
    find_job_files,
    parse_kept_job,
    resolve_output,
)

# --- A job's description, of whatever version, and damaged ---------------------------------------


def test_what_cannot_be_used_is_left_out_and_the_rest_is_read() -> None:
    raw = {
        "v": 99,
        "name": "p",
        "nodes": ["n1", 5, "n2"],
        "run_dir": None,
        "log_mode": "group",
        "launch": {"command": ["train.py", "\0"], "pass_env": "KEY"},
    }
    launch = KeptLaunch(command=("train.py", "\0"))
    assert parse_kept_job(json.dumps(raw).encode()) == KeptJob(
        name="p", nodes=("n1", "n2"), log_mode=LogMode.GROUP, launch=launch
    )


def test_what_is_no_description_says_nothing() -> None:
    for content in (b"", b"[]", b'{"name": ', b"\xff", b"[" * 100_000):
        assert parse_kept_job(content) == KeptJob()


# --- A file that a command makes about a job does not take the place of the job's own files.


@pytest.fixture
def files(tmp_path: Path) -> JobFiles:
    """Somebody's logs."""
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank0.out").write_text("ValueError: z\n")
    return find_job_files(str(tmp_path / "logs"), tmp_path)


def test_a_new_file_an_old_one_and_the_target_of_a_link(tmp_path: Path, files: JobFiles) -> None:
    (tmp_path / "old").write_text("old")
    (tmp_path / "link").symlink_to("old")
    assert resolve_output(tmp_path / "new", files, "the report") == tmp_path / "new"
    assert resolve_output(tmp_path / "old", files, "the report") == tmp_path / "old"
    assert resolve_output(tmp_path / "link", files, "the report") == tmp_path / "old"


def test_a_device_and_a_pipe_are_refused(tmp_path: Path, files: JobFiles) -> None:
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path / "pipe", Path(os.devnull)):
        with pytest.raises(StagerError, match="is not a regular file") as caught:
            resolve_output(place, files, "the archive")
        assert "--output" in caught.value.hint


def test_a_log_is_not_overwritten_with_what_is_made_from_it(
    tmp_path: Path, files: JobFiles
) -> None:
    log = tmp_path / "logs" / "rank0.out"
    (tmp_path / "link").symlink_to(log)
    for place in (log, tmp_path / "link"):
        with pytest.raises(StagerError, match="one of the files that the archive is made from"):
            resolve_output(place, files, "the archive")


def test_a_loop_of_links_among_the_job_s_files_is_no_obstacle(
    tmp_path: Path, files: JobFiles
) -> None:
    files.events.symlink_to(files.events.name)
    assert resolve_output(tmp_path / "new", files, "the report") == tmp_path / "new"
