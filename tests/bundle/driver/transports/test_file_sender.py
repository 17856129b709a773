"""Before a broadcast: all agents are ready, or those that are not keep nobody waiting."""

from __future__ import annotations

import os

import pytest

from bundle.driver.transports import phase_run
from bundle.driver.transports.phase_run import PhaseRun
from bundle.driver.transports.slurm import ControllerWait
from bundle.driver.transports.step_transport import NOT_READY, SendCommand, send_file
from bundle.driver.transports.transport import Transfer
from bundle.protocol.problem import ProblemCode
from tests.support.relay_step import MUTE, WELL, relay_run


def test_an_agent_that_says_nothing_is_lost_and_nothing_is_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The others are asked again without it; until now they waited for an hour."""
    monkeypatch.setattr(phase_run, "NEXT_SECONDS", 2.0)
    transfer, wait = Transfer("/no/file", "/there", 1), ControllerWait(lambda remark: None)
    with relay_run({"node01": WELL, "node02": MUTE, "node03": WELL}) as run:
        failed, _ = send_file(
            transfer, run, wait.may_retry, lambda *_: SendCommand(["false"], dict), os.environ
        )
        lost = {node: ended.problem for node, ended in run.liveness.lost.items()}
    assert failed == {"": NOT_READY}
    assert lost == {"node02": ProblemCode.NO_ANSWER_SILENT}


def test_agents_that_are_still_to_start_in_containers_have_more_time() -> None:
    """A large image may be fetched first, and not on all nodes at the same speed."""
    with relay_run({"node01": MUTE}) as run:
        slow = PhaseRun(run.step, run.answers, run.liveness, in_container=True)
        assert run.patience() == phase_run.NEXT_SECONDS
        assert slow.patience() == phase_run.FIRST_SECONDS
        run.step.heartbeats.note("node01")  # they have answered another phase
        begun = PhaseRun(run.step, run.answers, run.liveness, in_container=True)
        assert begun.patience() == phase_run.NEXT_SECONDS
