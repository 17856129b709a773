"""What the driver learns from all nodes together."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bundle.driver.logs import Logs
from bundle.driver.phases import PREFLIGHT, PROBE, phases_of
from bundle.driver.state import NodesFailed, State
from bundle.protocol.enumerations import Action, PhaseName
from bundle.protocol.messages import PreflightAnswer, ProbeAnswer
from bundle.protocol.problem import NodeError, Problem, ProblemCode
from stager.pack.bundle import Packed
from tests.support.displayed import displayed
from tests.support.jobs import job_for

NODES = ("n1", "n2", "n3")
LISTED = {"host": "n1", "listed": "eth0 10.0.0.1"}
LACKING = Problem(ProblemCode.NO_INTERFACE, "ib7", LISTED)


@pytest.fixture
def state(single: Packed, tmp_path: Path) -> State:
    """A job whose first node, the head, has a problem with its interface."""
    job = job_for(single, tmp_path, nodes=NODES)
    state = State(job, Logs(job))
    for node in NODES:
        state.answers[node] = PreflightAnswer(node, root="/r", python="/p", address="10.0.0.1")
    state.answers["n1"] = PreflightAnswer("n1", ok=False, problems=(LACKING,))
    return state


def test_an_interface_of_no_node_is_the_settings_fault(state: State) -> None:
    for node in NODES[1:]:
        answer = state.answers[node]
        assert isinstance(answer, PreflightAnswer)
        state.answers[node] = replace(answer, no_head=LACKING)
    with pytest.raises(NodeError) as caught:
        PREFLIGHT.use(state)
    problem = caught.value.problem
    assert (problem.code, problem.where) == (
        ProblemCode.INTERFACE_OF_NO_NODE,
        "[launch] interface",
    )
    assert problem.why == "none has ib7; on n1 there are: eth0 10.0.0.1"


def test_an_interface_that_one_node_lacks_is_that_nodes(state: State) -> None:
    with pytest.raises(NodesFailed, match=r"^n1$"):
        PREFLIGHT.use(state)


def test_a_host_that_is_the_machine_ssh_came_from_is_named(
    state: State, capfd: pytest.CaptureFixture[str]
) -> None:
    """Unless it is the only one: then nobody has to reach it."""
    inward = PreflightAnswer("n1", root="/r", python="/p", address="10.0.0.1", loopback="127.0.1.1")
    state.answers["n1"] = inward
    PREFLIGHT.use(state)
    said = "n1: ssh reaches it at 127.0.1.1, so it is this machine (or the jump host before it)"
    assert said in displayed(state, capfd)
    state.job, state.answers = replace(state.job, nodes=("n1",)), {"n1": inward}
    PREFLIGHT.use(state)
    assert "127.0.1.1" not in displayed(state, capfd)


def test_what_nodes_lack_is_said_once_for_all_of_them(
    state: State, capfd: pytest.CaptureFixture[str]
) -> None:
    values = {"why": "not there", "modules": "ctypes", "importers": "no module"}
    lacking = Problem(ProblemCode.LIBRARY_UNUSABLE, "libffi.so.8", values)
    for node, warnings in zip(NODES, [(lacking,), (), (lacking,)], strict=True):
        state.answers[node] = ProbeAnswer(node, warnings=warnings)
    PROBE.use(state)
    shown = displayed(state, capfd)
    assert "n1, n3: libffi.so.8: the node has no usable copy of this shared library" in shown
    assert shown.count("libffi.so.8") == 1


def test_only_a_verification_is_deep(single: Packed, tmp_path: Path) -> None:
    job = job_for(single, tmp_path, action=Action.RUN, deep=True)
    assert PhaseName.DEEP not in [phase.name for phase in phases_of(job)]
