"""The files of a job: its description, and where a command writes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from bundle.protocol.enumerations import LogMode
from stager.core.errors import StagerError
from stager.logs.job_files import (
    KeptJob,
    KeptLaunch,
    find_job_files,
    parse_kept_job,
    resolve_output,
)

# --- A job's description, of whatever version, and damaged ---------------------------------------


def test_what_cannot_be_used_is_left_out_and_the_rest_is_read() -> None:
    launch = {"command": ["train.py", "\0"], "pass_env": "KEY"}
    raw = {"v": 99, "name": "p", "nodes": ["n1", 5, "n2"], "run_dir": None, "log_mode": "group"}
    read = KeptJob(name="p", nodes=("n1", "n2"), log_mode=LogMode.GROUP,
                   launch=KeptLaunch(command=("train.py", "\0")))  # fmt: skip
    assert parse_kept_job(json.dumps({**raw, "launch": launch}).encode()) == read
    for content in (b"", b"[]", b'{"name": ', b"\xff", b"[" * 100_000):
        assert parse_kept_job(content) == KeptJob()


# --- A file that a command makes about a job does not take the place of the job's own files.


@pytest.mark.parametrize(
    ("name", "target"),
    [("new", "new"), ("old", "old"), ("link", "old"), ("pipe", "not a regular file"),
     ("/dev/null", "not a regular file"), ("logs/rank0.out", "made from"), ("to_log", "made from")],
)  # fmt: skip
def test_where_a_command_writes(tmp_path: Path, name: str, target: str) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank0.out").write_text("ValueError: z\n")
    files = find_job_files(str(tmp_path / "logs"), tmp_path)
    files.events.symlink_to(files.events.name)  # a loop of links is no obstacle
    (tmp_path / "old").write_text("old")
    (tmp_path / "link").symlink_to("old")
    (tmp_path / "to_log").symlink_to("logs/rank0.out")
    os.mkfifo(tmp_path / "pipe")
    if target in ("new", "old"):
        assert resolve_output(tmp_path / name, files, "the report") == tmp_path / target
        return
    with pytest.raises(StagerError, match=target) as caught:
        resolve_output(tmp_path / name, files, "the archive")
    assert "--output" in caught.value.hint
