"""Requests that could never be satisfied, by what Slurm lists of its nodes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bundle.system.processes import CompletedCommand
from stager.core.errors import StagerError
from stager.slurm.request import LISTING, Request, listed_nodes, read_nodes, shortage

LISTED = """\
torch* n1 4
torch* n2 4
torch* n3 16
big n3 16
big n4 64
odd n5 4+
"""


def asked(**changed: Any) -> Request:
    fields: dict[str, Any] = dict.fromkeys(
        ("partition", "account", "time", "exclude", "cpus_per_task", "gpus_per_node")
    )
    return Request(**{"name": "demo", "nodes": (1, 1), **fields, **changed})


@pytest.mark.parametrize(
    ("request_", "ranks", "why"),
    [
        (asked(nodes=(3, 3)), None, ""),
        (asked(nodes=(2, 5)), None, ""),
        (asked(nodes=(2, 2), cpus_per_task=64, partition="big,torch"), 64,
         "the job asks for 2 nodes with 64 CPUs each (64 ranks of 1 CPU), partition big, torch has "
         "1 of that size"),
        (asked(cpus_per_task=16), 16, ""),
        (asked(cpus_per_task=16, exclude="n[2-3]"), 16,
         "the job asks for 16 CPUs a node (16 ranks of 1 CPU), the largest node of partition torch "
         "has 4"),
        (asked(cpus_per_task=17), None,
         "the job asks for 17 CPUs a node (cluster.cpus-per-task), the largest node of partition "
         "torch has 16"),
        (asked(nodes=(4, 4)), None, "the job asks for 4 nodes, partition torch has 3"),
        (asked(nodes=(3, 3), exclude="n2"), None,
         "the job asks for 3 nodes, partition torch has 2 besides the excluded n2"),
        (asked(cpus_per_task=99, partition="cloud"), 99, ""),
    ],
)  # fmt: skip
def test_what_there_is_not(request_: Request, ranks: int | None, why: str) -> None:
    assert shortage(request_, read_nodes(LISTED), ranks) == why


@pytest.mark.parametrize(
    ("state", "up"),
    [
        *[("idle", True), ("allocated", True), ("mixed", True), ("completing", True), ("", True)],
        *[("down*", False), ("drained", False), ("DRAINING", False), ("failing", False)],
        *[("powered_down", False), ("maint", False), ("unknown*", False)],
    ],
)
def test_nodes_that_no_job_gets(state: str, up: bool) -> None:
    (node,) = read_nodes(f"torch* n1 4 {state}\n")
    assert node.is_up is up


def test_nodes_are_listed_where_slurm_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert listed_nodes() is None
    sinfo = tmp_path / "sinfo"
    sinfo.write_text("#!/bin/sh\necho torch\\* n1 4 idle; echo $#\n")
    sinfo.chmod(0o755)
    assert [(node.name, node.state) for node in listed_nodes() or ()] == [("n1", "idle")]

    def silent(argv: Sequence[str], **_: object) -> CompletedCommand:
        assert argv == LISTING
        raise StagerError("no answer")

    assert listed_nodes(silent) == []
