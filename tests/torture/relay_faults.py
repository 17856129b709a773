"""What is done to the nodes of a relay while a file travels, and what they are held to then."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from .relay_nodes import Swarm

# What a fault may cost: nothing; the copy on that node's disk; that node; all of them.
WELL, DAMAGED, LOST, CUT_OFF = "well", "damaged", "lost", "cut off"


class Fault(NamedTuple):
    cost: str
    strike: Callable[[Swarm, int], object]
    on_source: bool = False  # whether it hits the source, and not a node


def _stop(swarm: Swarm, place: int) -> None:
    swarm.kill(place, signal.SIGSTOP)


def _stop_for_a_while(swarm: Swarm, place: int) -> None:
    swarm.kill(place, signal.SIGSTOP)
    _later(swarm.rng.uniform(0.2, 8), lambda: swarm.kill(place, signal.SIGCONT))


def _cut(swarm: Swarm, place: int) -> None:
    swarm.network.cut(place)


def _cut_for_a_while(swarm: Swarm, place: int) -> None:
    swarm.network.cut(place)
    time.sleep(swarm.rng.uniform(0.2, 4))
    swarm.network.mend(place)


def _part(swarm: Swarm, place: int) -> None:
    """Drop what a node and some others send to each other; the source reaches all."""
    others = [other for other in swarm.others if other != place]
    for other in swarm.rng.sample(others, swarm.rng.randint(1, len(others))):
        swarm.network.read_part(place, other)


def _corrupt(swarm: Swarm, place: int) -> None:
    with contextlib.suppress(FileNotFoundError), swarm.path(place).open("r+b") as handle:
        length = os.fstat(handle.fileno()).st_size
        for _ in range(swarm.rng.randint(1, 20)):
            handle.seek(swarm.rng.randrange(max(1, length)))
            handle.write(swarm.rng.randbytes(16)[: max(0, length - handle.tell())])


def _strangers(swarm: Swarm, data: bytes) -> None:
    """Connect to nodes and the source; say something, or nothing; and keep the connections."""
    kept = []
    for _ in range(swarm.rng.randint(1, 200)):
        with contextlib.suppress(OSError):
            connection = socket.create_connection(swarm.rng.choice(swarm.places), timeout=0.2)
            connection.sendall(data)
            kept.append(connection)
    _later(20, lambda: [connection.close() for connection in kept])


def _drip(swarm: Swarm, place: int) -> None:
    """Say one byte a second, to everybody."""
    for address in swarm.places:
        with contextlib.suppress(OSError):
            connection = socket.create_connection(address, timeout=0.2)
            threading.Thread(target=_drip_into, args=(connection,), daemon=True).start()


def _drip_into(connection: socket.socket) -> None:
    with contextlib.suppress(OSError), connection:
        for _ in range(30):
            connection.sendall(b"x")
            time.sleep(1)


def _later(seconds: float, act: Callable[[], object]) -> None:
    def acting() -> None:
        with contextlib.suppress(ProcessLookupError):
            act()

    timer = threading.Timer(seconds, acting)
    timer.daemon = True
    timer.start()


DISK = "its disk is full"  # what is so from the beginning
FAULTS = {
    "killed": Fault(LOST, Swarm.kill),
    "stopped": Fault(LOST, _stop),
    "stopped for a while": Fault(WELL, _stop_for_a_while),
    "cut off": Fault(LOST, _cut),
    "cut off for a while": Fault(WELL, _cut_for_a_while),
    "parted from some": Fault(WELL, _part),
    "gets another address": Fault(WELL, lambda swarm, place: swarm.network.move(place)),
    "becomes slow": Fault(
        WELL, lambda swarm, place: swarm.network.shape(place, f"{swarm.rng.randint(1, 4)}mbit")
    ),
    "its copy is damaged": Fault(DAMAGED, _corrupt),
    DISK: Fault(LOST, lambda swarm, place: None),
    "strangers with garbage": Fault(
        WELL,
        lambda swarm, place: _strangers(swarm, swarm.rng.randbytes(swarm.rng.randint(1, 300))),
        on_source=True,
    ),
    "strangers that are silent": Fault(
        WELL, lambda swarm, place: _strangers(swarm, b""), on_source=True
    ),
    "strangers with a byte a second": Fault(WELL, _drip, on_source=True),
    "the source is killed": Fault(CUT_OFF, Swarm.kill, on_source=True),
    "the source is stopped": Fault(CUT_OFF, _stop, on_source=True),
    "the source is stopped for a while": Fault(WELL, _stop_for_a_while, on_source=True),
    "the source is cut off": Fault(CUT_OFF, _cut, on_source=True),
    "the source is cut off for a while": Fault(WELL, _cut_for_a_while, on_source=True),
}


def worst(costs: list[str]) -> str:
    return max([WELL, *costs], key=(WELL, DAMAGED, LOST, CUT_OFF).index)
