"""A job's description, of whatever version, and damaged."""

import json

from bundle.protocol.enumerations import LogMode
from stager.logs.job_files import KeptJob, KeptLaunch, kept_job


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
    assert kept_job(json.dumps(raw).encode()) == KeptJob(
        name="p", nodes=("n1", "n2"), log_mode=LogMode.GROUP, launch=launch
    )


def test_what_is_no_description_says_nothing() -> None:
    for content in (b"", b"[]", b'{"name": ', b"\xff", b"[" * 100_000):
        assert kept_job(content) == KeptJob()
