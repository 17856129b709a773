"""One node's look at the network: names, and reaching the head node."""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from bundle.checks import deep
from bundle.checks.deep import await_nodes, connect, resolution
from bundle.protocol.problem import NodeError
from tests.support.namespaces import namespace
from tests.support.needs import lacks
from tests.support.ports import unused_port
from tests.support.processes import until

REPO = Path(__file__).resolve().parents[3]


@pytest.fixture
def port() -> int:
    """A port that nothing listens on."""
    return unused_port()


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
        assert await_nodes("127.0.0.1", port, "77", nodes, 240.0) == []
        assert all(one.result() >= 0 for one in tries)
    assert threading.active_count() == before
    with socket.create_server(("127.0.0.1", port)):
        pass  # free again at once


class Clock:
    """A clock that a test may put forward, in the place of the module ``time``."""

    sleep = staticmethod(time.sleep)

    def __init__(self) -> None:
        self.ahead = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead


def test_who_does_not_come_is_named_and_strangers_do_not_count(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(deep, "time", clock)
    with ThreadPoolExecutor(3) as pool:
        head = pool.submit(await_nodes, "127.0.0.1", port, "77", ["n2", "n3", "n4"], 3600.0)
        came = pool.submit(connect, "127.0.0.1", port, "77", "n2", 3600.0)
        stranger = pool.submit(connect, "127.0.0.1", port, "78", "n3", 3600.0)
        try:
            assert came.result() >= 0
            with pytest.raises(NodeError, match="another program listens there"):
                stranger.result()
            for nonsense in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 5000):
                peer = socket.create_connection(("127.0.0.1", port))
                with peer, suppress(OSError):  # it may have hung up already
                    peer.sendall(nonsense)
                    peer.shutdown(socket.SHUT_WR)
                    peer.recv(100)  # it has been looked at
        finally:
            clock.ahead = 3600.0
            with suppress(OSError):  # wakes the head, whose time is over, if it has not ended
                socket.create_connection(("127.0.0.1", port)).close()
        assert head.result() == ["n3", "n4"]


def test_a_node_that_stands_still_once_it_has_come_counts(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has its answer, and does not get to hanging up."""
    monkeypatch.setattr(deep, "_PATIENCE", 0.1)
    with ThreadPoolExecutor(1) as pool:
        head = pool.submit(await_nodes, "127.0.0.1", port, "77", ["n2"], 3600.0)
        with socket.socket() as peer:
            assert until(lambda: peer.connect_ex(("127.0.0.1", port)) in (0, errno.EISCONN))
            peer.sendall(b"stager 77 n2\n")
            assert head.result() == []


def test_a_head_that_hangs_up_without_a_word_is_asked_again(port: int) -> None:
    """It had waited for a line that a node, which stood still, sent too late."""
    with socket.create_server(("127.0.0.1", port)) as server, ThreadPoolExecutor(1) as pool:
        trying = pool.submit(connect, "127.0.0.1", port, "77", "n2", 3600.0)
        for answer in (b"", b"stager 77\n"):
            peer, _ = server.accept()
            with peer:
                assert peer.recv(100) == b"stager 77 n2\n"
                peer.sendall(answer)
        assert trying.result() >= 0


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


WALL = """from bundle.checks.deep import connect
from bundle.protocol.problem import NodeError
try:
    connect("10.77.0.2", 61000, "77", "n2", 1.5)
    said = "reached"
except NodeError as error:
    said = error.problem.to_json()
print(json.dumps(said))
"""


@pytest.mark.parametrize(
    ("shell", "named"),
    [
        # Nobody at the other end is meant, and nothing comes back. Without an entry for it the
        # kernel would ask who has that address, and say after three seconds that nobody has.
        (
            "ip link add v0 type veth peer name v1; ip link set v1 up\n"
            "ip addr add 10.77.0.1/24 dev v0; ip link set v0 up\n"
            "ip neigh add 10.77.0.2 lladdr 02:00:00:00:00:77 dev v0 nud permanent",
            "no answer within 1.5 s",
        ),
        ("ip link set lo up", "unreachable"),
    ],
)
def test_no_way_there(shell: str, named: str) -> None:
    problem = namespace("-n", shell, WALL)
    assert isinstance(problem, dict)
    assert problem["what"] == "the head node cannot be reached"
    assert named in problem["why"]
    assert problem["fix"]


def test_the_ipv6_address_of_a_head(port: int) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        lacks("ipv6", "no socket can be made at ::1")
    with ThreadPoolExecutor(1) as pool:
        head = pool.submit(await_nodes, "::1", port, "77", ["n2"], 3600.0)
        assert connect("::1", port, "77", "n2", 3600.0) >= 0
        assert head.result() == []


def test_a_head_that_is_told_to_end_while_it_waits(port: int) -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(REPO)!r})\n"
        "from bundle.checks.deep import await_nodes\n"
        f"await_nodes('127.0.0.1', {port}, '77', ['n2'], 3600.0)\n"
    )
    head = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    with socket.socket() as probe:
        assert until(lambda: probe.connect_ex(("127.0.0.1", port)) in (0, errno.EISCONN))
    os.kill(head.pid, 15)
    assert head.wait(timeout=600) == -15
