"""``bundle.protocol.job``: the job that travels as JSON."""

import copy
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from bundle.protocol.enumerations import Allocation
from bundle.protocol.job import ASSUMED, VERSION, Job, Rates, load_job
from bundle.protocol.problem import NodeError
from tests.support.jobs import LAUNCH, PLAIN

JOB = replace(
    PLAIN,
    allocation=Allocation.LOCAL,
    nodes=("local1", "local2"),
    python_hints=("/usr/bin/python3.11",),
    launch=replace(
        LAUNCH,
        command=("-m", "trainer", "--name", "mit Leerzeichen"),
        nproc_per_node=None,
        interface={"node0[1-3]": "ens1f1"},
        omp_num_threads=2,
    ),
)


REQUIRES = asdict(PLAIN.requires)


def raw() -> dict[str, Any]:
    return copy.deepcopy(json.loads(json.dumps(JOB.to_json())))


def refused(value: Any) -> str:
    with pytest.raises(NodeError, match="the job description cannot be read") as caught:
        Job.from_json(value)
    return caught.value.problem.why


def test_what_is_written_is_read_again() -> None:
    assert Job.from_json(raw()) == JOB
    assert Job.from_json(json.loads(json.dumps(Job.from_json(raw()).to_json()))) == JOB
    assert raw()["v"] == VERSION == 5
    measured = replace(JOB, rates=Rates(link=1e9))
    assert Job.from_json(json.loads(json.dumps(measured.to_json()))) == measured


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("v", [4, "5", None]),
        ("id", ["../../escaped", "", "..", "a\nb"]),
        ("name", ["a/b", "9" * 5000]),
        ("nodes", [[], ["a", "a"], ["../a"], ["9" * 5000]]),
        ("bundle_id", ["../../escaped", "abc"]),
        ("action", ["explode"]),
        ("requires", [{**REQUIRES, "python": ""}, {**REQUIRES, "libc_version": "new"}]),
        ("rates", [{**asdict(ASSUMED), "link": 0}, {**asdict(ASSUMED), "link": "fast"}]),
    ],
)
def test_values_that_cannot_be_used_are_refused(key: str, values: list[object]) -> None:
    for value in values:
        why = refused({**raw(), key: value})
        assert key != "v" or "this program speaks 5" in why
        if "9999" in str(value):
            assert "the names of logs begin with them, and have room for 200" in why
            assert len(why) < 300
    for other in (None, 7, "job", [], [1], {}):
        refused(other)


def test_a_file_is_read_and_a_damaged_or_missing_one_named(tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    path.write_text(json.dumps(JOB.to_json()))
    assert load_job(str(path)) == JOB
    for wrong, content in enumerate((b"", b"{", b"\xff\xfe", b"[" * 200_000)):
        (tmp_path / str(wrong)).write_bytes(content)
    for name in ("0", "1", "2", "3", "absent", "."):
        with pytest.raises(NodeError) as caught:
            load_job(str(tmp_path / name))
        assert caught.value.problem.where == str(tmp_path / name)
