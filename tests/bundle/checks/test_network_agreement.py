"""What nodes find out about names, the way to the head and the time, and what it means together."""

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

from bundle.checks.network_agreement import (
    Clock,
    Offset,
    await_nodes,
    connect,
    disagreements,
    offset,
    resolution,
    skewed,
)
from bundle.protocol.problem import NodeError
from tests.support.namespaces import namespace

REPO = Path(__file__).resolve().parents[3]


@pytest.fixture
def port() -> int:
    """A port that nothing listens on."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


# --- names ---------------------------------------------------------------------------------------

ONE, TWO, THREE = ["10.0.0.1"], ["10.0.0.2"], ["10.0.0.3"]
AGREED = {"n1": ONE, "n2": TWO, "n3": THREE}


def said(**changes: dict[str, list[str]]) -> dict[str, str]:
    """The problems of three nodes that agree but for these changes, as text by node."""
    answers = {node: {**AGREED, **changes.get(node, {})} for node in AGREED}
    found = disagreements(answers)
    assert {problem.where for node in found for problem in found[node]} == set(found)
    return {node: "\n".join(map(str, found[node])) for node in found}


def test_names_are_looked_up_by_the_machine_itself() -> None:
    found = resolution(["localhost", "no-such-name.invalid", "localhost"])
    assert list(found) == ["localhost", "no-such-name.invalid"]
    assert found["no-such-name.invalid"] == []
    assert "127.0.0.1" in found["localhost"] or "::1" in found["localhost"]
    assert resolution([]) == {}
    assert json.loads(json.dumps(found)) == found


def test_agreement_is_no_problem() -> None:
    assert said() == {}
    assert said(n1={"n1": ["10.0.0.1", "192.168.7.1"]}) == {}
    assert said(n1={"n1": ["10.0.0.1", "127.0.1.1", "fe80::1%eth0", "fe80::2"]}) == {}
    assert disagreements({}) == {}
    assert disagreements({"n1": {"n1": ONE}}) == {}


def test_a_name_that_one_node_does_not_find() -> None:
    found = said(n3={"n1": [], "n2": []})
    assert list(found) == ["n3"]
    assert "no address for n1, n2" in found["n3"]
    assert "/etc/hosts" in found["n3"]


def test_a_name_that_nobody_finds_is_everybodys_problem() -> None:
    found = said(n1={"n2": []}, n2={"n2": []}, n3={"n2": []})
    assert list(found) == ["n1", "n2", "n3"]


def test_debians_own_address_of_a_host_is_named() -> None:
    found = said(n1={"n1": ["127.0.1.1"]})
    assert list(found) == ["n1"]
    assert "n1 is 127.0.1.1" in found["n1"]
    assert "lead back to the node itself" in found["n1"]


def test_the_minority_is_wrong() -> None:
    found = said(n2={"n1": ["10.9.9.9"]})
    assert list(found) == ["n2"]
    assert "n1 is 10.9.9.9, not 10.0.0.1" in found["n2"]


@pytest.mark.parametrize("stale", ["n1", "n2"])
def test_of_two_nodes_the_one_that_has_the_name_is_right(stale: str) -> None:
    other = {"n1": "n2", "n2": "n1"}[stale]
    answers = {"n1": {"n1": ONE, "n2": TWO}, "n2": {"n1": ONE, "n2": TWO}}
    answers[stale] = {**answers[stale], other: ["10.9.9.9"]}
    assert list(disagreements(answers)) == [stale]


def test_addresses_that_only_overlap_are_not_the_same() -> None:
    both = ["10.0.0.1", "10.0.0.8"]
    found = said(n1={"n1": both}, n3={"n1": both}, n2={"n1": ["10.0.0.1", "10.9.9.9"]})
    assert list(found) == ["n2"]


def test_a_whole_file_of_wrong_hosts_is_one_problem() -> None:
    names = {f"n{number}": [f"10.0.0.{number}"] for number in range(1, 41)}
    stale = {name: [f"10.1.0.{name[1:]}"] for name in names}
    found = disagreements({node: stale if node == "n7" else names for node in names})
    assert list(found) == ["n7"]
    assert len(found["n7"]) == 1
    assert "and 36 more" in found["n7"][0].why


def test_real_hosts_files_that_differ() -> None:
    """Two nodes' own /etc/hosts, read by the resolver of each."""
    code = (
        "from bundle.checks.network_agreement import resolution\n"
        "print(json.dumps(resolution(['hpc-a', 'hpc-b', 'hpc-c'])))"
    )

    def answer(hosts: str) -> object:
        lines = "".join(f"echo {line} >>/mnt/hosts\n" for line in hosts.split("; "))
        mounted = "mount -t tmpfs none /mnt\n" + lines + "mount --bind /mnt/hosts /etc/hosts"
        return namespace("-mn", mounted, code)

    good = "10.0.0.1 hpc-a; 10.0.0.2 hpc-b"
    found = disagreements(
        {
            "hpc-a": answer("127.0.1.1 hpc-a; 10.0.0.2 hpc-b; 10.0.0.3 hpc-c"),
            "hpc-b": answer(good + "; 10.0.0.3 hpc-c"),
            "hpc-c": answer(good),
        }
    )
    assert {node: [problem.why for problem in found[node]] for node in found} == {
        "hpc-a": ["hpc-a is 127.0.1.1"],
        "hpc-c": ["no address for hpc-c"],
    }


# --- the way to the head -------------------------------------------------------------------------


def test_every_node_reaches_the_head_whoever_begins(port: int) -> None:
    before = threading.active_count()
    nodes = [f"n{number}" for number in range(2, 30)]
    with ThreadPoolExecutor(len(nodes)) as pool:
        tries = [pool.submit(connect, "127.0.0.1", port, "77", node, 20.0) for node in nodes]
        time.sleep(0.5)  # some have been refused by now
        started = time.monotonic()
        assert await_nodes("127.0.0.1", port, "77", nodes, 20.0) == []
        assert time.monotonic() - started < 10
        seconds = [one.result() for one in tries]
    assert all(0 <= one < 5 for one in seconds)
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
        started = time.monotonic()
        assert head.result() == ["n3", "n4"]
        assert time.monotonic() - started < 6
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
    started = time.monotonic()
    with pytest.raises(NodeError, match="refused for 1 s") as error:
        connect("127.0.0.1", port, "77", "n2", 1.0)
    assert time.monotonic() - started < 2
    assert error.value.problem.where == f"127.0.0.1:{port}"


def test_something_listens_and_says_nothing(port: int) -> None:
    with (
        socket.create_server(("127.0.0.1", port)),
        pytest.raises(NodeError, match="in 1 s nobody answered"),
    ):
        connect("127.0.0.1", port, "77", "n2", 1.0)


WALL = """import socket, time
from bundle.checks.network_agreement import connect
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
        pytest.skip("this machine has no IPv6")
    with ThreadPoolExecutor(1) as pool:
        head = pool.submit(await_nodes, "::1", port, "77", ["n2"], 5.0)
        assert connect("::1", port, "77", "n2", 5.0) < 5
        assert head.result() == []


def test_a_head_that_is_told_to_end_while_it_waits(port: int) -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(REPO)!r})\n"
        "from bundle.checks.network_agreement import await_nodes\n"
        f"await_nodes('127.0.0.1', {port}, '77', ['n2'], 60.0)\n"
    )
    head = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    until = time.monotonic() + 20
    while time.monotonic() < until:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                break
        time.sleep(0.05)
    started = time.monotonic()
    os.kill(head.pid, 15)
    assert head.wait(timeout=20) == -15
    assert time.monotonic() - started < 5


# --- the time ------------------------------------------------------------------------------------


def test_an_offset_is_known_as_well_as_the_answer_was_quick() -> None:
    assert offset(Clock(100.0, 107.0, 104.0)) == Offset(5.0, 2.0)
    assert offset(Clock(100.0, 100.0, 100.0)) == Offset(0.0, 0.0)


def ahead(seconds: float, wait: float = 0.2) -> Clock:
    """A clock so far ahead of the driver's, asked in so many seconds."""
    return Clock(1e9, 1e9 + wait / 2 + seconds, 1e9 + wait)


def test_clocks_that_agree() -> None:
    assert skewed({"n1": ahead(0.0), "n2": ahead(1.8), "n3": ahead(-0.9)}) == {}
    assert skewed({}) == {}


@pytest.mark.parametrize(("seconds", "way"), [(7.3, "7.3 s ahead of"), (-60.0, "60.0 s behind")])
def test_a_clock_that_is_off_is_named_with_its_direction(seconds: float, way: str) -> None:
    found = skewed({"n1": ahead(0.1), "n2": ahead(seconds), "n3": ahead(0.0)})
    assert list(found) == ["n2"]
    assert way in found["n2"][0].why
    assert found["n2"][0].where == "n2"


def test_the_driver_may_be_the_one_that_is_wrong() -> None:
    assert skewed({"n1": ahead(300.0), "n2": ahead(300.5), "n3": ahead(299.9)}) == {}


def test_of_two_nodes_the_one_that_agrees_with_the_driver_is_right() -> None:
    assert list(skewed({"n1": ahead(30.0), "n2": ahead(0.0)})) == ["n1"]
    assert list(skewed({"n1": ahead(-30.0)})) == ["n1"]


def test_what_is_uncertain_is_not_held_against_a_node() -> None:
    assert skewed({"n1": ahead(0.0), "n2": ahead(4.0, wait=6.0), "n3": ahead(0.0)}) == {}
    assert list(skewed({"n1": ahead(0.0), "n2": ahead(9.0, wait=6.0), "n3": ahead(0.0)})) == ["n2"]


def test_a_real_clock_that_is_off() -> None:
    """Time is asked of a real process, whose answer is shifted."""
    clocks = {}
    for node, shift in (("n1", 0.0), ("n2", 0.0), ("n3", 5.0)):
        sent = time.time()
        argv = [sys.executable, "-c", "import time; print(time.time())"]
        said = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
        clocks[node] = Clock(sent, float(said) + shift, time.time())
    assert list(skewed(clocks)) == ["n3"]
    assert json.loads(json.dumps(clocks["n1"])) == list(clocks["n1"])
