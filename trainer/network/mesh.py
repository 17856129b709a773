"""A test that the nodes reach each other by plain TCP.

It runs before Gloo, which tries for minutes if there is no answer, and names no node.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import selectors
import socket
import struct
import time
from collections.abc import Mapping, Sequence

from ..config import TrainerError

Address = tuple[str, int]
"""Numeric address and port."""

_SIOCGIFADDR = 0x8915  # netdevice(7)
_AT_ONCE = 256
"""Connections that are tried at a time: a process may have about 1000 files open."""


def own_address(environ: Mapping[str, str]) -> str:
    """Return the address that Gloo will use here: of its interface, else towards the head node.

    Raises:
        TrainerError: there is no such interface, or no route to the head node.
    """
    interface = environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
        try:
            request = struct.pack("256s", os.fsencode(interface)[:15])
            if interface:
                return socket.inet_ntoa(fcntl.ioctl(handle, _SIOCGIFADDR, request)[20:24])
        except OSError as error:
            if error.errno == errno.ENODEV:
                raise TrainerError(
                    f"there is no interface {interface} on {os.uname().nodename}",
                    hint="correct [launch] interface in stager.toml, or GLOO_SOCKET_IFNAME",
                ) from error
            # It may have an IPv6 address alone.
    head = environ.get("MASTER_ADDR", "")
    try:
        kind = socket.SOCK_DGRAM  # connecting it chooses a route, and sends nothing
        family, _, _, _, target = socket.getaddrinfo(head, 9, type=kind)[0]
        with socket.socket(family, kind) as handle:
            handle.connect(target)
            return str(handle.getsockname()[0])
    except OSError as error:
        raise TrainerError(
            f"{os.uname().nodename} has no route to the head node, {head}: "
            f"{error.strerror or error}",
            hint="check that the nodes share a network, and what the head's name resolves to",
        ) from error


def listen(address: str) -> socket.socket:
    """Return a socket on a free port that others may connect to; the kernel answers for it."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family, backlog=4096)


def unreached(targets: Mapping[str, Address], timeout: float) -> dict[str, str]:
    """Connect to all targets, and hang up.

    Returns:
        The reason for each node that cannot be reached.
    """
    names = list(targets)
    failed: dict[str, str] = {}
    for start in range(0, len(names), _AT_ONCE):
        failed.update(_unreached(names[start : start + _AT_ONCE], targets, timeout))
    return failed


def _unreached(
    names: Sequence[str], targets: Mapping[str, Address], timeout: float
) -> dict[str, str]:
    until = time.monotonic() + timeout
    failed, pending = {}, {}
    with contextlib.ExitStack() as sockets, selectors.DefaultSelector() as waiting:
        for name in names:
            address, port = targets[name]
            peer = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
            sockets.enter_context(peer)
            peer.setblocking(False)
            code = peer.connect_ex((address, port))
            if code == errno.EINPROGRESS:
                waiting.register(peer, selectors.EVENT_WRITE, name)
                pending[name] = peer
            elif code:
                failed[name] = os.strerror(code)
        while pending:
            left = max(0.0, until - time.monotonic())
            ready = waiting.select(left)  # also once the time is over: it may have been slept away
            if not ready and not left:
                break
            for key, _ in ready:
                peer = pending.pop(key.data)
                waiting.unregister(peer)
                code = peer.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if code:
                    failed[key.data] = os.strerror(code)
    return {**failed, **dict.fromkeys(pending, f"no answer within {timeout:g} s")}
