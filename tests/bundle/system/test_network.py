"""Addresses and ports, asked of the real kernel; network namespaces stand for odd nodes."""

import socket
from pathlib import Path

import pytest

from bundle.protocol.problem import NodeError
from bundle.system import network
from tests.support.namespaces import namespace
from tests.support.needs import lacks

SAY = """
from bundle.system import network as net
def say(function):
    try:
        print(json.dumps(function()))
    except net.NodeError as exc:
        print(json.dumps(str(exc)))
"""

TWO_ADDRESSES = """
import fcntl, socket, struct
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
    for label, address in ((b"lo", "10.9.8.6"), (b"lo:1", "10.9.8.7")):
        to = struct.pack("16sHH4s8x", label, socket.AF_INET, 0, socket.inet_aton(address))
        fcntl.ioctl(asker, 0x8916, to)  # SIOCSIFADDR
"""


def outside() -> list[network.Route]:
    """This machine's IPv4 addresses that are not loopback."""
    links = [link for link in network.local_addresses() if not network.is_loopback(link.address)]
    return [link for link in links if ":" not in link.address]


@pytest.mark.parametrize("name", ["no-such-host.invalid", "a" * 70 + ".example", "a..b"])
def test_a_name_that_cannot_be_resolved(name: str) -> None:
    assert set(network.resolve("localhost")) <= {"127.0.0.1", "::1"}
    assert network.resolve("10.1.2.3") == ["10.1.2.3"]
    with pytest.raises(NodeError, match="no route"):
        network.find_route("localhost", 61000)  # which needs a numeric address
    with pytest.raises(NodeError, match="cannot be resolved") as caught:
        network.resolve(name)
    assert caught.value.problem.where == name


def test_every_address_of_the_kernel_is_listed() -> None:
    links = network.local_addresses()
    assert network.Route("lo", "127.0.0.1") in links
    assert {link.interface for link in links} <= {name for _, name in socket.if_nameindex()}
    listed = Path("/proc/net/fib_trie").read_text().split("\n")
    marked = [at for at, line in enumerate(listed) if "/32 host LOCAL" in line]
    local = {listed[at - 1].split()[-1] for at in marked}
    assert {link.address for link in links if ":" not in link.address} == local
    text = (
        "00000000000000000000000000000001 01 80 10 80       lo\n"
        "fd000000000000000000000000000002 04 40 00 82   ens1f1\n"
    )
    assert network.parse_if_inet6(text) == [
        network.Route("lo", "::1"),
        network.Route("ens1f1", "fd00::2"),
    ]
    assert all(map(network.is_loopback, ["127.0.0.1", "127.0.1.1", "::1", "::ffff:127.0.0.1"]))
    assert not any(map(network.is_loopback, ["10.0.0.1", "fe80::1%eth0", "localhost"]))


def test_second_addresses_belong_to_their_interface() -> None:
    ask = (
        "[net.find_interface('10.9.8.7'), net.find_address_on_interface('lo'),"
        " len(net.local_addresses())]"
    )
    code = f"{SAY}{TWO_ADDRESSES}say(lambda: {ask})"
    assert namespace("-n", "", code) == ["lo", "10.9.8.6", 2]


def test_own_addresses_lead_to_their_interface() -> None:
    for link in [network.Route("lo", "127.0.0.1"), *outside()]:
        assert network.find_route(link.address, 61000) == link.address
        assert network.find_interface(link.address) == link.interface
        assert network.choose_link("auto", "n", link.address) == link
    for address in ("127.0.1.1", "::1"):
        assert network.choose_link("auto", "n", address) == network.Route("lo", "127.0.0.1")
    with pytest.raises(NodeError, match=r"no interface has this address.* lo 127\.0\.0\.1"):
        network.find_interface("192.0.2.77")


def test_choose_link() -> None:
    head = "127.0.0.1"
    lo = network.Route("lo", "127.0.0.1")
    assert network.choose_link("auto", "node01", head) == lo
    assert network.choose_link("lo", "node01", head) == lo
    by_node = {"node0[1-3]": "no-such0", "node05": "lo"}
    assert network.choose_link(by_node, "node05", head) == lo
    assert network.choose_link(by_node, "node09", head) == lo  # fits none: auto
    with pytest.raises(NodeError, match=r"no-such0.* no such interface.* lo 127\.0\.0\.1"):
        network.choose_link(by_node, "node02", head)
    with pytest.raises(NodeError, match="brackets"):
        network.choose_link({"node[": "lo"}, "node02", head)


def test_the_address_of_an_interface_is_of_the_head_s_family() -> None:
    if "::1" not in {link.address for link in network.local_addresses()}:
        lacks("ipv6", "no socket can be made at ::1")
    assert network.find_address_on_interface("lo", like="fd00::1") == "::1"
    assert network.find_address_on_interface("lo", like="10.0.0.1") == "127.0.0.1"


@pytest.mark.parametrize("listed", ["127.0.1.1 {host}", "127.0.0.1 localhost {host}", ""])
def test_advertises_no_loopback_address(tmp_path: Path, listed: str) -> None:
    links = outside()
    if len(links) != 1:
        pytest.skip("this machine has no, or more than one, address of its own")
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost\n" + listed.format(host=socket.gethostname()) + "\n")
    code = f"{SAY}say(lambda: net.find_advertised_address({socket.gethostname()!r}))"
    found = namespace("-m", f"mount --bind {hosts} /etc/hosts", code)
    assert found == links[0].address


def test_of_several_addresses_the_one_that_the_name_means_is_advertised(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.1.1 known\n10.9.8.7 known\n")
    mount = f"mount --bind {hosts} /etc/hosts"
    code = f"{SAY}{TWO_ADDRESSES}say(lambda: net.find_advertised_address('known'))"
    assert namespace("-mn", mount, code) == "10.9.8.7"
    code = f"{SAY}{TWO_ADDRESSES}say(lambda: net.find_advertised_address('unknown'))"
    said = str(namespace("-mn", mount, code))
    assert "unknown: this host has no address" in said
    assert "lo 10.9.8.6, lo 10.9.8.7" in said


def test_without_a_network_it_says_so() -> None:
    code = SAY + "say(lambda: net.find_advertised_address('no-such-host.invalid'))"
    said = str(namespace("-n", "", code))
    assert "has no address that other nodes can be given" in said
    assert "[launch] interface" in said
    code = SAY + "say(lambda: net.choose_link('auto', 'n', '192.0.2.1').address)"
    said = str(namespace("-n", "", code))
    assert "192.0.2.1: there is no route" in said
    assert "unreachable" in said


def test_a_job_s_port() -> None:
    assert network.choose_port("0") == 61000
    assert network.choose_port("4535") == 65535
    assert network.choose_port("4536") == 61000
    assert network.choose_port("123456") == 61000 + 123456 % 4536
    odd = {network.choose_port(name) for name in ("12_3", "local-a", "local-b", "¹", "")}
    assert len(odd) == 5
    assert all(61000 <= port <= 65535 for port in odd)
    assert network.choose_port("local-a") == 61052  # the same on every node and in every version


@pytest.mark.parametrize("taken_on", ["127.0.0.1", "0.0.0.0"])
def test_a_taken_port_is_passed_over(taken_on: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server((taken_on, 65535)):  # after the last port comes the first
        assert 61000 <= network.find_free_port(65535) < 61064
    base = network.find_free_port(64000)
    with socket.create_server((taken_on, base)):
        found = network.find_free_port(base)
        assert base < found <= base + 64
        monkeypatch.setattr(network, "_TRIES", 1)
        with pytest.raises(NodeError, match=rf"none of the 1 ports from {base}.*in use"):
            network.find_free_port(base)
    assert network.find_free_port(base) == base
