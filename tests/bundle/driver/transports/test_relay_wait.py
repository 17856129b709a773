"""Waiting for the nodes of a relay: not for ever for those that say nothing, and at little cost."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from bundle.driver.transports import phase_run, relay_source
from bundle.driver.transports.liveness import Heartbeats, Liveness
from bundle.driver.transports.phase_run import SECONDS, PhaseAnswers, PhaseRun
from bundle.driver.transports.relay_source import send
from bundle.driver.transports.transport import Event, Requests, Transfer
from bundle.protocol.events import Remark
from bundle.protocol.problem import ProblemCode
from tests.support.relay_step import (
    FALLS_SILENT,
    KILLED,
    LATE,
    MUTE,
    REPORTING,
    SLOW,
    WELL,
    relay_run,
)


class Clock:
    """The time of a wait, in the place of the module ``time``: a test puts it forward.

    It passes only where nothing has come for a second, and what is to have come by then has. So a
    program that gets no processor for a while is late for nothing.
    """

    def __init__(self, run: PhaseRun, seconds: float, due: Callable[[Sequence[str]], bool]) -> None:
        """Begin.

        Args:
            run: the step.
            seconds: what passes at a time.
            due: returns whether time may pass, from what the driver has told the nodes so far.
        """
        self.now = time.monotonic()
        self.told: list[str] = []
        """What the driver has told the nodes so far."""
        pump, tell = run.step.pump, run.step.send_line

        def tell_and_note(line: str) -> None:
            self.told.append(line)
            tell(line)

        def pump_and_pass(take: Callable[[str, str], None], wait: float = 1.0) -> None:
            came: list[str] = []

            def note(source: str, line: str) -> None:
                came.append(json.loads(line)["event"])
                take(source, line)

            pump(note, wait)
            if not came and due(self.told):
                self.now += seconds

        run.step.pump = pump_and_pass  # type: ignore[method-assign]
        run.step.send_line = tell_and_note  # type: ignore[method-assign]

    def monotonic(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("kinds", "seconds", "failed", "relayed", "lost"),
    [
        # The others get their file; it is named for its silence, and has no other turn.
        pytest.param(
            (WELL, MUTE, WELL), 25.0, {}, {1, 3}, {2}, id="one that does not listen"
        ),
        # Heartbeats come more often than it takes to give up the node that is missing.
        pytest.param((REPORTING, MUTE), 1.0, {}, {1}, {2}, id="heartbeats of those that listen"),
        # Slow is not silent: the driver sends it the file in another way.
        pytest.param(
            (LATE, WELL), 25.0, {1: "it began to listen more than 20 s after the others"}, {2}, {},
            id="one that listens too late",
        ),
        pytest.param((MUTE, MUTE), 200.0, {}, {}, {1, 2}, id="none listens"),
        pytest.param(
            (FALLS_SILENT, WELL), SECONDS["unpack"] + 10, {1: "it did not finish in time"}, {2},
            {}, id="one that is not done in time",
        ),
    ],
)  # fmt: skip
def test_who_is_lost_and_who_has_another_turn(
    transfer: Transfer, monkeypatch: pytest.MonkeyPatch, kinds: Sequence[str], seconds: float,
    failed: dict[int, str], relayed: Iterable[int], lost: Iterable[int],
) -> None:  # fmt: skip
    named = {number: f"node{number:02}" for number in range(1, 4)}
    listening = {named[n] for n, kind in enumerate(kinds, 1) if kind in (WELL, REPORTING)}
    events: list[Event] = []
    with relay_run({named[n]: kind for n, kind in enumerate(kinds, 1)}, events) as run:
        late = FALLS_SILENT in kinds

        def due(told: Sequence[str]) -> bool:
            """All who listen have said so, and the relay is yet to begin, or has only one left."""
            ready = not told and run.answers.ready.keys() >= listening
            return named[2] in run.answers.relayed if late else ready

        clock = Clock(run, seconds, due)
        monkeypatch.setattr(relay_source if late else phase_run, "time", clock)
        began = clock.now
        assert send(transfer, run)[0] == {named[n]: why for n, why in failed.items()}
        assert seconds > 1 or clock.now < began + 100  # it is the phase that would have an hour
        assert run.answers.relayed.keys() == {named[n] for n in relayed}
        codes = {node: ended.problem for node, ended in run.liveness.lost.items()}
    assert codes == dict.fromkeys((named[n] for n in lost), ProblemCode.NO_ANSWER_SILENT)
    if len(kinds) == 3:
        said = [event.text for event in events if isinstance(event, Remark)]
        assert said == ["node02 is lost: no message from it for 20 s"]


def test_a_node_that_falls_silent_is_lost_and_a_slow_one_is_not(
    transfer: Transfer, tmp_path: Path
) -> None:
    """Its network may be gone, its agent stopped: nothing tells but its silence."""
    slow = f"{SLOW}{tmp_path / 'mark'}"
    kinds = {"node01": FALLS_SILENT, "node02": KILLED, "node03": slow, "node04": WELL}
    events: list[Event] = []
    with relay_run(kinds, events) as run:
        last, pump = run.step.heartbeats._last, run.step.pump

        def pump_and_age(take: Callable[[str, str], None], seconds: float = 1.0) -> None:
            pump(take, 0.02)
            if run.answers.relayed:  # node04 has it
                last["node01"] -= 5
            if run.liveness.lost:
                (tmp_path / "mark").touch()

        run.step.pump = pump_and_age  # type: ignore[method-assign]
        failed, _ = send(transfer, run)
        assert failed == {}
        assert run.answers.relayed.keys() == {"node03", "node04"}
        assert run.liveness.lost.keys() == {"node01"}
        assert run.step.faults.keys() == {"node02"}  # what srun says is more than its silence


LOOKS: Counter[str] = Counter()


class Name(str):
    """The name of a node that counts how often it is looked up."""

    def __hash__(self) -> int:
        LOOKS["all"] += 1
        return super().__hash__()


class Step:
    """A step of which one message comes each time; no process could be so regular."""

    has_ended = False
    heartbeats = Heartbeats()
    faults: dict[str, object] = {}  # noqa: RUF012 - as in the real one, the same object each time

    def __init__(self, lines: list[tuple[str, dict[str, Any]]]) -> None:
        self._lines = iter(lines)

    def pump(self, take: Callable[[str, str], None], seconds: float = 0.5) -> None:
        node, event = next(self._lines)
        take(f"{node}:0", json.dumps({"v": 1, "node": node, **event}))


def run_of(nodes: Sequence[str], lines: list[tuple[str, dict[str, Any]]]) -> PhaseRun:
    """The phase in which these messages come."""
    liveness = Liveness("unpack", nodes, print, Step.heartbeats)
    requests = cast("Requests", dict.fromkeys(nodes))
    answers = PhaseAnswers(requests, 1, liveness.take, "unpack")
    return PhaseRun(cast("Any", Step(lines)), answers, liveness)


def looks_per_node(number: int) -> float:
    """How often the name of each of so many nodes is looked up in the two waits together."""
    nodes = tuple(Name(f"node{place:04}") for place in range(number))
    lines: list[tuple[str, dict[str, Any]]] = []
    lines += [(str(node), {"event": "ready", "address": "::1", "port": 1}) for node in nodes]
    for node in nodes:
        beyond = [("node0000", "no answer")] if node < nodes[number // 2] else []
        lines.append((str(node), {"event": "out-of-reach", "nodes": beyond}))
        lines.append((str(node), {"event": "relayed", "seconds": 1.0}))
    run = run_of(nodes, lines)
    LOOKS.clear()
    assert run.await_ready(float("inf")) == set()
    assert relay_source.await_relay(run, nodes, str, float("inf")) == {}
    return LOOKS["all"] / number


def test_what_came_while_the_driver_stood_still_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of its time is over when it first looks: nobody is late for that."""
    nodes = ("node01", "node02")
    lines = [(node, {"event": "ready", "address": "::1", "port": 1}) for node in nodes]
    run = run_of(nodes, lines)
    hours = count(0.0, 3600.0)
    monkeypatch.setattr(phase_run, "time", SimpleNamespace(monotonic=lambda: next(hours)))
    assert run.await_ready(float("inf")) == set()


def test_the_work_grows_with_what_is_new_alone() -> None:
    """With every node looked at for each message, it would be as many looks as there are nodes."""
    few, many = looks_per_node(64), looks_per_node(512)
    assert few == pytest.approx(many, rel=0.5)
    assert many < 20
