"""Ports for ranks that a test starts: nobody beside the test is given one of them meanwhile."""

from __future__ import annotations

import collections
import random
import socket

_MOST = 64  # ports that are held at a time; the test of an older one has ended
_held: collections.deque[socket.socket] = collections.deque()


def held_port() -> int:
    """Return a free port of the loopback, and hold it from all but servers with SO_REUSEADDR.

    PyTorch's set it. The kernel gives the port to no other socket that asks for any.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    _held.append(held)
    while len(_held) > _MOST:
        _held.popleft().close()
    return int(held.getsockname()[1])


# Below those that the kernel gives to whoever asks for any, such as a test beside this one.
_BELOW = range(20_000, 28_000)


def unused_port(address: str = "127.0.0.1") -> int:
    """Return a port that nothing listens on, for a program that cannot share it."""
    for port in random.sample(_BELOW, len(_BELOW)):
        try:
            with socket.create_server((address, port)):
                return port
        except OSError:
            continue
    raise AssertionError(f"all of {_BELOW} are taken at {address}")
