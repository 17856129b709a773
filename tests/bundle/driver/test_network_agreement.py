"""Names and clocks of all nodes compared: who is at odds with the others, and how."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bundle.driver.findings import ClockReading, Offset, disagreements, offset, skewed
from tests.support.namespaces import namespace

REPO = Path(__file__).resolve().parents[3]


# --- names ---------------------------------------------------------------------------------------

ONE, TWO, THREE = ["10.0.0.1"], ["10.0.0.2"], ["10.0.0.3"]
AGREED = {"n1": ONE, "n2": TWO, "n3": THREE}


def said(**changes: dict[str, list[str]]) -> dict[str, str]:
    """The problems of three nodes that agree but for these changes, as text by node."""
    answers = {node: {**AGREED, **changes.get(node, {})} for node in AGREED}
    found = disagreements(answers)
    assert {problem.where for node in found for problem in found[node]} == set(found)
    return {node: "\n".join(map(str, found[node])) for node in found}


def test_agreement_is_no_problem() -> None:
    assert said() == {}
    assert said(n1={"n1": ["10.0.0.1", "192.168.7.1"]}) == {}
    assert said(n1={"n1": ["10.0.0.1", "127.0.1.1", "fe80::1%eth0", "fe80::2"]}) == {}
    assert disagreements({}) == {}
    assert disagreements({"n1": {"n1": ONE}}) == {}


def test_a_name_that_one_node_does_not_find() -> None:
    found = said(n3={"n1": [], "n2": []})
    assert list(found) == ["n3"]
    assert "no address for n1, n2" in found["n3"]
    assert "/etc/hosts" in found["n3"]


def test_a_name_that_nobody_finds_is_everybodys_problem() -> None:
    found = said(n1={"n2": []}, n2={"n2": []}, n3={"n2": []})
    assert list(found) == ["n1", "n2", "n3"]


def test_debians_own_address_of_a_host_is_named() -> None:
    found = said(n1={"n1": ["127.0.1.1"]})
    assert list(found) == ["n1"]
    assert "n1 is 127.0.1.1" in found["n1"]
    assert "resolve to the node itself" in found["n1"]


def test_the_minority_is_wrong() -> None:
    found = said(n2={"n1": ["10.9.9.9"]})
    assert list(found) == ["n2"]
    assert "n1 is 10.9.9.9, not 10.0.0.1" in found["n2"]


@pytest.mark.parametrize("stale", ["n1", "n2"])
def test_of_two_nodes_the_one_that_has_the_name_is_right(stale: str) -> None:
    other = {"n1": "n2", "n2": "n1"}[stale]
    answers = {"n1": {"n1": ONE, "n2": TWO}, "n2": {"n1": ONE, "n2": TWO}}
    answers[stale] = {**answers[stale], other: ["10.9.9.9"]}
    assert list(disagreements(answers)) == [stale]


def test_addresses_that_only_overlap_are_not_the_same() -> None:
    both = ["10.0.0.1", "10.0.0.8"]
    found = said(n1={"n1": both}, n3={"n1": both}, n2={"n1": ["10.0.0.1", "10.9.9.9"]})
    assert list(found) == ["n2"]


def test_a_whole_file_of_wrong_hosts_is_one_problem() -> None:
    names = {f"n{number}": [f"10.0.0.{number}"] for number in range(1, 41)}
    stale = {name: [f"10.1.0.{name[1:]}"] for name in names}
    found = disagreements({node: stale if node == "n7" else names for node in names})
    assert list(found) == ["n7"]
    assert len(found["n7"]) == 1
    assert "and 36 more" in found["n7"][0].why


def test_real_hosts_files_that_differ() -> None:
    """Two nodes' own /etc/hosts, read by the resolver of each."""
    code = (
        "from bundle.checks.deep import resolution\n"
        "print(json.dumps(resolution(['hpc-a', 'hpc-b', 'hpc-c'])))"
    )

    def answer(hosts: str) -> object:
        lines = "".join(f"echo {line} >>/mnt/hosts\n" for line in hosts.split("; "))
        mounted = "mount -t tmpfs none /mnt\n" + lines + "mount --bind /mnt/hosts /etc/hosts"
        return namespace("-mn", mounted, code)

    good = "10.0.0.1 hpc-a; 10.0.0.2 hpc-b"
    found = disagreements(
        {
            "hpc-a": answer("127.0.1.1 hpc-a; 10.0.0.2 hpc-b; 10.0.0.3 hpc-c"),
            "hpc-b": answer(good + "; 10.0.0.3 hpc-c"),
            "hpc-c": answer(good),
        }
    )
    assert {node: [problem.why for problem in found[node]] for node in found} == {
        "hpc-a": ["hpc-a is 127.0.1.1"],
        "hpc-c": ["no address for hpc-c"],
    }


# --- the time ------------------------------------------------------------------------------------


def test_an_offset_is_known_as_well_as_the_answer_was_quick() -> None:
    assert offset(ClockReading(100.0, 107.0, 104.0)) == Offset(5.0, 2.0)
    assert offset(ClockReading(100.0, 100.0, 100.0)) == Offset(0.0, 0.0)


def ahead(seconds: float, wait: float = 0.2) -> ClockReading:
    """A clock so far ahead of the driver's, asked in so many seconds."""
    return ClockReading(1e9, 1e9 + wait / 2 + seconds, 1e9 + wait)


def test_clocks_that_agree() -> None:
    assert skewed({"n1": ahead(0.0), "n2": ahead(1.8), "n3": ahead(-0.9)}) == {}
    assert skewed({}) == {}


@pytest.mark.parametrize(("seconds", "way"), [(7.3, "7.3 s ahead of"), (-60.0, "60.0 s behind")])
def test_a_clock_that_is_off_is_named_with_its_direction(seconds: float, way: str) -> None:
    found = skewed({"n1": ahead(0.1), "n2": ahead(seconds), "n3": ahead(0.0)})
    assert list(found) == ["n2"]
    assert way in found["n2"][0].why
    assert found["n2"][0].where == "n2"


def test_the_driver_may_be_the_one_that_is_wrong() -> None:
    assert skewed({"n1": ahead(300.0), "n2": ahead(300.5), "n3": ahead(299.9)}) == {}


def test_of_two_nodes_the_one_that_agrees_with_the_driver_is_right() -> None:
    assert list(skewed({"n1": ahead(30.0), "n2": ahead(0.0)})) == ["n1"]
    assert list(skewed({"n1": ahead(-30.0)})) == ["n1"]


def test_what_is_uncertain_is_not_held_against_a_node() -> None:
    assert skewed({"n1": ahead(0.0), "n2": ahead(4.0, wait=6.0), "n3": ahead(0.0)}) == {}
    assert list(skewed({"n1": ahead(0.0), "n2": ahead(9.0, wait=6.0), "n3": ahead(0.0)})) == ["n2"]


def test_a_real_clock_that_is_off() -> None:
    """Time is asked of a real process, whose answer is shifted."""
    clocks = {}
    for node, shift in (("n1", 0.0), ("n2", 0.0), ("n3", 5.0)):
        sent = time.time()
        argv = [sys.executable, "-c", "import time; print(time.time())"]
        said = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
        clocks[node] = ClockReading(sent, float(said) + shift, time.time())
    assert list(skewed(clocks)) == ["n3"]
    assert json.loads(json.dumps(clocks["n1"])) == list(clocks["n1"])
