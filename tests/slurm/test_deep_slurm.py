"""``verify --deep`` on a real cluster: a damaged file, names, the way to the head, all ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import Cluster
from tests.support.provoking import Bench
from tests.support.slurm_torch import SlurmTorch

pytestmark = pytest.mark.slow

FLIP = """\
import os, sys
path, at = sys.argv[1], 3
before = os.stat(path)
with open(path, "r+b") as file:
    data = file.read()
    file.seek(at)
    file.write(bytes([data[at] ^ 1]))
os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # as on a failing disk
"""


def deep(bench: Bench, *options: str) -> tuple[int, dict[str, Any], str]:
    """Exit code, JSON and talk of ``verify --deep`` on all three nodes."""
    said = bench.stager("verify", "--deep", "--nodes", "3", *options)
    return said.code, said.report, said.talk


def problems(report: Mapping[str, Any]) -> dict[str, list[str]]:
    return {node["node"]: node["problems"] for node in report["nodes"] if node["problems"]}


def installed(cluster: Cluster, node: str, report: Mapping[str, Any]) -> str:
    """The path of ``alpha`` in the bundle's environment on the node; empty if it is not there."""
    begins = Path(report["bundle"]).name.rpartition("-")[2].partition(".")[0]
    place = f"*/envs/{begins}*/site-packages/alpha/__init__.py"
    return cluster.on(node, ["find", "/tmp", "-path", place]).stdout.strip()


def flip(cluster: Cluster, node: str, path: str) -> None:
    """Change one bit of a file on the node."""
    cluster.on(node, ["python3", "-I", "-c", FLIP, path])


@contextlib.contextmanager
def ruled(cluster: Cluster, node: str, *rule: str) -> Iterator[None]:
    """Keep the node from sending what the rule describes: no packet filter is needed."""
    cluster.on(node, ["ip", "rule", "add", *rule, "prohibit"])
    try:
        yield
    finally:
        cluster.on(node, ["ip", "rule", "del", *rule, "prohibit"])


def test_a_flipped_bit_is_found_named_and_repaired(cluster: Cluster, bench: Bench) -> None:
    _, report, _ = deep(bench)
    path = installed(cluster, "node02", report)
    flip(cluster, "node02", path)

    code, report, said = deep(bench)
    assert code == 3
    assert list(problems(report)) == ["node02"], said
    text = " ".join(problems(report)["node02"])
    assert path in text
    assert "its sha256 begins with" in text
    assert "the next `stager verify` or `stager run` makes it again" in text
    assert "hint: to leave it out: --exclude=node02" in said.splitlines()
    assert installed(cluster, "node02", report) == ""
    assert installed(cluster, "node03", report) == path

    code, report, said = deep(bench)
    assert (code, problems(report)) == (0, {}), said
    found = report["deep"]
    assert set(found["connect_seconds"]) == {"node02", "node03"}
    assert set(found["clocks"]) == set(cluster.nodes)
    for clock in found["clocks"].values():  # the nodes share one clock, but it is not known
        assert abs(clock["ahead"]) <= clock["give_or_take"] + 0.05
    assert (found["all_reduce"], found["skipped"]) == (None, "torch is not in the bundle")
    assert [group["nodes"] for group in report["plan"]["groups"] if group["how"] != "present"] == [
        ["node02"]
    ]


@pytest.mark.full
def test_all_ranks_talk_and_each_pair_is_measured(slurm_torch: SlurmTorch) -> None:
    ran = slurm_torch.job("verify", "--deep", "--nproc-per-node", "2")
    assert (ran.code, problems(ran.report)) == (0, {}), ran.stderr
    measured = ran.report["deep"]["all_reduce"]
    assert (measured["world_size"], measured["backend"]) == (6, "gloo")
    assert [(pair["a"], pair["b"]) for pair in measured["pairs"]] == [
        ("node01", "node02"),
        ("node01", "node03"),
        ("node02", "node03"),
    ]
    assert all(pair["gb_per_s"] > 0 for pair in measured["pairs"])
    talk = ran.stderr.splitlines()
    assert sum(line.startswith("PAIR node0") for line in talk) == 3
    worst = min(measured["pairs"], key=lambda pair: pair["gb_per_s"])
    assert any(f"slowest: {worst['a']} and {worst['b']}, " in line for line in talk)
    assert sum(line.startswith("ALL-REDUCE ") for line in ran.lines()) == 1


@pytest.mark.full
def test_two_nodes_that_cannot_talk_are_named(slurm_torch: SlurmTorch) -> None:
    """Both reach the head, so that only the ranks find it."""
    cluster = slurm_torch.cluster
    with ruled(cluster, "node02", "to", cluster.address("node03")):
        ran = slurm_torch.job("verify", "--deep", "--launcher", "srun", "--nproc-per-node", "2")
    assert ran.code == 3
    assert set(problems(ran.report)) == {"node02", "node03"}, ran.stderr
    text = problems(ran.report)["node03"][0]
    assert f"node02 and node03: node02 cannot connect to {cluster.address('node03')}" in text
    assert "--exclude=node02,node03" in ran.stderr
