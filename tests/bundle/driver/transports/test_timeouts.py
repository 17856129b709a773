"""Nodes that send no heartbeats, and a controller that refuses steps: who waits for what."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from bundle.driver.transports import timeouts
from bundle.driver.transports.timeouts import QUIET_SECONDS, Waiting, Watch
from bundle.protocol.problem import ProblemCode


class Look:
    """A look at some nodes that has ended."""

    ended = True

    def __init__(self, unreachable: dict[str, str], deserted: frozenset[str]) -> None:
        self._found = unreachable, deserted

    def unreachable(self) -> dict[str, str]:
        return self._found[0]

    def deserted(self) -> frozenset[str]:
        return self._found[1]

    def close(self) -> None:
        """Nothing is left to end."""


class Watched:
    """A watch over three nodes that run, and what is found when it looks at some."""

    def __init__(self, unreachable: Sequence[str] = (), deserted: Sequence[str] = ()) -> None:
        self.looks: list[list[str]] = []
        self.said: list[str] = []
        self._found = dict.fromkeys(unreachable, "gone"), frozenset(deserted)
        self.watch = Watch(
            "launch", ("n1", "n2", "n3"), lambda event: self.said.append(str(event)), self._look
        )

    def _look(self, nodes: Sequence[str]) -> Look:
        self.looks.append(list(nodes))
        return Look(*self._found)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=1000.0)

    def sleep(seconds: float) -> None:
        clock.now += seconds

    time = SimpleNamespace(monotonic=lambda: clock.now, sleep=sleep)
    monkeypatch.setattr(timeouts, "time", time)
    return clock


def test_a_silent_node_that_slurm_cannot_reach_is_lost(clock: SimpleNamespace) -> None:
    """While no other node is done: all of them run."""
    watched = Watched(unreachable=["n2"])
    watched.watch.look((), ())
    assert watched.looks == []
    watched.watch.look((), {"n2"})  # begins to look
    watched.watch.look((), {"n2"})  # learns from it
    assert watched.looks == [["n2"]]
    assert watched.watch.lost["n2"].problem is ProblemCode.NO_ANSWER_UNREACHABLE
    assert any("n2 is lost" in said for said in watched.said)


def test_a_silent_node_that_runs_the_job_is_looked_at_ever_more_seldom(
    clock: SimpleNamespace,
) -> None:
    """An agent that is stopped is no lost node."""
    watched = Watched()
    for _ in range(int(7 * QUIET_SECONDS)):
        watched.watch.look((), {"n2"})
        clock.now += 1
    assert (len(watched.looks), watched.watch.lost) == (3, {})


def test_a_silent_node_without_the_job_is_lost_at_the_second_look(clock: SimpleNamespace) -> None:
    watched = Watched(deserted=["n3"])
    for _ in range(int(2 * QUIET_SECONDS)):
        watched.watch.look((), {"n3"})
        clock.now += 1
    assert watched.watch.lost["n3"].problem is ProblemCode.NO_ANSWER_DESERTED


REFUSED = "srun: error: Unable to create step for job 9: "


@pytest.mark.parametrize(
    ("why", "tries"),
    [("Memory required by task is not available", 10), ("Requested nodes are busy", 0)],
)
def test_a_controller_that_knows_no_memory_yet_is_asked_again(
    clock: SimpleNamespace, why: str, tries: int
) -> None:
    """It has just begun, by ``scontrol reconfigure``; any other refusal is an answer."""
    waiting, tried = Waiting(print), 0
    while waiting.again(REFUSED + why):
        tried += 1
    assert tried == tries


def test_a_lost_node_does_not_keep_others_from_being_looked_at(clock: SimpleNamespace) -> None:
    watched = Watched(unreachable=["n2"])
    watched.watch.look((), ["n2"])
    watched.watch.look((), ["n2"])
    assert list(watched.watch.lost) == ["n2"]
    clock.now += 10 * QUIET_SECONDS
    watched.watch.look((), ["n2", "n3"])
    watched.watch.look((), ["n2", "n3"])
    assert watched.looks == [["n2"], ["n3"]]
