"""Waiting for the nodes of a relay: not for ever for those that say nothing, and at little cost."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from bundle.driver.transports import phase_run, relay_source
from bundle.driver.transports.liveness import Heartbeats, Liveness
from bundle.driver.transports.phase_run import PhaseAnswers, PhaseRun
from bundle.driver.transports.relay_source import send
from bundle.driver.transports.transport import Event, Requests, Transfer
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


@pytest.mark.parametrize(
    ("kinds", "failed", "lost"),
    [
        pytest.param((WELL, MUTE, WELL), {}, {"node02"}, id="one that does not listen"),
        # Heartbeats come more often than it takes to give up the node that is missing.
        pytest.param((REPORTING, MUTE), {}, {"node02"}, id="heartbeats of those that listen"),
        # Slow is not silent: the driver sends it the file in another way.
        pytest.param(
            (LATE, WELL),
            {"node01": "it began to listen more than 2 s after the others"},
            set(),
            id="one that listens too late",
        ),
    ],
)
def test_who_is_lost_and_who_has_another_turn(
    transfer: Transfer,
    monkeypatch: pytest.MonkeyPatch,
    kinds: tuple[str, ...],
    failed: dict[str, str],
    lost: set[str],
) -> None:
    monkeypatch.setattr(phase_run, "NEXT_SECONDS", 2.0)
    named = {f"node{number:02}": kind for number, kind in enumerate(kinds, 1)}
    with relay_run(named) as run:
        assert send(transfer, run)[0] == failed
        assert run.answers.relayed.keys() == named.keys() - failed.keys() - lost
        codes = {node: ended.problem for node, ended in run.liveness.lost.items()}
    assert codes == dict.fromkeys(lost, ProblemCode.NO_ANSWER_SILENT)


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
