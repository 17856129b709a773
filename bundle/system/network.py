"""Addresses, interfaces and ports: how the ranks of a job find each other.

The kernel is asked which way it would send; nothing is ever sent to find out.
"""

from __future__ import annotations

import array
import fcntl
import hashlib
import ipaddress
import socket
import struct
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..protocol.problem import NodeError, Problem
from . import hostlist

FIRST_PORT = 61000  # above Linux' default ephemeral range, which ends at 60999
LAST_PORT = 65535

_SIOCGIFCONF = 0x8912  # netdevice(7): all IPv4 addresses, secondary ones too
_IFREQ_SIZE = 40 if sys.maxsize > 2**32 else 32  # struct ifreq: a name and a union with pointers
_LINK_SETTING = "name the interface with [launch] interface in stager.toml, or with --interface"


@dataclass(frozen=True)
class Link:
    """How this node reaches the head node."""

    interface: str
    """Name of the interface, for example ``ens1f1``."""
    address: str
    """This node's own address on it."""


def is_loopback(address: str) -> bool:
    """Whether a numeric address leads back to the same machine; False for anything else."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(parsed, "ipv4_mapped", None)
    return bool((mapped or parsed).is_loopback)


def resolve(hostname: str) -> list[str]:
    """Every address of a name, each once, in the order of the resolver's preference.

    Raises:
        NodeError: this machine cannot resolve the name.
    """
    try:
        found = socket.getaddrinfo(_plain(hostname), None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as exc:
        raise NodeError(
            Problem(
                what="the name cannot be resolved",
                where=hostname,
                why=f"{socket.gethostname()} says: {getattr(exc, 'strerror', None) or exc}",
                fix="add it to DNS or to /etc/hosts on every node",
            )
        ) from exc
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def _plain(hostname: str) -> str | bytes:
    """Return a name for the resolver: bytes, where no table of characters has to be loaded."""
    return hostname.encode() if hostname.isascii() else hostname


def route_to(address: str, port: int) -> str:
    """The address of this machine from which it would send to another, numeric one.

    A UDP socket is connected, which makes the kernel choose a route and sends nothing.

    Raises:
        NodeError: there is no route, or the address is not a numeric one.
    """
    try:
        family, kind, _, _, target = socket.getaddrinfo(
            _plain(address), port, type=socket.SOCK_DGRAM, flags=socket.AI_NUMERICHOST
        )[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError as exc:
        raise NodeError(
            Problem(
                what="there is no route to the address",
                where=address,
                why=f"{socket.gethostname()} says: {exc.strerror or exc}",
                fix="check that the nodes share a network; " + _LINK_SETTING,
            )
        ) from exc


def local_addresses() -> list[Link]:
    """Every address that this machine's interfaces have, IPv4 first.

    From the SIOCGIFCONF call (netdevice(7)) and /proc/net/if_inet6.
    """
    room = 256 * _IFREQ_SIZE
    buffer = array.array("B", bytes(room))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        request = struct.pack("iP", room, buffer.buffer_info()[0])
        filled = struct.unpack("iP", fcntl.ioctl(asker, _SIOCGIFCONF, request))[0]
    links = []
    for at in range(0, filled, _IFREQ_SIZE):
        entry = buffer[at : at + _IFREQ_SIZE].tobytes()
        # A second address may carry a label, "eth0:1"; the interface is what stands before it.
        name = entry[:16].partition(b"\0")[0].decode(errors="replace").partition(":")[0]
        links.append(Link(name, socket.inet_ntop(socket.AF_INET, entry[20:24])))
    try:
        text = Path("/proc/net/if_inet6").read_text("utf-8")
    except OSError:  # a kernel without IPv6
        text = ""
    return links + parse_if_inet6(text)


def parse_if_inet6(text: str) -> list[Link]:
    """Read /proc/net/if_inet6: address in 32 digits, four numbers, interface."""
    rows = [line.split() for line in text.splitlines()]
    return [
        Link(row[5], str(ipaddress.IPv6Address(bytes.fromhex(row[0]))))
        for row in rows
        if len(row) == 6
    ]


def interface_of(address: str) -> str:
    """The interface that has this address.

    Raises:
        NodeError: it is not an address of this machine; the message lists those that are.
    """
    links = local_addresses()
    wanted = address.partition("%")[0]
    for link in links:
        if link.address == wanted:
            return link.interface
    raise _no_such("no interface has this address", address, links)


def address_of(interface: str, like: str = "") -> str:
    """The first address of an interface, of the same family as ``like`` where it has one.

    Raises:
        NodeError: there is no such interface, or it has no address; the message lists those there.
    """
    links = local_addresses()
    own = [link.address for link in links if link.interface == interface]
    if not own:
        raise _no_such("this node has no such interface, or it has no address", interface, links)
    return next((one for one in own if (":" in one) == (":" in like)), own[0])


def interface_for(head_address: str) -> Link:
    """The interface and address by which this node reaches the head node.

    Raises:
        NodeError: there is no route to it.
    """
    if is_loopback(head_address):
        return Link("lo", "127.0.0.1")
    own = route_to(head_address, FIRST_PORT)
    return Link(interface_of(own), own)


def choose_link(setting: str | Mapping[str, str], node: str, head_address: str) -> Link:
    """What ``[launch] interface`` means on this node.

    Args:
        setting: ``auto`` for the route to the head node; a name for all nodes; or names by
            patterns such as ``node0[1-3]``, of which the first that fits counts. A node that
            fits none is treated as ``auto``.
        node: this node's name.
        head_address: numeric address of the head node.

    Raises:
        NodeError: no route, no such interface here, or a pattern that cannot be read.
    """
    name = interface_setting(setting, node)
    if name == "auto":
        return interface_for(head_address)
    return Link(name, address_of(name, like=head_address))


def interface_setting(setting: str | Mapping[str, str], node: str) -> str:
    """The name that ``[launch] interface`` has for this node, or ``auto``.

    Raises:
        NodeError: a pattern that cannot be read.
    """
    if isinstance(setting, str):
        return setting
    return next((name for nodes, name in setting.items() if hostlist.matches(nodes, node)), "auto")


def advertised_address(hostname: str, peer: str = "") -> str:
    """The address under which other nodes reach this host.

    With a peer's numeric address: the one this host would send to it from. Else what its name
    means, loopback left out (Debian puts ``127.0.1.1 name`` into /etc/hosts); else the only
    address that its interfaces have.

    Raises:
        NodeError: none, or several with nothing to choose by.
    """
    if peer and not is_loopback(peer):
        return route_to(peer, FIRST_PORT)
    try:
        named = [address for address in resolve(hostname) if _reachable(address)]
    except NodeError:  # the interfaces may still tell
        named = []
    if named:
        return named[0]
    local = [link for link in local_addresses() if _reachable(link.address)]
    own = [link.address for link in local]
    by_family = [address for address in own if ":" not in address] or own
    if len(by_family) == 1:
        return by_family[0]
    raise _no_such("other nodes cannot be told an address of this host", hostname, local)


def port_for(job_id: str) -> int:
    """A job's own port, outside the ephemeral range; the same on every node without asking."""
    number = int(job_id) if job_id.isascii() and job_id.isdigit() else _hashed(job_id)
    return FIRST_PORT + number % (LAST_PORT - FIRST_PORT + 1)


def free_port(preferred: int, span: int = 64, address: str = "") -> int:
    """The preferred port, or the next one that can be listened on, up to 65535 and round again.

    Args:
        preferred: the first to try, between 61000 and 65535.
        span: how many to try.
        address: a numeric address of this machine; empty for all of them.

    Raises:
        NodeError: all ``span`` ports are taken, or the address is not this machine's.
        ValueError: ``preferred`` is outside the range.
    """
    if not FIRST_PORT <= preferred <= LAST_PORT:
        raise ValueError(f"not between {FIRST_PORT} and {LAST_PORT}: {preferred}")
    why = ""
    for step in range(span):
        port = FIRST_PORT + (preferred - FIRST_PORT + step) % (LAST_PORT - FIRST_PORT + 1)
        try:
            _listen(address, port).close()
        except OSError as exc:
            why = exc.strerror or str(exc)
        else:
            return port
    raise NodeError(
        Problem(
            what=f"none of {span} ports from {preferred} on can be listened on",
            where=f"{socket.gethostname()} {address}".rstrip(),
            why=f"the last answer was: {why}",
            fix="end what is left of earlier jobs on this node",
        )
    )


def _listen(address: str, port: int) -> socket.socket:
    """Listen as a rendezvous store does: address reuse on, both families where there are two."""
    if address:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return socket.create_server((address, port), family=family)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def _hashed(job_id: str) -> int:
    return int.from_bytes(hashlib.sha256(job_id.encode()).digest()[:8], "big")


def _reachable(address: str) -> bool:
    """Whether another machine may use this address: neither loopback nor link-local."""
    return not is_loopback(address) and not ipaddress.ip_address(address).is_link_local


def _no_such(what: str, where: str, links: list[Link]) -> NodeError:
    there = ", ".join(f"{link.interface} {link.address}" for link in links) or "none but loopback"
    why = f"on {socket.gethostname()} there are: {there}"
    return NodeError(Problem(what=what, where=where, why=why, fix=_LINK_SETTING))
