"""Compressed node lists; the expected ones are what ``scontrol show hostnames`` prints."""

import pytest

from bundle.protocol.problem import NodeError
from bundle.system.hostlist import expand_hostlist, fold_hosts, matches_host, parse_counts


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", ["n1"]),
        ("n[01-03,07]", ["n01", "n02", "n03", "n07"]),
        ("a[1-2]b[3-4]", ["a1b3", "a1b4", "a2b3", "a2b4"]),
        ("x,y[09-11]", ["x", "y09", "y10", "y11"]),
        ("n[9-11]", ["n9", "n10", "n11"]),
        ("n[1-2]-ib.site", ["n1-ib.site", "n2-ib.site"]),
        ("b,a,b", ["b", "a", "b"]),
        (" n[5] ", ["n5"]),
    ],
)
def test_expands(text: str, hosts: list[str]) -> None:
    assert expand_hostlist(text) == hosts


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "empty name"),
        ("a,,b", "empty name"),
        ("n[1-3", "brackets"),
        ("n[1[2]]", "brackets"),
        ("n[]", "''"),
        ("n[1-]", "'1-'"),
        ("n[3-1]", "backwards"),
        ("a b", "blank"),
        ("n[0-99999999999]", "more than"),
        ("n[0-999]m[0-999]", "more than"),
    ],
)
def test_says_what_is_wrong_with_a_list(text: str, why: str) -> None:
    with pytest.raises(NodeError) as caught:
        expand_hostlist(text)
    assert why in caught.value.problem.why
    assert repr(text) in str(caught.value)


def test_matches_full_and_short_names() -> None:
    assert matches_host("node0[1-3]", "node02")
    assert matches_host("node0[1-3]", "node02.cluster.example")
    assert not matches_host("node0[1-3]", "node04")
    assert not matches_host("node0[1-3]", "node022")


@pytest.mark.parametrize(
    ("hosts", "folded"),
    [
        (["n01", "n02", "n03", "n07", "login1"], "n[01-03,07],login1"),
        ([f"compute{number:05}" for number in range(10_000)], "compute[00000-09999]"),
        (["a", "b"], "a,b"),
        (["n8", "n9", "n10"], "n[8-9],n10"),
        (["n08", "n09", "n10"], "n[08-10]"),
        (["r1n2", "r1n1", "r2n1"], "r1n[1-2],r2n1"),
        (["gpu-a", "gpu-1", "gpu-2x"], "gpu-a,gpu-1,gpu-2x"),
    ],
)
def test_names_are_folded_as_slurm_writes_them(hosts: list[str], folded: str) -> None:
    assert fold_hosts(hosts) == folded
    assert sorted(expand_hostlist(folded)) == sorted(hosts)


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("4", [4]),
        ("4(x3),8", [4, 4, 4, 8]),
        ("16(x2),8(x1)", [16, 16, 8]),
        ("", []),
        ("many", []),
        ("4(x3),", []),
    ],
)
def test_counts_in_slurms_short_form(text: str, counts: list[int]) -> None:
    assert parse_counts(text) == counts
