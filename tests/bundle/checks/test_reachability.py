"""One node's look at the network: names, and reaching the head node."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bundle.checks.reachability import await_nodes, connect, resolution
from bundle.protocol.problem import NodeError
from tests.support.namespaces import namespace
from tests.support.needs import lacks

REPO = Path(__file__).resolve().parents[3]


@pytest.fixture
def port() -> int:
    """A port that nothing listens on."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def test_names_are_looked_up_by_the_machine_itself() -> None:
    found = resolution(["localhost", "no-such-name.invalid", "localhost"])
    assert list(found) == ["localhost", "no-such-name.invalid"]
    assert found["no-such-name.invalid"] == []
    assert "127.0.0.1" in found["localhost"] or "::1" in found["localhost"]
    assert resolution([]) == {}
    assert json.loads(json.dumps(found)) == found


# --- the way to the head -------------------------------------------------------------------------


def test_every_node_reaches_the_head_whoever_begins(port: int) -> None:
    before = threading.active_count()
    nodes = [f"n{number}" for number in range(2, 30)]
    with ThreadPoolExecutor(len(nodes)) as pool:
        tries = [pool.submit(connect, "127.0.0.1", port, "77", node, 240.0) for node in nodes]
        time.sleep(0.5)  # some have been refused by now
        started = time.monotonic()
        assert await_nodes("127.0.0.1", port, "77", nodes, 240.0) == []
        assert time.monotonic() - started < 120
        seconds = [one.result() for one in tries]
    assert all(0 <= one < 120 for one in seconds)
    assert threading.active_count() == before
    with socket.create_server(("127.0.0.1", port)):
        pass  # free again at once


def test_who_does_not_come_is_named_and_strangers_do_not_count(port: int) -> None:
    with ThreadPoolExecutor(5) as pool:
        head = pool.submit(await_nodes, "127.0.0.1", port, "77", ["n2", "n3", "n4"], 3.0)
        pool.submit(connect, "127.0.0.1", port, "77", "n2", 3.0)
        stranger = pool.submit(connect, "127.0.0.1", port, "78", "n3", 3.0)
        for nonsense in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 5000):
            time.sleep(0.1)
            with socket.create_connection(("127.0.0.1", port)) as peer:
                peer.sendall(nonsense)
        assert head.result() == ["n3", "n4"]
        with pytest.raises(NodeError, match="another program listens there"):
            stranger.result()


def test_nobody_is_expected(port: int) -> None:
    assert await_nodes("127.0.0.1", port, "77", [], 60.0) == []


def test_a_port_that_is_taken(port: int) -> None:
    with (
        socket.create_server(("127.0.0.1", port)),
        pytest.raises(NodeError, match="cannot listen") as error,
    ):
        await_nodes("127.0.0.1", port, "77", ["n2"], 5.0)
    assert error.value.problem.where == f"127.0.0.1:{port}"
    assert "already in use" in error.value.problem.why


def test_nobody_listens(port: int) -> None:
    with pytest.raises(NodeError, match="refused for 1 s") as error:
        connect("127.0.0.1", port, "77", "n2", 1.0)
    assert error.value.problem.where == f"127.0.0.1:{port}"


def test_something_listens_and_says_nothing(port: int) -> None:
    with (
        socket.create_server(("127.0.0.1", port)),
        pytest.raises(NodeError, match="nothing answered within 1 s"),
    ):
        connect("127.0.0.1", port, "77", "n2", 1.0)


WALL = """import socket, time
from bundle.checks.reachability import connect
from bundle.protocol.problem import NodeError
started = time.monotonic()
try:
    connect("10.77.0.2", 61000, "77", "n2", 1.5)
    said = "reached"
except NodeError as error:
    said = error.problem.to_json()
print(json.dumps([said, time.monotonic() - started]))
"""


@pytest.mark.parametrize(
    ("shell", "named"),
    [
        # Nothing answers to ARP at the other end, and nothing comes back.
        (
            "ip link add v0 type veth peer name v1; ip link set v1 up\n"
            "ip addr add 10.77.0.1/24 dev v0; ip link set v0 up",
            "no answer within 1.5 s",
        ),
        ("ip link set lo up", "unreachable"),
    ],
)
def test_no_way_there(shell: str, named: str) -> None:
    problem, seconds = namespace("-n", shell, WALL)
    assert problem["what"] == "the head node cannot be reached"
    assert named in problem["why"]
    assert problem["fix"]
    assert seconds < 3


def test_the_ipv6_address_of_a_head(port: int) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        lacks("ipv6", "no socket can be made at ::1")
    with ThreadPoolExecutor(1) as pool:
        head = pool.submit(await_nodes, "::1", port, "77", ["n2"], 5.0)
        assert connect("::1", port, "77", "n2", 5.0) < 5
        assert head.result() == []


def test_a_head_that_is_told_to_end_while_it_waits(port: int) -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(REPO)!r})\n"
        "from bundle.checks.reachability import await_nodes\n"
        f"await_nodes('127.0.0.1', {port}, '77', ['n2'], 240.0)\n"
    )
    head = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    until = time.monotonic() + 120
    while time.monotonic() < until:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                break
        time.sleep(0.05)
    started = time.monotonic()
    os.kill(head.pid, 15)
    assert head.wait(timeout=300) == -15
    assert time.monotonic() - started < 120
