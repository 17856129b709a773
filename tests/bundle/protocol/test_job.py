"""``bundle.protocol.job``: the job that travels as JSON."""

import copy
import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from bundle.protocol.enumerations import Allocation
from bundle.protocol.job import ASSUMED, VERSION, Rates, load_job, parse_job
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


def raw() -> dict[str, Any]:
    return copy.deepcopy(json.loads(json.dumps(JOB.to_json())))


def refused(value: Any) -> str:
    with pytest.raises(NodeError, match="the job description cannot be read") as caught:
        parse_job(value)
    return caught.value.problem.why


def test_what_is_written_is_read_again() -> None:
    assert parse_job(raw()) == JOB
    assert parse_job(json.loads(json.dumps(parse_job(raw()).to_json()))) == JOB
    assert raw()["v"] == VERSION == 5
    measured = replace(JOB, rates=Rates(link=1e9))
    assert parse_job(json.loads(json.dumps(measured.to_json()))) == measured


@pytest.mark.parametrize("version", [4, "5", None])
def test_another_version_is_refused(version: object) -> None:
    assert "this program speaks 5" in refused({**raw(), "v": version})


@pytest.mark.parametrize("value", [None, 7, "job", [], [1], {}])
def test_what_is_no_job_is_refused(value: Any) -> None:
    refused(value)


@pytest.mark.parametrize(
    "changes",
    [
        {"id": "../../escaped"},
        {"id": ""},
        {"id": ".."},
        {"id": "a\nb"},
        {"name": "a/b"},
        {"nodes": []},
        {"nodes": ["a", "a"]},
        {"nodes": ["../a"]},
        {"bundle_id": "../../escaped"},
        {"bundle_id": "abc"},
        {"action": "explode"},
        {"requires": {**asdict(PLAIN.requires), "python": ""}},
        {"requires": {**asdict(PLAIN.requires), "libc_version": "new"}},
        {"rates": {**asdict(ASSUMED), "link": 0}},
        {"rates": {**asdict(ASSUMED), "link": "fast"}},
    ],
    ids=str,
)
def test_values_that_cannot_be_used_are_refused(changes: dict[str, Any]) -> None:
    refused({**raw(), **changes})


def test_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    path.write_text(json.dumps(JOB.to_json()))
    assert load_job(str(path)) == JOB


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[" * 200_000])
def test_a_damaged_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "job.json"
    path.write_bytes(content)
    with pytest.raises(NodeError) as caught:
        load_job(str(path))
    assert caught.value.problem.where == str(path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(NodeError, match=os.path.basename(path)):
            load_job(str(path))


@pytest.mark.parametrize("field", ["name", "nodes"])
def test_names_that_are_too_long_for_a_log_are_refused(field: str) -> None:
    value = raw()
    long = "9" * 5000
    value[field] = [long] if field == "nodes" else long
    why = refused(value)
    assert "the names of logs begin with them, and have room for 200" in why
    assert len(why) < 300
