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


@contextlib.contextmanager
def named(cluster: Cluster, node: str, address: str, name: str) -> Iterator[None]:
    """Let the node, and only it, have another address for a name in its ``/etc/hosts``."""
    changed = f"sed 's/^.* {name}$/{address} {name}/' /etc/hosts > /tmp/hosts"
    cluster.on(node, ["sh", "-c", f"{changed} && mount --bind /tmp/hosts /etc/hosts"])
    try:
        yield
    finally:
        cluster.on(node, ["umount", "--lazy", "/etc/hosts"])


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
def test_a_node_with_another_address_for_a_name(cluster: Cluster, bench: Bench) -> None:
    with named(cluster, "node03", "10.99.99.9", "node02"):
        code, report, said = deep(bench)
    assert code == 3
    assert list(problems(report)) == ["node03"], said
    (text,) = problems(report)["node03"]
    assert "names of nodes resolve to other addresses than on the other nodes" in text
    assert f"node02 is 10.99.99.9, not {cluster.address('node02')}" in text
    assert "--exclude=node03" in said
    with named(cluster, "node03", "10.99.99.9", "node02"):
        code, report, said = deep(bench, "--min-nodes", "2")
    assert (code, report["left_out"]) == (0, ["node03"]), said
    assert "warning: node03 is left out: names of nodes resolve to other addresses" in said


@pytest.mark.full
def test_everything_that_is_wrong_is_told_at_once(cluster: Cluster, bench: Bench) -> None:
    """A node that cannot reach the head, one that takes a name for itself, and a damaged one."""
    _, report, _ = deep(bench)
    path = installed(cluster, "node01", report)
    flip(cluster, "node01", path)
    port = ("to", cluster.address("node01"), "ipproto", "tcp", "dport", "61000-65534")
    with (
        ruled(cluster, "node02", *port),
        named(cluster, "node03", "127.0.1.1", "node01"),
    ):
        code, report, said = deep(bench)
    assert code == 3
    found = problems(report)
    assert set(found) == set(cluster.nodes), said
    assert path in " ".join(found["node01"])
    assert "the head node cannot be reached" in found["node02"][0]
    assert "from node02: " in found["node02"][0]
    assert "names of nodes resolve to the node itself; node01 is 127.0.1.1" in found["node03"][0]
    assert report["deep"]["skipped"] == "every node has a problem"


@pytest.mark.full
def test_a_head_that_no_node_reaches_is_the_one_at_fault(cluster: Cluster, bench: Bench) -> None:
    port = ("to", cluster.address("node01"), "ipproto", "tcp", "dport", "61000-65534")
    with ruled(cluster, "node02", *port), ruled(cluster, "node03", *port):
        code, report, said = deep(bench)
    assert code == 3
    assert list(problems(report)) == ["node01"], said
    assert "no other node can reach the head node" in problems(report)["node01"][0]


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
