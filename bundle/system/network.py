"""Addresses, interfaces and ports: how the ranks of a job find each other. Nothing is sent."""

from __future__ import annotations

import array
import contextlib
import fcntl
import hashlib
import ipaddress
import socket
import struct
import sys
from collections.abc import Mapping
from typing import NamedTuple

from ..protocol.problem import NodeError, Problem, ProblemCode
from . import hostlist
from .files import error_text
from .processes import read_proc

FIRST_PORT = 61000  # above Linux' default ephemeral range, which ends at 60999
LAST_PORT = 65535
_TRIES = 64  # ports that are tried at most

_SIOCGIFCONF = 0x8912  # netdevice(7): all IPv4 addresses, secondary ones too
_IFREQ_SIZE = 40 if sys.maxsize > 2**32 else 32  # struct ifreq: a name and a union with pointers


class Route(NamedTuple):
    """The interface and address by which this node reaches the head node."""

    interface: str
    address: str  # this node's own address on it


def is_loopback(address: str) -> bool:
    """Return True if a numeric address leads back to the same machine."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(parsed, "ipv4_mapped", None)
    return bool((mapped or parsed).is_loopback)


def resolve(hostname: str) -> list[str]:
    """Return every address of a name, each once, in the resolver's order of preference."""
    try:
        entries = socket.getaddrinfo(_encode_for_resolver(hostname), None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as exc:
        values = {"host": socket.gethostname(), "why": str(getattr(exc, "strerror", "") or exc)}
        raise NodeError(Problem(ProblemCode.NAME_UNRESOLVED, hostname, values)) from exc
    return list(dict.fromkeys(str(entry[4][0]) for entry in entries))


def _encode_for_resolver(hostname: str) -> str | bytes:
    return hostname.encode() if hostname.isascii() else hostname  # for bytes, no codec is loaded


def find_route(address: str, port: int) -> str:
    """Return the address of this machine from which it would send to a numeric address."""
    try:
        family, kind, _, _, target = socket.getaddrinfo(
            _encode_for_resolver(address), port, type=socket.SOCK_DGRAM, flags=socket.AI_NUMERICHOST
        )[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)  # of UDP: the kernel chooses a route, and sends nothing
            return str(probe.getsockname()[0])
    except OSError as exc:
        values = {"host": socket.gethostname(), "why": error_text(exc)}
        raise NodeError(Problem(ProblemCode.NO_ROUTE, address, values)) from exc


def local_addresses() -> list[Route]:
    """Return every address that this machine's interfaces have, IPv4 first."""
    return _list_ipv4_addresses() + parse_if_inet6(read_proc("/proc/net/if_inet6"))


def _list_ipv4_addresses() -> list[Route]:
    size = 256 * _IFREQ_SIZE
    buffer = array.array("B", bytes(size))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
        request = struct.pack("iP", size, buffer.buffer_info()[0])
        filled = struct.unpack("iP", fcntl.ioctl(handle, _SIOCGIFCONF, request))[0]
    links = []
    for start in range(0, filled, _IFREQ_SIZE):
        entry = buffer[start : start + _IFREQ_SIZE].tobytes()
        # A second address may carry a label, "eth0:1", after the interface.
        interface = entry[:16].partition(b"\0")[0].decode(errors="replace").partition(":")[0]
        links.append(Route(interface, socket.inet_ntop(socket.AF_INET, entry[20:24])))
    return links


def parse_if_inet6(text: str) -> list[Route]:
    """Read /proc/net/if_inet6: address in 32 digits, four numbers, interface."""
    rows = [row for row in map(str.split, text.splitlines()) if len(row) == 6]
    return [Route(row[5], str(ipaddress.IPv6Address(bytes.fromhex(row[0])))) for row in rows]


def find_interface(address: str) -> str:
    """Return the interface that has this address."""
    links, without_zone = local_addresses(), address.partition("%")[0]
    for link in links:
        if link.address == without_zone:
            return link.interface
    raise _make_no_such_error(ProblemCode.NO_INTERFACE_WITH_ADDRESS, address, links)


def find_address_on_interface(interface: str, like: str = "") -> str:
    """Return the first address of an interface, of the family of ``like`` if it has one."""
    links = local_addresses()
    addresses = [link.address for link in links if link.interface == interface]
    if not addresses:
        raise _make_no_such_error(ProblemCode.NO_INTERFACE, interface, links)
    fitting = (address for address in addresses if _is_ipv6(address) == _is_ipv6(like))
    return next(fitting, addresses[0])


def choose_link(setting: str | Mapping[str, str], node: str, head_address: str) -> Route:
    """Return the interface and address that ``[launch] interface`` means on this node."""
    name = interface_setting(setting, node)
    if name != "auto":
        return Route(name, find_address_on_interface(name, like=head_address))
    if is_loopback(head_address):
        return Route("lo", "127.0.0.1")
    address = find_route(head_address, FIRST_PORT)
    return Route(find_interface(address), address)


def interface_setting(setting: str | Mapping[str, str], node: str) -> str:
    """Return the name that ``[launch] interface`` has for this node; ``auto`` for the route."""
    if isinstance(setting, str):
        return setting
    names = (name for pattern, name in setting.items() if hostlist.matches_host(pattern, node))
    return next(names, "auto")


def find_advertised_address(hostname: str) -> str:
    """Return the address under which other nodes reach this host: its name's, else the only one."""
    with contextlib.suppress(NodeError, StopIteration):  # Debian's name is that of 127.0.1.1
        return next(filter(_is_reachable, resolve(hostname)))
    links = [link for link in local_addresses() if _is_reachable(link.address)]
    addresses = [link.address for link in links]
    candidates = [address for address in addresses if not _is_ipv6(address)] or addresses
    if len(candidates) != 1:
        raise _make_no_such_error(ProblemCode.NO_ADDRESS_FOR_OTHERS, hostname, links)
    return candidates[0]


def _is_ipv6(address: str) -> bool:
    return ":" in address


def choose_port(job_id: str) -> int:
    """Return a job's own port, outside the ephemeral range; every node computes the same one."""
    if job_id.isascii() and job_id.isdigit():
        number = int(job_id)
    else:
        number = int.from_bytes(hashlib.sha256(job_id.encode()).digest()[:8], "big")
    return FIRST_PORT + number % (LAST_PORT - FIRST_PORT + 1)


def find_free_port(preferred: int) -> int:
    """Return the preferred port, from 61000 up, or the next free one, after 65535 from 61000."""
    why = ""
    for step in range(_TRIES):
        port = FIRST_PORT + (preferred - FIRST_PORT + step) % (LAST_PORT - FIRST_PORT + 1)
        try:
            _listen(port).close()
        except OSError as exc:
            why = error_text(exc)
        else:
            return port
    values = {"span": str(_TRIES), "preferred": str(preferred), "why": why}
    raise NodeError(Problem(ProblemCode.NO_FREE_PORT, socket.gethostname(), values))


def _listen(port: int) -> socket.socket:
    """Listen as a rendezvous store does: with address reuse, and both families if possible."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", port), family=family, dualstack_ipv6=both)


def _is_reachable(address: str) -> bool:
    return not is_loopback(address) and not ipaddress.ip_address(address).is_link_local


def _make_no_such_error(code: ProblemCode, where: str, links: list[Route]) -> NodeError:
    listed = ", ".join(f"{link.interface} {link.address}" for link in links)
    values = {"host": socket.gethostname(), "listed": listed or "none but loopback"}
    return NodeError(Problem(code, where, values))
