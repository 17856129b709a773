"""The check that a node can connect to those that it would take the file from.

A firewall between nodes that drops what is sent shows in nothing but time. So each node tries all
at once, while the relay begins, and tells the driver whom it cannot connect to.
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
import time

from . import trees
from .relay_places import RelayCandidates

CONTACT_SECONDS = 1.5
"""Time for all connections to stand. A lost packet is sent again after a second."""


def unreachable(candidates: RelayCandidates) -> dict[int, str]:
    """Try to connect to the parents of this node; return whom it cannot reach, and why.

    The source is left out: a node has asked it for its places. Takes :data:`CONTACT_SECONDS` at
    most. Nothing is sent.
    """
    parents = {chain[0] for chain in candidates.by_tree} - {trees.SOURCE}
    return _failures(
        {
            place.position: (place.address, place.port)
            for place in candidates.places
            if place.position in parents
        }
    )


def _failures(places: dict[int, tuple[str, int]]) -> dict[int, str]:
    """Connect to all at once; return the reasons of failures."""
    failures: dict[int, str] = {}
    open_ones: dict[int, socket.socket] = {}
    for place, address in places.items():
        try:
            open_ones[place] = _connecting(address)
        except OSError as exc:
            failures[place] = _reason(exc.errno)
    until = time.monotonic() + CONTACT_SECONDS
    with selectors.DefaultSelector() as selector:
        for place, connection in open_ones.items():
            selector.register(connection, selectors.EVENT_WRITE, place)
        while open_ones:
            # A node that stood still looks once more: what stands by then has been reached.
            ready = selector.select(max(0.0, until - time.monotonic()))
            if not ready:
                break
            for key, _ in ready:
                connection = open_ones.pop(key.data)
                selector.unregister(connection)
                code = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                connection.close()
                if code:
                    failures[key.data] = _reason(code)
    for place, connection in open_ones.items():
        connection.close()
        failures[place] = f"no answer within {CONTACT_SECONDS:g} s"
    return failures


def _connecting(address: tuple[str, int]) -> socket.socket:
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    connection = socket.socket(family, socket.SOCK_STREAM)
    connection.setblocking(False)
    try:
        connection.connect(address)
    except BlockingIOError:
        pass
    except BaseException:
        connection.close()
        raise
    return connection


def _reason(code: int | None) -> str:
    return os.strerror(code or errno.EIO).lower()
