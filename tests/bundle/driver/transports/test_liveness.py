"""Nodes that hang, are silent or seem to be: which are lost, which looked at, and when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace

import pytest

from bundle.driver.transports.liveness import (
    LOOK_SECONDS,
    LOST_SECONDS,
    START_SECONDS,
    Heartbeats,
    Liveness,
)
from bundle.driver.transports.slurm import ControllerWait
from bundle.protocol.messages import Heartbeat, RanksEnded, UnpackAnswer
from bundle.protocol.problem import ProblemCode


class Look:
    """A look at some nodes that has ended."""

    has_ended = True

    def __init__(self, unreachable: Mapping[str, str], deserted: frozenset[str]) -> None:
        self._found = unreachable, deserted

    def read_findings(self) -> tuple[Mapping[str, str], frozenset[str]]:
        return self._found

    def close(self) -> None:
        """Nothing is left to end."""


class Nodes:
    """Three nodes of a phase, their heartbeats, and what a look at them finds."""

    def __init__(
        self, phase: str, unreachable: Sequence[str] = (), deserted: Sequence[str] = ()
    ) -> None:
        self.seconds = 1000.0
        self.looks: list[list[str]] = []
        self.said: list[str] = []
        self._found = dict.fromkeys(unreachable, "gone"), frozenset(deserted)
        self.heartbeats = Heartbeats(lambda: self.seconds)
        names = ("n1", "n2", "n3")
        self.liveness = Liveness(
            phase, names, lambda event: self.said.append(str(event)), self.heartbeats, self._look
        )

    def _look(self, nodes: Sequence[str]) -> Look:
        self.looks.append(list(nodes))
        return Look(*self._found)

    def run(self, seconds: float, *alive: str) -> None:
        """Let time pass, while some nodes send heartbeats."""
        for _ in range(round(seconds)):
            self.seconds += 1
            for node in alive:
                self.heartbeats.note(node)
            self.liveness.check(())

    @property
    def lost(self) -> dict[str, ProblemCode]:
        return {node: ended.problem for node, ended in self.liveness.lost.items()}


def test_a_node_that_hangs_is_lost_with_what_it_hangs_in() -> None:
    nodes = Nodes("unpack")
    nodes.liveness.take(Heartbeat("n2", hung="python3 (pid 7, state D in bio_wait)", seconds=60.0))
    assert nodes.lost == {"n2": ProblemCode.NO_ANSWER_HANGS}
    [said] = nodes.said
    assert "n2 is lost: its processes have made no progress for 60 s: python3 (pid 7, sta" in said


@pytest.mark.parametrize("phase", ["preflight", "unpack"])
def test_a_silent_node_is_lost_and_a_slow_one_is_not(phase: str) -> None:
    """One that is done says nothing more, either."""
    nodes = Nodes(phase)
    nodes.run(1, "n1", "n2", "n3")
    nodes.liveness.take(UnpackAnswer("n3"))
    done = ["n3"] if phase != "unpack" else []
    nodes.run(LOST_SECONDS - 1, "n2", *done)
    assert nodes.lost == {}
    nodes.run(20, "n2", *done)
    assert nodes.lost == {"n1": ProblemCode.NO_ANSWER_SILENT}
    assert sum("n1 is lost" in said for said in nodes.said) == 1


def test_time_in_which_the_driver_itself_was_stopped_does_not_count() -> None:
    nodes = Nodes("unpack")
    nodes.run(1, "n1", "n2", "n3")
    for _ in range(10):
        nodes.seconds += 3600
        nodes.liveness.check(())
    assert (nodes.lost, nodes.looks) == ({}, [])


def test_a_node_that_has_yet_to_start_is_given_time() -> None:
    nodes = Nodes("unpack")
    nodes.run(600)
    assert (nodes.lost, nodes.looks) == ({}, [])  # the step has yet to begin
    nodes.run(START_SECONDS - 1, "n1", "n2")
    assert nodes.lost == {}
    nodes.run(5, "n1", "n2")
    assert nodes.lost == {"n3": ProblemCode.NO_ANSWER_SILENT}


def test_a_silent_node_that_slurm_cannot_reach_is_lost() -> None:
    """While all of the others run."""
    nodes = Nodes("launch", unreachable=["n2"])
    nodes.run(LOOK_SECONDS, "n1", "n2", "n3")
    assert nodes.looks == []
    nodes.run(LOOK_SECONDS + 2, "n1", "n3")
    assert nodes.looks == [["n2"]]
    assert nodes.lost == {"n2": ProblemCode.NO_ANSWER_UNREACHABLE}
    nodes.run(2 * LOOK_SECONDS, "n1")
    assert nodes.looks[1:] == [["n3"]] * (len(nodes.looks) - 1)


def test_ranks_outlive_the_silence_of_their_agent() -> None:
    """It may be stopped. The node is looked at ever more seldom."""
    nodes = Nodes("launch")
    nodes.run(1, "n1", "n2", "n3")
    nodes.run(LOOK_SECONDS + 75, "n1", "n3")
    assert (nodes.looks, nodes.lost) == ([["n2"]] * 4, {})
    nodes.run(1, "n1", "n2", "n3")
    nodes.run(LOOK_SECONDS + 15, "n1", "n3")
    assert len(nodes.looks) == 6  # from the beginning


def test_a_silent_node_without_the_job_is_lost_at_the_second_look() -> None:
    nodes = Nodes("launch", deserted=["n3"])
    nodes.run(1, "n1", "n2", "n3")
    nodes.run(LOOK_SECONDS + 5, "n1", "n2")
    assert nodes.lost == {}
    nodes.run(10, "n1", "n2")
    assert nodes.lost == {"n3": ProblemCode.NO_ANSWER_DESERTED}


def test_nothing_more_will_come_once_all_others_are_done() -> None:
    nodes = Nodes("launch")
    for node in ("n1", "n2"):
        assert not nodes.liveness.is_over({"n3"})
        nodes.liveness.take(RanksEnded(node))
    assert nodes.liveness.is_over({"n3"})
    assert not nodes.liveness.is_over(())


def test_the_node_that_seems_lost_when_the_job_is_told_to_end() -> None:
    nodes = Nodes("launch")
    nodes.run(1, "n1", "n2", "n3")
    nodes.run(10, "n1", "n3")
    assert nodes.liveness.first_lost() == ""
    nodes.run(10, "n1", "n3")
    assert nodes.liveness.first_lost() == "n2"


def test_a_controller_that_knows_no_memory_yet_is_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has just begun, by ``scontrol reconfigure``; any other refusal is an answer."""
    now = [1000.0]
    clock = SimpleNamespace(
        monotonic=lambda: now[0], sleep=lambda seconds: now.append(now.pop() + seconds)
    )
    monkeypatch.setattr("bundle.driver.transports.slurm.time", clock)
    refused = "srun: error: Unable to create step for job 9: "
    for why, tries in (
        ("Memory required by task is not available", 10),
        ("Requested nodes are busy", 0),
    ):
        wait, tried = ControllerWait(print), 0
        while wait.may_retry(refused + why):
            tried += 1
        assert tried == tries
