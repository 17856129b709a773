"""Waiting for the nodes of a relay: not for ever for those that say nothing, and at little cost."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from bundle.driver.transports import relay_wait
from bundle.driver.transports.phase_answers import PhaseAnswers
from bundle.driver.transports.phase_run import SECONDS, PhaseRun
from bundle.driver.transports.relay_source import send
from bundle.driver.transports.timeouts import Watch
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


@pytest.fixture
def transfer(tmp_path: Path) -> Transfer:
    """A file to send."""
    (tmp_path / "file").write_bytes(bytes(1000))
    return Transfer(str(tmp_path / "file"), "", 1000, "00" * 32)


def remarks(events: list[Event]) -> list[str]:
    return [event.text for event in events if isinstance(event, Remark)]


def test_an_agent_that_does_not_listen_keeps_nobody_waiting(
    transfer: Transfer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others get their file; it is named for its silence, and has no other turn."""
    monkeypatch.setattr(relay_wait, "_NEXT_SECONDS", 2.0)
    events: list[Event] = []
    with relay_run({"node01": WELL, "node02": MUTE, "node03": WELL}, events) as run:
        failed, _ = send(transfer, run)
        assert failed == {}
        assert run.answers.relayed.keys() == {"node01", "node03"}
        lost = {node: ended.problem for node, ended in run.watch.lost.items()}
    assert lost == {"node02": ProblemCode.NO_ANSWER_SILENT}
    said = "node02 is lost: nothing has come from it for 2 s, and it was waited for"
    assert remarks(events) == [said]


def test_reports_of_nodes_that_listen_make_nobody_wait_longer(
    transfer: Transfer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They report that they unpack, more often than it takes to give up the one that is missing."""
    monkeypatch.setattr(relay_wait, "_NEXT_SECONDS", 2.0)
    monkeypatch.setitem(SECONDS, "unpack", 60.0)  # else a test that fails takes an hour
    with relay_run({"node01": REPORTING, "node02": MUTE}) as run:
        failed, _ = send(transfer, run)
        assert run.answers.relayed.keys() == {"node01"}
        assert failed == {}
        assert run.watch.lost.keys() == {"node02"}


def test_an_agent_that_listens_too_late_has_another_turn(
    transfer: Transfer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slow is not silent: the driver sends it the file in another way."""
    monkeypatch.setattr(relay_wait, "_NEXT_SECONDS", 2.0)
    with relay_run({"node01": LATE, "node02": WELL}) as run:
        failed, _ = send(transfer, run)
        assert run.watch.lost == {}
    assert failed == {"node01": "it began to listen more than 2 s after the others"}


def test_where_no_agent_listens_all_are_lost(
    transfer: Transfer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_wait, "_FIRST_SECONDS", 2.0)
    with relay_run({"node01": MUTE, "node02": MUTE}) as run:
        assert send(transfer, run)[0] == {}
        assert run.watch.lost.keys() == {"node01", "node02"}


def test_a_node_that_falls_silent_is_lost_and_a_slow_one_is_not(
    transfer: Transfer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its network may be gone, its agent stopped: nothing tells but its silence, when asked."""
    monkeypatch.setattr(relay_wait, "_REPORT_SECONDS", 3.0)
    kinds = {"node01": FALLS_SILENT, "node02": SLOW, "node03": WELL, "node04": KILLED}
    with relay_run(kinds) as run:
        failed, _ = send(transfer, run)
        assert failed == {}
        assert run.answers.relayed.keys() == {"node02", "node03"}
        assert run.watch.lost.keys() == {"node01"}
        assert run.step.faults.keys() == {"node04"}  # what srun says is more than its silence


def test_what_is_not_done_in_time_has_another_turn(
    transfer: Transfer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SECONDS, "unpack", 4.0)
    with relay_run({"node01": FALLS_SILENT, "node02": WELL}) as run:
        failed, _ = send(transfer, run)
    assert failed == {"node01": "it was not done in time"}


# --- what the waiting costs ----------------------------------------------------------------------

LOOKS: Counter[str] = Counter()


class Name(str):
    """The name of a node that counts how often it is looked up."""

    def __hash__(self) -> int:
        LOOKS["all"] += 1
        return super().__hash__()


class Step:
    """A step of which one message comes each time; no process could be so regular."""

    ended = False
    faults: dict[str, object] = {}  # noqa: RUF012 - as in the real one, the same object each time

    def __init__(self, lines: list[tuple[str, dict[str, Any]]]) -> None:
        self._lines = iter(lines)

    def pump(self, take: Callable[[str, str], None], seconds: float = 0.5) -> None:
        node, event = next(self._lines)
        take(f"{node}:0", json.dumps({"v": 1, "node": node, **event}))


def looks_per_node(count: int) -> float:
    """How often the name of each of so many nodes is looked up in the two waits together."""
    nodes = tuple(Name(f"node{number:04}") for number in range(count))
    lines: list[tuple[str, dict[str, Any]]] = []
    lines += [(str(node), {"event": "ready", "address": "::1", "port": 1}) for node in nodes]
    for node in nodes:
        beyond = [("node0000", "no answer")] if node < nodes[count // 2] else []
        lines.append((str(node), {"event": "out-of-reach", "nodes": beyond}))
        lines.append((str(node), {"event": "relayed", "seconds": 1.0}))
    requests = cast("Requests", dict.fromkeys(nodes))
    watch = Watch("unpack", nodes, print)
    answers = PhaseAnswers(requests, 1, watch.take, "unpack")
    step = Step(lines)
    run = PhaseRun(cast("Any", step), answers, watch)
    LOOKS.clear()
    assert relay_wait.await_listeners(run, float("inf")) == set()
    assert relay_wait.RelayWait(run, nodes, str).failures(float("inf")) == {}
    return LOOKS["all"] / count


def test_the_work_grows_with_what_is_new_alone() -> None:
    """With every node looked at for each message, it would be as many looks as there are nodes."""
    few, many = looks_per_node(64), looks_per_node(512)
    assert few == pytest.approx(many, rel=0.5)
    assert many < 20
