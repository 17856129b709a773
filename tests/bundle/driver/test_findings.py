"""Whose fault it is, from the answers of all nodes."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from bundle.driver import findings
from bundle.driver.findings import (
    ClockReading,
    Offset,
    find_disagreements,
    find_skewed_clocks,
    measure_clock_offset,
)
from bundle.protocol.codec import encode
from bundle.protocol.messages import FailureRecord, LaunchAnswer, NetworkReport
from bundle.protocol.problem import Problem, ProblemCode
from tests.support.namespaces import namespace
from tests.support.problems import worded

NODES = ("n1", "n2", "n3", "n4")
OK = LaunchAnswer(ok=True, exit_code=0)
BAD = LaunchAnswer(ok=False, exit_code=1, tail=("the end",))
FINE = NetworkReport(differs={}, seconds=0.1)


def refused(node: str) -> NetworkReport:
    values = {"host": node, "why": "refused"}
    problem = Problem(ProblemCode.HEAD_UNREACHED, "h:61000", values)
    return NetworkReport(differs={}, problem=problem)


def whats(found: findings.Problems) -> dict[str, list[str]]:
    return {node: [problem.what for problem in problems] for node, problems in found.items()}


def whys(found: findings.Problems) -> dict[str, list[str]]:
    return {node: [problem.why for problem in problems] for node, problems in found.items()}


# --- the way to the head -------------------------------------------------------------------------


def test_a_node_that_does_not_reach_the_head_is_at_fault() -> None:
    head = NetworkReport(differs={}, missing=("n3",))
    assert findings.find_unreachable_nodes("n1", {"n1": head, "n2": FINE}) == {}
    answers = {"n1": head, "n2": FINE, "n3": refused("n3"), "n4": FINE}
    assert list(findings.find_unreachable_nodes("n1", answers)) == ["n3"]
    assert list(findings.find_unreachable_nodes("n1", {"n1": head, "n3": refused("n3")})) == ["n3"]


def test_a_head_that_nobody_reaches_is_at_fault() -> None:
    answers = {
        "n1": NetworkReport(differs={}, missing=("n2", "n3")),
        "n2": refused("n2"),
        "n3": refused("n3"),
    }
    found = findings.find_unreachable_nodes("n1", answers)
    assert whats(found) == {"n1": ["no other node can reach the head node"]}
    assert whys(found) == {"n1": ["from n2: refused"]}


def test_a_head_that_cannot_listen_is_alone_at_fault() -> None:
    problem = Problem(ProblemCode.HEAD_PORT_TAKEN, "h:61000", {"why": "in use"})
    answers = {
        "n1": NetworkReport(differs={}, problem=problem),
        "n2": refused("n2"),
        "n3": refused("n3"),
    }
    found = findings.find_unreachable_nodes("n1", answers)
    assert whats(found) == {"n1": ["the head node cannot listen on the job's port"]}


def test_nobody_is_blamed_for_a_head_that_was_lost() -> None:
    assert findings.find_unreachable_nodes("n1", {"n2": refused("n2"), "n3": refused("n3")}) == {}


# --- names ---------------------------------------------------------------------------------------


def test_only_what_differs_was_sent() -> None:
    expected = {"n1": ["10.0.0.1"], "n2": ["10.0.0.2"]}
    answers = {"n1": FINE, "n2": FINE}
    assert findings.find_differing_names(expected, answers) == {}
    answers["n3"] = NetworkReport(differs={"n2": ("10.0.0.9",)})
    assert whys(findings.find_differing_names(expected, answers)) == {
        "n3": ["n2 is 10.0.0.9, not 10.0.0.2"]
    }


def test_the_driver_may_be_the_odd_one() -> None:
    """A login node that cannot resolve the nodes' names."""
    said = NetworkReport(differs={"n1": ("10.0.0.1",)})
    assert findings.find_differing_names({"n1": []}, {"n1": said, "n2": said}) == {}


# --- the all-reduce ------------------------------------------------------------------------------


def test_the_result_among_other_lines() -> None:
    pair = {"a": "n1", "b": "n2", "gb_per_s": 1.1, "latency_us": 45.0}
    result = {"world_size": 6, "nodes": ["n1", "n2"], "backend": "gloo", "bytes": 16777216}
    result |= {"seconds": 0.02, "gb_per_s": 0.84, "pairs": [pair]}
    line = f"ALL-REDUCE {json.dumps(result)}"
    measured = findings.read_measurement(["noise", "ALL-REDUCE {not json", "ALL-REDUCE 3", line])
    assert measured is not None
    assert encode(measured) == result
    assert findings.read_measurement(["noise"]) is None


NOTHING_PASSES = "n2 and n3: n2 cannot connect to 10.0.0.3: no answer"
STUCK = ["n1 and n3: it is stuck", "n2 and n3: it is stuck", "n3 and n4: it is stuck"]
NO_WORD = "no word from n3, n4 (rank 4, 6): timeout"


@pytest.mark.parametrize(
    ("errors", "expected"),
    [
        pytest.param([NOTHING_PASSES], {"n2": [NOTHING_PASSES], "n3": [NOTHING_PASSES]}, id="two"),
        pytest.param(STUCK, {"n3": STUCK}, id="one that has a fault with several"),
        pytest.param(["n2: no interface x0"], {"n2": ["no interface x0"]}, id="its own"),
        pytest.param([NO_WORD], {"n3": [NO_WORD], "n4": [NO_WORD]}, id="ranks that are silent"),
        pytest.param(["something odd"], {"n1": ["something odd"]}, id="nobody: itself"),
        pytest.param(["a and b: c"], {"n1": ["a and b: c"]}, id="nobody that is known"),
    ],
)
def test_who_is_blamed_for_what_a_rank_prints(
    errors: list[str], expected: dict[str, list[str]]
) -> None:
    """Rank 0 prints these errors for all."""
    lines = ["noise", f"error: {errors[0]}", *errors[1:], "hint: do this", "more noise"]
    answers = dict.fromkeys(NODES, BAD)
    assert whys(findings.find_failed_ranks({("n1", 0): lines}, answers)) == expected


def test_what_follows_from_a_fault_is_no_fault() -> None:
    printed = {
        ("n1", 0): ["[RANK 0] error: rank 0 on n1 lost the others: closed", "hint: see"],
        ("n2", 1): ["[RANK 1] error: n2 (rank 1 of 2) did not meet the others at h:1", "hint: x"],
    }
    answers = {"n1": BAD, "n2": BAD}
    assert list(findings.find_failed_ranks(printed, answers)) == ["n2"]
    del printed["n2", 1]
    assert list(findings.find_failed_ranks(printed, answers)) == ["n1"]


def test_without_a_word_of_the_ranks_their_agents_tell() -> None:
    lost = worded("launch gave no answer", "n2", "exit status 137", "see its log")
    told_to_end = replace(BAD, exit_code=143)
    silent = replace(BAD, problems=(lost,))
    answers = {"n1": told_to_end, "n2": silent, "n3": OK}
    assert whats(findings.find_failed_ranks({}, answers)) == {"n2": ["launch gave no answer"]}
    answers["n3"] = BAD  # which ended by itself: the others went with it
    assert whys(findings.find_failed_ranks({}, answers)) == {"n3": ["status 1; the end"]}


@pytest.mark.parametrize(("message", "said"), [("no torch", ": no torch"), ("", "")])
def test_without_that_the_first_rank_that_failed(message: str, said: str) -> None:
    first = FailureRecord(node="n2", rank=3, exit_code=1, message=message, time=5.0)
    later = FailureRecord(node="n1", rank=0, exit_code=1, message="gone", time=6.0)
    answers = {"n1": replace(BAD, failures=(later,)), "n2": replace(BAD, failures=(first,))}
    why = f"rank 3 ended first, with status 1{said}"
    assert whys(findings.find_failed_ranks({}, answers)) == {"n2": [why]}


# --- Names and clocks of all nodes compared: who is at odds with the others, and how -------------


ONE, TWO, THREE = ["10.0.0.1"], ["10.0.0.2"], ["10.0.0.3"]
AGREED = {"n1": ONE, "n2": TWO, "n3": THREE}


def said(**changes: dict[str, list[str]]) -> dict[str, str]:
    """The problems of three nodes that agree but for these changes, as text by node."""
    answers = {node: {**AGREED, **changes.get(node, {})} for node in AGREED}
    found = find_disagreements(answers)
    assert {problem.where for node in found for problem in found[node]} == set(found)
    return {node: "\n".join(map(str, found[node])) for node in found}


def test_agreement_is_no_problem() -> None:
    assert said() == {}
    assert said(n1={"n1": ["10.0.0.1", "192.168.7.1"]}) == {}
    assert said(n1={"n1": ["10.0.0.1", "127.0.1.1", "fe80::1%eth0", "fe80::2"]}) == {}
    assert find_disagreements({}) == {}
    assert find_disagreements({"n1": {"n1": ONE}}) == {}


BOTH = ["10.0.0.1", "10.0.0.8"]


@pytest.mark.parametrize(
    ("changes", "nodes", "texts"),
    [
        ({"n3": {"n1": [], "n2": []}}, ["n3"], ["no address for n1, n2", "/etc/hosts"]),
        ({node: {"n2": []} for node in AGREED}, ["n1", "n2", "n3"], []),
        # Debian's own address of a host.
        (
            {"n1": {"n1": ["127.0.1.1"]}},
            ["n1"],
            ["n1 is 127.0.1.1", "resolve to the node itself"],
        ),
        ({"n2": {"n1": ["10.9.9.9"]}}, ["n2"], ["n1 is 10.9.9.9, not 10.0.0.1"]),
        # Addresses that only overlap are not the same.
        (
            {"n1": {"n1": BOTH}, "n3": {"n1": BOTH}, "n2": {"n1": ["10.0.0.1", "10.9.9.9"]}},
            ["n2"],
            [],
        ),
    ],
)
def test_the_minority_is_wrong(
    changes: dict[str, dict[str, list[str]]], nodes: list[str], texts: list[str]
) -> None:
    found = said(**changes)
    assert list(found) == nodes
    assert all(text in found[nodes[0]] for text in texts)


@pytest.mark.parametrize("stale", ["n1", "n2"])
def test_of_two_nodes_the_one_that_has_the_name_is_right(stale: str) -> None:
    other = {"n1": "n2", "n2": "n1"}[stale]
    answers = {"n1": {"n1": ONE, "n2": TWO}, "n2": {"n1": ONE, "n2": TWO}}
    answers[stale] = {**answers[stale], other: ["10.9.9.9"]}
    assert list(find_disagreements(answers)) == [stale]


def test_a_whole_file_of_wrong_hosts_is_one_problem() -> None:
    names = {f"n{number}": [f"10.0.0.{number}"] for number in range(1, 41)}
    stale = {name: [f"10.1.0.{name[1:]}"] for name in names}
    found = find_disagreements({node: stale if node == "n7" else names for node in names})
    assert list(found) == ["n7"]
    assert len(found["n7"]) == 1
    assert "and 36 more" in found["n7"][0].why


def test_real_hosts_files_that_differ() -> None:
    """Two nodes' own /etc/hosts, read by the resolver of each."""
    code = (
        "from bundle.checks.deep import resolve_names\n"
        "print(json.dumps(resolve_names(['hpc-a', 'hpc-b', 'hpc-c'])))"
    )

    def answer(hosts: str) -> object:
        lines = "".join(f"echo {line} >>/mnt/hosts\n" for line in hosts.split("; "))
        mounted = "mount -t tmpfs none /mnt\n" + lines + "mount --bind /mnt/hosts /etc/hosts"
        return namespace("-mn", mounted, code)

    good = "10.0.0.1 hpc-a; 10.0.0.2 hpc-b"
    found = find_disagreements(
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


def ahead(seconds: float, wait: float = 0.2) -> ClockReading:
    """A clock so far ahead of the driver's, asked in so many seconds."""
    return ClockReading(1e9, 1e9 + wait / 2 + seconds, 1e9 + wait)


def test_an_offset_is_known_as_well_as_the_answer_was_quick() -> None:
    assert measure_clock_offset(ClockReading(100.0, 107.0, 104.0)) == Offset(5.0, 2.0)


@pytest.mark.parametrize(
    ("clocks", "wrong"),
    [
        ({}, ""),
        ({"n1": ahead(0.0), "n2": ahead(1.8), "n3": ahead(-0.9)}, ""),
        ({"n1": ahead(0.1), "n2": ahead(7.3), "n3": ahead(0.0)}, "n2: 7.3 s ahead of"),
        ({"n1": ahead(0.1), "n2": ahead(-60.0), "n3": ahead(0.0)}, "n2: 60.0 s behind"),
        # The driver may be the one that is wrong.
        ({"n1": ahead(300.0), "n2": ahead(300.5), "n3": ahead(299.9)}, ""),
        # Of two nodes the one that agrees with the driver is right.
        ({"n1": ahead(30.0), "n2": ahead(0.0)}, "n1: 30.0 s ahead of"),
        ({"n1": ahead(-30.0)}, "n1: 30.0 s behind"),
        # What is uncertain is not held against a node.
        ({"n1": ahead(0.0), "n2": ahead(4.0, wait=6.0), "n3": ahead(0.0)}, ""),
        ({"n1": ahead(0.0), "n2": ahead(9.0, wait=6.0), "n3": ahead(0.0)}, "n2: 9.0 s ahead of"),
    ],
)
def test_a_clock_that_is_off_is_named_with_its_direction(
    clocks: dict[str, ClockReading], wrong: str
) -> None:
    found = find_skewed_clocks(clocks)
    assert list(found) == ([wrong[:2]] if wrong else [])
    assert not wrong or wrong[4:] in found[wrong[:2]][0].why
