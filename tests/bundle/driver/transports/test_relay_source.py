"""The driver's side of a relay: the order of the nodes, where it listens, and what it reads."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from pathlib import Path

import pytest

from bundle.driver.transports.relay_source import in_network_order, listen, send
from bundle.driver.transports.transport import Event, Transfer
from bundle.protocol.events import Remark
from bundle.protocol.messages import Ready
from bundle.protocol.problem import NodeError, ProblemCode
from bundle.transfer.relay_peers import RelayCandidates
from bundle.transfer.relay_process import RelayProcess
from tests.support.relay_step import FAILING, FALLS_SILENT, GIVES_UP, relay_run

# --- their order ---------------------------------------------------------------------------------


def test_nodes_below_one_switch_are_neighbours() -> None:
    switches = {"node01": "top.a", "node02": "top.b", "node03": "top.a", "node04": "top.b"}
    listening = {name: Ready(name, switches=above) for name, above in switches.items()}
    order = in_network_order(switches, listening)
    assert order == ("node01", "node03", "node02", "node04")


def test_without_switches_the_order_is_that_of_the_list() -> None:
    """And nodes that do not listen are left out."""
    names = ("node2", "node10", "node1", "login")
    listening = {name: Ready(name) for name in names[:3]}
    assert in_network_order(names, listening) == names[:3]


# --- where the source listens --------------------------------------------------------------------


def test_the_source_listens_in_the_range_that_a_firewall_leaves_open() -> None:
    with contextlib.closing(listen(None)) as one:
        taken = one.getsockname()[1]
        with contextlib.closing(listen(range(taken, taken + 20))) as other:
            assert other.getsockname()[1] in range(taken + 1, taken + 20)


def test_a_range_in_which_all_ports_are_taken() -> None:
    with contextlib.closing(listen(None)) as one:
        taken = one.getsockname()[1]
        with pytest.raises(OSError, match="Address already in use"):
            listen(range(taken, taken + 1))


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_nodes_may_come_by_either_protocol(address: str) -> None:
    if ":" in address and not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    with contextlib.closing(listen(None)) as source:
        port = source.getsockname()[1]
        socket.create_connection((address, port), timeout=300).close()


# --- what it reads -------------------------------------------------------------------------------


def test_a_file_that_is_gone_is_nobodys_fault(tmp_path: Path) -> None:
    """It had been there when the job began."""
    transfer = Transfer(str(tmp_path / "gone"), "", 1000, "00" * 32)
    with relay_run({"node01": FAILING}) as run, pytest.raises(NodeError) as caught:
        send(transfer, run)
    problem = caught.value.problem
    assert problem.code is ProblemCode.BUNDLE_UNREADABLE
    assert (problem.where, problem.why) == (transfer.source, "No such file or directory")


def test_a_file_that_its_disk_does_not_give_is_no_nodes_fault() -> None:
    """The kernel answers EIO where this process has no memory, as for a broken disk."""
    transfer = Transfer("/proc/self/mem", "", 1_000_000, "00" * 32)
    with (
        relay_run({"node01": FAILING, "node02": FAILING}) as run,
        pytest.raises(NodeError) as caught,
    ):
        send(transfer, run)
    problem = caught.value.problem
    assert problem.code is ProblemCode.BUNDLE_DISK_FAULT
    assert (problem.where, problem.why) == (transfer.source, "Input/output error")


def test_a_file_that_has_become_shorter(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(400))
    transfer = Transfer(str(tmp_path / "file"), "", 1000, "00" * 32)
    with relay_run({"node01": FAILING}) as run, pytest.raises(NodeError) as caught:
        send(transfer, run)
    assert caught.value.problem.why == "it has become shorter: 400 of 1000 bytes are left"


def test_a_source_that_is_killed_is_heard_of_at_once_and_is_no_nodes_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without that, each node would give up by itself, and each would be named."""
    (tmp_path / "file").write_bytes(bytes(1000))
    transfer = Transfer(str(tmp_path / "file"), "", 1000, "00" * 32)
    begin = RelayProcess.begin

    def begin_and_die(source: RelayProcess, candidates: RelayCandidates | None) -> None:
        begin(source, candidates)
        os.kill(source._child, signal.SIGKILL)

    monkeypatch.setattr(RelayProcess, "begin", begin_and_die)
    with (
        relay_run({"node01": FALLS_SILENT, "node02": FALLS_SILENT}) as run,
        pytest.raises(NodeError) as caught,
    ):
        send(transfer, run)
    assert run.liveness.lost == {}
    problem = caught.value.problem
    assert problem.code is ProblemCode.RELAY_SOURCE_ENDED
    assert (problem.where, problem.why) == (transfer.source, "its relay was ended by SIGKILL")
    assert os.uname().nodename in problem.what


class GivingUpAt(list[Event]):
    """The events of a relay, whose nodes give up when the first one comes."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def append(self, event: Event) -> None:
        super().append(event)
        self._path.touch()


@pytest.mark.parametrize("stopped", [True, False], ids=["stopped", "hanging"])
def test_a_source_that_stands_still_is_named_while_the_nodes_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stopped: bool
) -> None:
    """They can say only that it is silent. One that was stopped is no reason not to use sbcast."""
    (tmp_path / "file").write_bytes(bytes(1000))
    transfer = Transfer(str(tmp_path / "file"), "", 1000, "00" * 32)
    begin = RelayProcess.begin

    def begin_and_stop(source: RelayProcess, candidates: RelayCandidates | None) -> None:
        begin(source, candidates)
        os.kill(source.pid, signal.SIGSTOP)

    if stopped:
        monkeypatch.setattr(RelayProcess, "begin", begin_and_stop)
    else:  # as in a read from a disk that does not answer
        monkeypatch.setattr("bundle.transfer.relay.Relay.run", lambda *_: time.sleep(600))
    monkeypatch.setattr("bundle.driver.transports.relay_source.STILL_SECONDS", 1.0)
    events, host = GivingUpAt(tmp_path / "mark"), os.uname().nodename
    with relay_run({"node01": f"{GIVES_UP}{tmp_path / 'mark'}"}, events) as run:
        if stopped:
            assert send(transfer, run)[0] == {"node01": "no other node can be reached"}
        else:
            with pytest.raises(NodeError) as caught:
                send(transfer, run)
            problem = caught.value.problem
            assert problem.code is ProblemCode.RELAY_SOURCE_HANGS
            assert (problem.where, host in problem.what) == (transfer.source, True)
    [remark] = [event for event in events if isinstance(event, Remark)]
    assert f"the process on {host} that sends the bundle has stood still for 1 s" in remark.text
    assert ("stopped, state T" in remark.text) == stopped


def test_a_node_that_has_no_file_though_it_can_be_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(1000))
    transfer = Transfer(str(tmp_path / "file"), "", 1000, "00" * 32)
    with relay_run({"node01": FAILING}) as run:
        failed, _ = send(transfer, run)
    assert failed == {"node01": "no other node can be reached"}


def test_where_this_host_cannot_listen_another_way_is_left(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(1000))
    transfer = Transfer(str(tmp_path / "file"), "", 1000, "00" * 32)
    with contextlib.closing(listen(None)) as one, relay_run({"node01": FAILING}) as run:
        taken = one.getsockname()[1]
        failed, _ = send(transfer, run, range(taken, taken + 1))
    host = os.uname().nodename
    assert failed == {"node01": f"{host} cannot be its source: Address already in use"}
