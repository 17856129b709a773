"""Bringing the environment to the nodes: each failure, and what is tried next."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bundle.driver import driver, placement
from bundle.driver.logs import Logs
from bundle.driver.phases import PLACE
from bundle.driver.placement import convert_disk_errors, make_scratch_dir
from bundle.driver.state import NodesFailed, State
from bundle.driver.transports.transport import (
    Delivery,
    Ended,
    OnEvent,
    Requests,
    Transfer,
    Transport,
)
from bundle.format.archive import BundleFile, Excerpt
from bundle.protocol.codec import encode
from bundle.protocol.enumerations import Allocation, Stage, TransferWay
from bundle.protocol.messages import (
    Incoming,
    PreflightAnswer,
    RelayTask,
    UnpackAnswer,
    UnpackRequest,
)
from bundle.protocol.problem import NodeError, ProblemCode
from stager.core.store import Store
from stager.pack.bundle import Packed
from tests.support.building import wheel_of
from tests.support.bundles import make_bundle
from tests.support.displayed import displayed
from tests.support.jobs import job_for
from tests.support.problems import worded
from tests.support.wheelhouse import make_wheel

ENDED = Ended(ProblemCode.NO_ANSWER, {"why": "exit status 0"}, 0)

NODES = ("n1", "n2", "n3", "n4")
FULL = "No space left on device"


class Sending(Transport):
    """Sends nothing; each time it fails on the nodes that are next in its list."""

    def __init__(self, *fails: dict[str, str]) -> None:
        self.fails = list(fails)
        self.sent: list[tuple[str, ...]] = []
        self.transfers: list[tuple[Transfer, bytes]] = []
        self.read: list[tuple[str, ...]] = []
        self.incoming: list[Incoming] = []
        self.lacking: set[str] = set()
        self.blocking: list[set[str]] = []
        """For each time the nodes that are lost, so that nothing is sent to the others."""

    def run(self, phase: str, requests: Requests, on_event: OnEvent) -> dict[str, Ended]:
        assert phase == "unpack"
        self.read.append(tuple(requests))
        return self._unpacked(requests, on_event)

    def deliver(self, transfer: Transfer, requests: Requests, on_event: OnEvent) -> Delivery:
        self.sent.append(tuple(requests))
        self.transfers.append((transfer, Path(transfer.source).read_bytes()))
        asked = next(iter(requests.values()))
        assert isinstance(asked, UnpackRequest)
        assert asked.incoming is not None
        self.incoming.append(asked.incoming)
        every = self.fails.pop(0) if self.fails else {}
        failed = {node: why for node, why in every.items() if node in requests or not node}
        if self.blocking and (settled := frozenset(self.blocking.pop(0))):
            ended = dict.fromkeys(
                requests, Ended(ProblemCode.NO_ANSWER_SILENT, {"seconds": "20"}, 1)
            )
            return Delivery({"": "not every node was ready for it"}, ended, settled=settled)
        if transfer.token:  # a relay fails on single nodes
            reached = {node: request for node, request in requests.items() if node not in failed}
            return Delivery(failed, self._unpacked(reached, on_event))
        if not failed:
            return Delivery({}, self._unpacked(requests, on_event))
        for node in requests:
            problem = worded("not sent", node, "7 of 9 bytes had arrived", "")
            on_event(UnpackAnswer(node, ok=False, problems=(problem,)))
        return Delivery(failed, {node: ENDED._replace(code=3) for node in requests})

    def _unpacked(self, requests: Requests, on_event: OnEvent) -> dict[str, Ended]:
        for node in requests:
            answer = UnpackAnswer(node, path="/e")
            if node in self.lacking:
                self.lacking.remove(node)
                answer = UnpackAnswer(node, ok=False, lacking=True)
            on_event(answer)
        return dict.fromkeys(requests, ENDED)


@contextlib.contextmanager
def planned(
    packed: Packed,
    folder: Path,
    transport: Sending,
    facts: dict[str, dict[str, Any]],
    **changed: Any,
) -> Iterator[State]:
    """A state whose plan is made, as the preflight found the nodes."""
    job = job_for(packed, folder, nodes=tuple(facts), **changed)
    state = State(job, Logs(job))
    state.transport = transport
    state.facts = {
        node: PreflightAnswer(node, **{"root": "/r", "python": "/p", **one})
        for node, one in facts.items()
    }
    with BundleFile(str(packed.path)) as state.bundle:
        placement.make_and_emit_plan(state)
        yield state


def carried_out(
    packed: Packed,
    folder: Path,
    transport: Sending,
    facts: dict[str, dict[str, Any]] | None = None,
    **changed: Any,
) -> State:
    """Carry out the plan; by default all nodes get the whole bundle, or not."""
    facts = facts or {node: {} for node in NODES}
    with planned(packed, folder, transport, facts, **changed) as state:
        placement.execute_plan(state)
    return state


def whys(state: State) -> dict[str, str]:
    return {node: answer.problems[0].why for node, answer in state.answers.items() if not answer.ok}


def test_a_thin_bundle_is_sent_in_one_file(zstandard_wheel: Path, tmp_path: Path) -> None:
    store, wheels = Store(tmp_path / "store"), [make_wheel(tmp_path, "single")]
    whole = make_bundle(store, wheels, decompressor=wheel_of(zstandard_wheel))
    data = whole.path.read_bytes()
    whole.path.unlink()
    thin = make_bundle(store, wheels, decompressor=wheel_of(zstandard_wheel), thin=True)
    transport = Sending()
    carried_out(thin, tmp_path, transport)
    ((transfer, sent),) = transport.transfers
    assert (sent, transfer.size) == (data, len(data))
    assert not Path(transfer.source).exists()


def test_when_all_goes_well_it_is_sent_once(single: Packed, tmp_path: Path) -> None:
    transport = Sending()
    state = carried_out(single, tmp_path, transport)
    assert transport.sent == [NODES]
    size = single.path.stat().st_size
    ((transfer, data),) = transport.transfers
    assert transfer == Transfer(str(single.path), "/r/incoming/job-4711.0/bundle.tar", size)
    assert data == single.path.read_bytes()
    assert transport.incoming == [Incoming(transfer.target, None, (), size)]
    assert (whys(state), state.bytes_sent, list(state.answers)) == ({}, size, list(NODES))


def test_nodes_that_a_relay_does_not_reach_get_the_bundle_by_sbcast(
    single: Packed, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    transport = Sending({"n2": "no other node can be reached: n1: no answer"}, {})
    facts = {node: {"address": f"10.0.0.{node[1:]}"} for node in NODES}
    state = carried_out(single, tmp_path, transport, facts, transfer=TransferWay.RELAY)
    assert transport.sent == [NODES, ("n2",)]
    relayed, sent = (transfer for transfer, _ in transport.transfers)
    assert (len(relayed.token), sent.token) == (64, "")
    [asked, again] = transport.incoming
    assert asked.relay == RelayTask(relayed.token, "10.0.0.1")
    assert again.relay is None
    assert relayed.target != sent.target, "what the relay left is not in the way"
    said = displayed(state, capfd)
    assert "the relay did not reach n2 (no other node can be reached: n1: no answer)" in said
    assert relayed.token not in said
    assert (whys(state), state.bytes_sent) == ({}, 2 * relayed.size)


@pytest.mark.parametrize("relayed", [False, True])
def test_nodes_that_are_lost_before_anything_is_sent_cost_the_others_nothing(
    single: Packed, tmp_path: Path, capfd: pytest.CaptureFixture[str], *, relayed: bool
) -> None:
    """They are not tried again, and the others have their turn."""
    transport = Sending()
    transport.blocking = [{"n2"}]
    facts = {node: {"address": "10.0.0.1"} if relayed else {} for node in NODES}
    state = carried_out(single, tmp_path, transport, facts)
    assert transport.sent == [NODES, ("n1", "n3", "n4")]
    assert [node for node, answer in state.answers.items() if not answer.ok] == ["n2"]
    assert state.answers["n2"].problems[0].code is ProblemCode.NO_ANSWER_SILENT
    assert state.bytes_sent == single.manifest.size
    assert "sending again" not in displayed(state, capfd)


ODD = {"": "sbcast: error: something odd"}


@pytest.mark.parametrize(
    ("fails", "sent", "failed"),
    [
        # A node that is full fails again; one that had a bad moment does not.
        (
            [{"n2": FULL, "n3": "Timed out"}, {}, {"n2": FULL}, {}],
            [NODES, ("n1", "n4"), ("n2",), ("n3",)],
            {"n2": f"sbcast says: {FULL}; 7 of 9 bytes had arrived"},
        ),
        # Where it fails everywhere each is tried alone.
        (
            [dict.fromkeys(NODES, FULL), {"n1": FULL}, {}, {"n3": FULL}, {}],
            [NODES, *((node,) for node in NODES)],
            dict.fromkeys(("n1", "n3"), f"sbcast says: {FULL}; 7 of 9 bytes had arrived"),
        ),
        # Where no node is named all are tried once more.
        ([ODD], [NODES, NODES], {}),
        (
            [ODD, ODD],
            [NODES, NODES],
            dict.fromkeys(NODES, f"sbcast says: {ODD['']}; 7 of 9 bytes had arrived"),
        ),
        # One fails only the second time: the others get it in a third try.
        (
            [{"n2": FULL}, {"n3": FULL}, {}, {"n2": FULL}, {"n3": FULL}],
            [NODES, ("n1", "n3", "n4"), ("n1", "n4"), ("n2",), ("n3",)],
            dict.fromkeys(("n2", "n3"), f"sbcast says: {FULL}; 7 of 9 bytes had arrived"),
        ),
    ],
)
def test_nodes_that_failed_are_left_aside_and_tried_alone(
    single: Packed,
    tmp_path: Path,
    fails: list[dict[str, str]],
    sent: list[tuple[str, ...]],
    failed: dict[str, str],
) -> None:
    transport = Sending(*fails)
    state = carried_out(single, tmp_path, transport)
    assert (transport.sent, whys(state)) == (sent, failed)
    assert set(state.answers) == set(NODES)  # nobody is left without an answer
    for node in failed:
        (problem,) = state.answers[node].problems
        assert problem.what == "the bundle could not be sent to the node"
        assert "/r/incoming" in problem.fix
        assert f"--exclude={node}" in problem.fix


def test_a_failure_over_ssh_names_no_command_of_slurms(single: Packed, tmp_path: Path) -> None:
    unreached = {"n1": "ssh: connect to host n1 port 22: No route to host"}
    transport = Sending(unreached, unreached, unreached, unreached)
    facts: dict[str, dict[str, Any]] = {"n1": {}}
    with planned(single, tmp_path, transport, facts, allocation=Allocation.SSH) as state:
        placement.execute_plan(state)
        [problem] = state.answers["n1"].problems
        assert (problem.code, problem.what) == (
            ProblemCode.BUNDLE_NOT_SENT_NETWORK,
            "the bundle could not be sent to the node",
        )
        assert problem.why.startswith("ssh says: ssh: connect")
        assert "`ssh n1 true`" in problem.fix
        with pytest.raises(NodesFailed) as caught:
            placement.send_results(state, str(single.path))
    [problem] = caught.value.answers["n1"].problems
    assert problem.what == "earlier results could not be sent to the node"


def test_only_what_is_missing_is_written_and_sent(standard: Packed, tmp_path: Path) -> None:
    transport = Sending()
    facts = {
        "n1": {"ready": True},
        "n2": {"lacks": (1,), "has_wheel": True},
        "n3": {"lacks": (), "has_wheel": True},
        "n4": {"lacks": (), "has_wheel": True, "root": "/elsewhere"},
    }
    state = carried_out(standard, tmp_path, transport, facts)
    assert transport.read == [("n1",)]
    assert transport.sent == [("n2", "n3"), ("n4",)]
    targets = [transfer.target for transfer, _ in transport.transfers]
    assert targets == [
        "/r/incoming/job-4711.1/bundle.tar",
        "/elsewhere/incoming/job-4711.2/bundle.tar",
    ]
    assert state.plan is not None
    assert state.bytes_sent == state.plan.bytes
    for (transfer, data), incoming in zip(transport.transfers, transport.incoming, strict=True):
        assert len(data) == transfer.size == incoming.size
        path = tmp_path / "again.tar"
        path.write_bytes(data)
        assert incoming.manifest is not None
        excerpt = Excerpt(incoming.manifest.encode(), frozenset(incoming.members))
        with BundleFile(str(path), standard.manifest.id, excerpt):
            pass
    assert not any(os.path.exists(transfer.source) for transfer, _ in transport.transfers)
    assert (whys(state), list(state.answers)) == ({}, ["n1", "n2", "n3", "n4"])


def test_a_node_whose_older_environment_has_gone_gets_all_of_it(
    standard: Packed, tmp_path: Path
) -> None:
    transport = Sending()
    transport.lacking = {"n2"}
    facts = {node: {"lacks": (1,), "has_wheel": True} for node in ("n1", "n2")}
    state = carried_out(standard, tmp_path, transport, facts)
    assert transport.sent == [("n1", "n2"), ("n2",)]
    assert transport.transfers[1][0].source == str(standard.path)
    assert transport.incoming[1].manifest is None
    assert whys(state) == {}


def test_the_plan_is_told_and_nodes_that_were_left_out_since_are_not_served(
    single: Packed, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    transport = Sending()
    with planned(single, tmp_path, transport, {"n1": {}, "n2": {}}) as state:
        (told,) = map(json.loads, displayed(state, capfd).splitlines())
        state.job = job_for(single, tmp_path, nodes=("n1",))
        placement.execute_plan(state)
    assert transport.sent == [("n1",)]
    assert told["event"] == "plan"
    assert told["why"] == (
        "sbcast to 2 nodes: n1, n2 cannot see the bundle; no relay, as n1, n2 have no address for "
        "others"
    )
    (layer,) = single.manifest.layers
    size = single.path.stat().st_size
    work = {"sent": size, "bytes": layer.unpacked_size, "files": layer.files, "linked": 0}
    group = {"nodes": ["n1", "n2"], "how": "sbcast", "bytes": size, "layers": [layer.name]}
    assert (told["bytes"], told["groups"], told["cpus"]) == (size, [{**group, "work": work}], 1)
    assert told["forecast"]["measured"] is False
    seconds = told["forecast"]["seconds"]
    assert seconds["total"] > seconds["stage"] > seconds["send"] > 0
    kept = ("why", "bytes", "groups", "cpus", "forecast")
    assert state.result.plan is not None
    assert encode(state.result.plan) == {key: told[key] for key in kept}


def test_nodes_that_cannot_be_served_fail_the_job(single: Packed, tmp_path: Path) -> None:
    making = planned(single, tmp_path, Sending(), {"n1": {}}, stage=Stage.NEVER)
    with pytest.raises(NodesFailed, match="n1"), making:
        pass


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (errno.ENOSPC, ProblemCode.HOST_DISK_FULL),
        (errno.EDQUOT, ProblemCode.HOST_DISK_FULL),
        (errno.EROFS, ProblemCode.HOST_DISK_UNWRITABLE),
        (errno.EIO, ProblemCode.HOST_DISK_UNWRITABLE),
    ],
)
def test_an_error_of_a_file_system_in_a_phase_is_the_hosts(number: int, code: ProblemCode) -> None:
    def fail(state: State) -> None:
        raise OSError(number, os.strerror(number), "/var/tmp/x")

    said = SimpleNamespace(seconds={}, emit=lambda event: None)
    with pytest.raises(NodeError) as caught:
        driver._do(PLACE._replace(use=fail), said)  # type: ignore[arg-type]
    assert caught.value.problem.code is code
    assert caught.value.problem.where == "/var/tmp/x"
    assert os.strerror(number) in caught.value.problem.why
    with pytest.raises(ConnectionResetError), convert_disk_errors():  # it is of no file system
        raise ConnectionResetError(errno.ECONNRESET, "reset")


def test_what_is_temporary_does_not_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with make_scratch_dir() as folder:
        Path(folder, "part").write_bytes(b"x")
    assert not os.path.exists(folder)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    with pytest.raises(NodeError) as caught, make_scratch_dir():
        pass
    assert caught.value.problem.code is ProblemCode.HOST_DISK_UNWRITABLE
