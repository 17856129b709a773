"""``verify --deep``: by the real driver on local nodes, and whose fault it is by their answers.

``tests/slurm`` has what real nodes add.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from bundle.driver import deep_check
from bundle.driver.deep_check import (
    find_disagreements,
    find_skewed_clocks,
    measure_clock_offset,
    names_to_compare,
)
from bundle.protocol.codec import encode
from bundle.protocol.enumerations import Allocation
from bundle.protocol.events import ClockOffset
from bundle.protocol.messages import FailureRecord, LaunchAnswer, NetworkReport
from bundle.protocol.problem import Problem, ProblemCode
from stager.pack.bundle import Packed
from tests.support.bundles import rot
from tests.support.jobs import drive, job_for
from tests.support.problems import worded


def test_all_is_well(single: Packed, program: Path, tmp_path: Path) -> None:
    code, events, _ = drive(program, job_for(single, tmp_path, deep=True))
    result = events[-1]
    assert (code, result["problems"]) == (0, {})
    begun = [event["phase"] for event in events if event["event"] == "begin"]
    assert begun[-3:] == ["probe", "deep", "all_reduce"]
    assert result["deep"]["all_reduce"] is None
    assert result["deep"]["skipped"] == "torch is not in the bundle"
    assert "the all-reduce is left out: torch is not in the bundle" in [
        event.get("text") for event in events
    ]
    log = (tmp_path / "logs" / "demo.4711.local2.1.out").read_text()
    assert "local2 deep: the environment is as it was built, every file" in log


def test_a_damaged_file_is_named_and_does_not_stay(
    single: Packed, program: Path, tmp_path: Path
) -> None:
    job, places = job_for(single, tmp_path, deep=True), Path(os.environ["STAGER_NODE_ROOT"])
    drive(program, job)
    envs = "*/nodes/{}/*/envs/*"
    (damaged,) = places.glob(f"{envs.format('local2')}/lib/*/site-packages/single/__init__.py")
    rot(damaged)
    code, events, _ = drive(program, job)
    problems = events[-1]["problems"]
    assert (code, list(problems)) == (3, ["local2"])
    (problem,) = problems["local2"]
    assert (problem["what"], problem["where"]) == ("the environment is damaged", str(damaged))
    assert "makes it again" in problem["fix"]
    left = [len(list(places.glob(envs.format(node)))) for node in job.nodes]
    assert left == [1, 0]
    code, events, _ = drive(program, job)
    assert (code, events[-1]["problems"]) == (0, {})


def test_names_that_only_ssh_knows_are_not_looked_up(single: Packed, tmp_path: Path) -> None:
    nodes = ("no-such.invalid", "ann@localhost")
    by_ssh = job_for(single, tmp_path, nodes=nodes, allocation=Allocation.SSH)
    assert names_to_compare(by_ssh).keys() == {"localhost"}
    by_slurm = job_for(single, tmp_path, nodes=nodes[:1], allocation=Allocation.SLURM)
    assert names_to_compare(by_slurm) == {"no-such.invalid": ()}


def told(found: deep_check.Problems, part: str = "what") -> dict[str, list[str]]:
    return {node: [getattr(one, part) for one in problems] for node, problems in found.items()}


FINE, WAITS = NetworkReport({}, seconds=0.1), NetworkReport({}, missing=("n3",))
PORT_TAKEN = Problem(ProblemCode.HEAD_PORT_TAKEN, "h:61000", {"why": "in use"})
REFUSED = NetworkReport(
    {}, problem=Problem(ProblemCode.HEAD_UNREACHED, "h:61000", {"host": "n", "why": "refused"})
)
NOT_REACHED = "the head node cannot be reached"


@pytest.mark.parametrize(
    ("reports", "blamed"),
    [
        pytest.param({"n1": WAITS, "n2": FINE}, {}, id="all reach it"),
        pytest.param(
            {"n1": WAITS, "n2": FINE, "n3": REFUSED, "n4": FINE}, {"n3": NOT_REACHED}, id="one not"
        ),
        pytest.param({"n1": WAITS, "n3": REFUSED}, {"n3": NOT_REACHED}, id="the only other one"),
        pytest.param(
            {"n1": WAITS, "n2": REFUSED, "n3": REFUSED},
            {"n1": "no other node can reach the head node"},
            id="none does",
        ),
        pytest.param(
            {"n1": replace(FINE, problem=PORT_TAKEN), "n2": REFUSED, "n3": REFUSED},
            {"n1": "the head node cannot listen on the job's port"},
            id="it cannot listen",
        ),
        pytest.param({"n2": REFUSED, "n3": REFUSED}, {}, id="it was lost"),
    ],
)
def test_who_keeps_nodes_from_the_head(
    reports: dict[str, NetworkReport], blamed: dict[str, str]
) -> None:
    found = deep_check.find_unreachable_nodes("n1", reports)
    assert told(found) == {node: [what] for node, what in blamed.items()}


def test_the_result_among_other_lines() -> None:
    pair = {"a": "n1", "b": "n2", "gb_per_s": 1.1, "latency_us": 45.0}
    result = {"world_size": 6, "nodes": ["n1", "n2"], "backend": "gloo", "bytes": 16777216}
    result |= {"seconds": 0.02, "gb_per_s": 0.84, "pairs": [pair]}
    line = f"ALL-REDUCE {json.dumps(result)}"
    measured = deep_check.read_measurement(["noise", "ALL-REDUCE {not json", "ALL-REDUCE 3", line])
    assert measured is not None
    assert encode(measured) == result
    assert deep_check.read_measurement(["noise"]) is None


BAD = LaunchAnswer(ok=False, exit_code=1, tail=("the end",))
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
    answers = dict.fromkeys(("n1", "n2", "n3", "n4"), BAD)
    assert told(deep_check.find_faulty_nodes({("n1", 0): lines}, answers), "why") == expected


def test_what_follows_from_a_fault_is_no_fault() -> None:
    printed = {
        ("n1", 0): ["[RANK 0] error: rank 0 on n1 lost the others: closed", "hint: see"],
        ("n2", 1): ["[RANK 1] error: n2 (rank 1 of 2) did not meet the others at h:1", "hint: x"],
    }
    answers = {"n1": BAD, "n2": BAD}
    assert list(deep_check.find_faulty_nodes(printed, answers)) == ["n2"]
    del printed["n2", 1]
    assert list(deep_check.find_faulty_nodes(printed, answers)) == ["n1"]


def test_without_a_word_of_the_ranks_their_agents_tell_or_the_first_that_failed() -> None:
    lost = worded("launch gave no answer", "n2", "exit status 137", "see its log")
    answers = {"n1": replace(BAD, exit_code=143), "n2": replace(BAD, problems=(lost,))}
    assert told(deep_check.find_faulty_nodes({}, answers)) == {"n2": ["launch gave no answer"]}
    answers["n3"] = BAD  # which ended by itself: the others went with it
    found = deep_check.find_faulty_nodes({}, answers)
    assert told(found, "why") == {"n3": ["status 1; the end"]}
    first = FailureRecord(node="n2", rank=3, exit_code=1, message="no torch", time=5.0)
    later = FailureRecord(node="n1", rank=0, exit_code=1, message="gone", time=6.0)
    answers = {"n1": replace(BAD, failures=(later,)), "n2": replace(BAD, failures=(first,))}
    why = "rank 3 ended first, with status 1: no torch"
    assert told(deep_check.find_faulty_nodes({}, answers), "why") == {"n2": [why]}


ONE, TWO, THREE = ["10.0.0.1"], ["10.0.0.2"], ["10.0.0.3"]
AGREED = {"n1": ONE, "n2": TWO, "n3": THREE}


def disagree(**changes: dict[str, list[str]]) -> dict[str, str]:
    """The problems of three nodes that agree but for these changes, as text by node."""
    answers = {node: {**AGREED, **changes.get(node, {})} for node in AGREED}
    found = find_disagreements(answers)
    assert {problem.where for node in found for problem in found[node]} == set(found)
    return {node: "\n".join(map(str, found[node])) for node in found}


def test_agreement_is_no_problem() -> None:
    assert disagree() == {}
    assert disagree(n1={"n1": ["10.0.0.1", "192.168.7.1"]}) == {}
    assert disagree(n1={"n1": ["10.0.0.1", "127.0.1.1", "fe80::1%eth0", "fe80::2"]}) == {}
    assert find_disagreements({"n1": {"n1": ONE}}) == {}


BOTH = ["10.0.0.1", "10.0.0.8"]


@pytest.mark.parametrize(
    ("changes", "nodes", "texts"),
    [
        ({"n3": {"n1": [], "n2": []}}, ["n3"], ["no address for n1, n2", "/etc/hosts"]),
        ({node: {"n2": []} for node in AGREED}, ["n1", "n2", "n3"], []),
        # Debian's own address of a host.
        ({"n1": {"n1": ["127.0.1.1"]}}, ["n1"], ["n1 is 127.0.1.1", "resolve to the node itself"]),
        ({"n2": {"n1": ["10.9.9.9"]}}, ["n2"], ["n1 is 10.9.9.9, not 10.0.0.1"]),
        # Addresses that only overlap are not the same.
        ({"n1": {"n1": BOTH}, "n3": {"n1": BOTH}, "n2": {"n1": [*ONE, "10.9.9.9"]}}, ["n2"], []),
    ],
)
def test_the_minority_is_wrong(
    changes: dict[str, dict[str, list[str]]], nodes: list[str], texts: list[str]
) -> None:
    found = disagree(**changes)
    assert list(found) == nodes
    assert all(text in found[nodes[0]] for text in texts)


@pytest.mark.parametrize("stale", ["n1", "n2"])
def test_of_two_nodes_the_one_that_has_the_name_is_right(stale: str) -> None:
    other = {"n1": "n2", "n2": "n1"}[stale]
    answers = {"n1": {"n1": ONE, "n2": TWO}, "n2": {"n1": ONE, "n2": TWO}}
    answers[stale] = {**answers[stale], other: ["10.9.9.9"]}
    assert list(find_disagreements(answers)) == [stale]


def ahead(seconds: float, wait: float = 0.2) -> ClockOffset:
    """A clock so far ahead of the driver's, asked in so many seconds."""
    return measure_clock_offset(1e9, 1e9 + wait / 2 + seconds, 1e9 + wait)


@pytest.mark.parametrize(
    ("clocks", "wrong"),
    [
        ({}, ""),
        ({"n1": ahead(0.0), "n2": ahead(1.8), "n3": ahead(-0.9)}, ""),
        ({"n1": ahead(0.1), "n2": ahead(7.3), "n3": ahead(0.0)}, "n2: 7.3 s ahead of"),
        # The driver may be the one that is wrong.
        ({"n1": ahead(300.0), "n2": ahead(300.5), "n3": ahead(299.9)}, ""),
        # Of two nodes the one that agrees with the driver is right.
        ({"n1": ahead(30.0), "n2": ahead(0.0)}, "n1: 30.0 s ahead of"),
        # What is uncertain is not held against a node.
        ({"n1": ahead(0.0), "n2": ahead(4.0, wait=6.0), "n3": ahead(0.0)}, ""),
        ({"n1": ahead(0.0), "n2": ahead(9.0, wait=6.0), "n3": ahead(0.0)}, "n2: 9.0 s ahead of"),
    ],
)
def test_a_clock_that_is_off_is_named_with_its_direction(
    clocks: dict[str, ClockOffset], wrong: str
) -> None:
    found = find_skewed_clocks(clocks)
    assert list(found) == ([wrong[:2]] if wrong else [])
    assert not wrong or wrong[4:] in found[wrong[:2]][0].why
