"""Waiting for nodes that unpack: one that hangs is given up, and a slow one is not."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from bundle.driver.transports.phase_run import SECONDS, UNPACK_SILENT_SECONDS, PhaseRun, UnpackWait
from bundle.driver.transports.step_transport import StepTransport
from bundle.driver.transports.transport import Event
from bundle.protocol.events import Remark
from bundle.protocol.problem import ProblemCode
from tests.support.relay_step import MUTE, relay_run


class Clock:
    """A clock that a test moves."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def events() -> list[Event]:
    """What the driver shows."""
    return []


@pytest.fixture
def run(events: list[Event]) -> Iterator[PhaseRun]:
    """Three nodes that were heard before, and say only what a test says for them."""
    with relay_run({"node01": MUTE, "node02": MUTE, "node03": MUTE}, events) as run:
        run.step.heard = True
        yield run


def say(run: PhaseRun, node: str, event: str, **values: object) -> None:
    message = {"v": 1, "event": event, "node": node, **values}
    run.answers.take(f"{node}:0", json.dumps(message))


def lost(run: PhaseRun) -> dict[str, ProblemCode]:
    return {node: ended.problem for node, ended in run.watch.lost.items()}


def test_a_node_that_hangs_is_lost_with_what_it_hangs_in(
    run: PhaseRun, events: list[Event]
) -> None:
    wait = UnpackWait(run, Clock())
    say(run, "node01", "unpacking")
    say(run, "node02", "unpacking", hung="python3 (pid 7, state D in bio_wait)", seconds=60)
    assert not wait.reached(run, (), complete=False)
    assert lost(run) == {"node02": ProblemCode.NO_ANSWER_HANGS}
    assert [event.text for event in events if isinstance(event, Remark)] == [
        "node02 is lost: its processes have made no progress for 60 s: "
        "python3 (pid 7, state D in bio_wait)"
    ]
    assert run.lost_nodes() == {"node02"}  # nobody waits for it any more


def test_a_silent_node_is_lost_and_a_slow_one_is_not(run: PhaseRun) -> None:
    """One that is done says nothing more, either."""
    clock = Clock()
    wait = UnpackWait(run, clock)
    say(run, "node03", "unpack", ok=True, seconds=1.0, problems=[])
    for _ in range(20):
        clock.now += UNPACK_SILENT_SECONDS / 2 + 1
        say(run, "node02", "unpacking", seconds=0)
        assert not wait.reached(run, (), complete=False)
    assert lost(run) == {"node01": ProblemCode.NO_ANSWER_SILENT}


def test_a_step_that_has_yet_to_start_is_given_time(run: PhaseRun) -> None:
    run.step.heard = False
    clock = Clock()
    wait = UnpackWait(run, clock)
    clock.now += UNPACK_SILENT_SECONDS + 10
    assert not wait.reached(run, (), complete=False)
    assert lost(run) == {}
    clock.now += SECONDS["unpack"]
    assert wait.reached(run, (), complete=False)


def test_the_step_that_all_phases_share_outlives_a_node_that_hangs(run: PhaseRun) -> None:
    """The other nodes' agents are asked for the next phase at once."""
    transport = object.__new__(StepTransport)  # without an allocation
    transport._session, transport._grace = run.step, 5.0
    for node in ("node01", "node03"):
        say(run, node, "unpack", ok=True, seconds=1.0, problems=[])
    say(run, "node02", "unpacking", hung="python3 (pid 7, state D)", seconds=60)
    transport._listen(run)
    assert lost(run) == {"node02": ProblemCode.NO_ANSWER_HANGS}
    assert not run.step.ended
