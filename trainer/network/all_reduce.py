"""``python -m trainer all-reduce``: a test of the network between the ranks of a job.

First each pair of nodes exchanges messages over Gloo, one rank a node, as many pairs at a time as
share no node. So a pair that is stuck is named, and the job does not just hang. Then all ranks add
up one large tensor, whose sum is compared. Rank 0 writes one line (here in three)::

    ALL-REDUCE {"world_size": 6, "nodes": ["n1", "n2", "n3"], "backend": "gloo",
                "bytes": 16777216, "seconds": 0.02, "gb_per_s": 0.84,
                "pairs": [{"a": "n1", "b": "n2", "gb_per_s": 1.1, "latency_us": 45.0}, ...]}

``gb_per_s`` is in 10^9 bytes a second, of a pair one way; ``latency_us`` one way for a few bytes.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import math
import os
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from ..config import TrainerError, explain_errors, shorten_error, whole_number
from . import dist
from .dist import MARGIN, RendezvousStore, World, exchange_faults, require_no_faults

if TYPE_CHECKING:
    from torch import Tensor

# Before Gloo, which tries for minutes, and names no node, the nodes connect by plain TCP.
Address = tuple[str, int]  # numeric address and port

_SIOCGIFADDR = 0x8915  # netdevice(7)
_AT_ONCE = 256  # connections that are tried at a time: a process may have about 1000 files open


def find_own_address(environ: Mapping[str, str]) -> str:
    """Return the address that Gloo will use here: of its interface, else towards the head node."""
    interface, node = environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0], os.uname().nodename
    if interface:
        hint = "correct [launch] interface in stager.toml, or GLOO_SOCKET_IFNAME"
        with explain_errors(f"there is no interface {interface} on {node}", hint):
            socket.if_nametoindex(interface)
        # It may have an IPv6 address alone.
        with contextlib.suppress(OSError), socket.socket(type=socket.SOCK_DGRAM) as handle:
            request = struct.pack("256s", os.fsencode(interface))
            return socket.inet_ntoa(fcntl.ioctl(handle, _SIOCGIFADDR, request)[20:24])
    head = environ.get("MASTER_ADDR", "")
    with explain_errors(
        f"{node} has no route to the head node, {head}",
        "check that the nodes share a network, and what the head's name resolves to",
    ):
        kind = socket.SOCK_DGRAM  # connecting it chooses a route, and sends nothing
        family, _, _, _, target = socket.getaddrinfo(head, 9, type=kind)[0]
        with socket.socket(family, kind) as handle:
            handle.connect(target)
            return str(handle.getsockname()[0])


def open_listener(address: str) -> socket.socket:
    """Return a socket on a free port that others may connect to; the kernel answers for it."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family, backlog=4096)


def find_unreached(targets: Mapping[str, Address], timeout: float) -> dict[str, str]:
    """Connect to all targets, and hang up; return the reason for each one that is not reached."""

    def connect(target: Address) -> str:
        try:
            socket.create_connection(target, timeout).close()
        except TimeoutError:
            return f"no answer within {timeout:g} s"
        except OSError as error:
            return error.strerror or str(error)
        return ""

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        reasons = zip(targets, pool.map(connect, targets.values()), strict=True)
        return {name: why for name, why in reasons if why}


NAME = "all-reduce"
PREFIX = "ALL-REDUCE "
MOST_NODES = 32  # every pair of up to so many nodes is measured; for more see :func:`schedule`

_MIB = 1 << 20
_LARGE, _SMALL = 3, 20  # round trips that are timed
_ROUNDS = 3
_SHOWN = 5  # unreachable nodes that one node names


class AllReduceOptions(NamedTuple):
    """The options on the command line."""

    size_mb: int  # MiB of a large message, and of the tensor
    timeout: int  # seconds of one step: to come together, one pair, the all-reduce


def parse(argv: Sequence[str]) -> AllReduceOptions:
    """Read the arguments after ``all-reduce`` on the command line."""
    parser = argparse.ArgumentParser(
        prog=f"python -m trainer {NAME}",
        description="Check that all ranks can communicate, and measure each pair of nodes.",
    )
    size, seconds = whole_number(1, 1024), whole_number(1, 3600)
    add = partial(parser.add_argument, metavar="N")
    add("--size-mb", type=size, default=16, help="MiB a message (default: 16)")
    add("--timeout", type=seconds, default=60, help="s for one step (default: 60)")
    return AllReduceOptions(**vars(parser.parse_args(argv)))


def run(options: AllReduceOptions, world: World, environ: Mapping[str, str] = os.environ) -> None:
    """Measure, and write the result on rank 0."""
    if not world.launched:
        hint = "start it with torchrun, or with `stager run -- -m trainer all-reduce`"
        raise TrainerError("there are no other ranks to talk to", hint=hint)
    size = options.size_mb * _MIB
    rendezvous = dist.join_rendezvous(world, options.timeout, environ)
    backend, fault = _choose_backend(world, environ)
    with explain_errors(
        f"rank {world.rank} on {rendezvous.here} lost the others",
        "see the log of rank 0, and which rank ended first",
        RuntimeError,
    ):
        require_no_faults(rendezvous, "backend", fault)
        _reach_all(rendezvous, environ)
        _form_group(rendezvous)
        pairs = _measure_pairs(rendezvous, size)
        seconds = _measure_sum(rendezvous, size, backend)
    if world.is_first:
        result = {
            "world_size": world.size,
            "nodes": list(dict.fromkeys(rendezvous.nodes)),
            "backend": backend,
            "bytes": size,
            "seconds": round(seconds, 6),
            "gb_per_s": _rate(size, seconds),
            "pairs": pairs,
        }
        dist.write_line(PREFIX + json.dumps(result))


def schedule(nodes: int) -> list[list[tuple[int, int]]]:
    """Return rounds of pairs of nodes: each pair once, and no node in two pairs of a round.

    With more than ``MOST_NODES`` only neighbours in a line, and each node with the first one.
    """
    if nodes > MOST_NODES:
        line = [(n, n + 1) for n in range(nodes - 1)]
        return [line[::2], line[1::2], *([(0, n)] for n in range(2, nodes))]
    # A tournament: one stays, the others move a seat.
    seats = [*range(nodes), *([-1] if nodes % 2 else [])]
    rounds = []
    for _ in range(len(seats) - 1):
        facing = zip(seats[: len(seats) // 2], reversed(seats), strict=False)
        rounds.append([(min(pair), max(pair)) for pair in facing if -1 not in pair])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return [pairs for pairs in rounds if pairs]


def _reach_all(rendezvous: RendezvousStore, environ: Mapping[str, str]) -> None:
    world, leaders, fault = rendezvous.world, rendezvous.leaders, ""
    with contextlib.ExitStack() as sockets:
        if world.rank in leaders:
            try:
                listener = sockets.enter_context(open_listener(find_own_address(environ)))
                rendezvous.store.set(f"tcp/{world.rank}", json.dumps(listener.getsockname()[:2]))
            except (TrainerError, OSError) as error:
                fault = f"{rendezvous.here}: {getattr(error, 'message', error)}"
            faults = exchange_faults(rendezvous, "listening", fault, leaders)
            fault = "\n".join((faults or _find_unreached_nodes(rendezvous))[:_SHOWN])
        require_no_faults(rendezvous, "reach", fault, 2 * (rendezvous.timeout + MARGIN))


def _find_unreached_nodes(rendezvous: RendezvousStore) -> list[str]:
    targets = {}
    for rank in rendezvous.leaders:
        address, port = json.loads(rendezvous.store.get(f"tcp/{rank}"))
        targets[rendezvous.nodes[rank]] = (address, port)
    here, faults = rendezvous.here, []
    for node, why in find_unreached(targets, rendezvous.timeout).items():
        pair = " and ".join(sorted((here, node), key=list(targets).index))
        faults.append(f"{pair}: {here} cannot connect to {targets[node][0]}: {why}")
    return faults


def _form_group(rendezvous: RendezvousStore) -> None:
    from torch import distributed
    from torch.distributed.distributed_c10d import PrefixStore

    world = rendezvous.world
    fault = ""
    try:
        distributed.init_process_group(
            "gloo",
            store=PrefixStore("gloo", rendezvous.store),
            rank=world.rank,
            world_size=world.size,
            timeout=timedelta(seconds=rendezvous.timeout),
        )
    except RuntimeError as error:
        fault = f"{rendezvous.here}: rank {world.rank} has no connection to the other ranks: "
        fault += shorten_error(error)
    require_no_faults(rendezvous, "group", fault)


def _measure_pairs(rendezvous: RendezvousStore, size: int) -> list[object]:
    """Measure the pairs of nodes, round by round, until there is a fault."""
    rank, leaders = rendezvous.world.rank, rendezvous.leaders
    rounds = [[(leaders[a], leaders[b]) for a, b in pairs] for pairs in schedule(len(leaders))]
    faults: list[str] = []
    for number, pairs in enumerate(rounds if rank in leaders else ()):
        fault = "".join(_measure_pair(rendezvous, pair, size) for pair in pairs if rank in pair)
        faults = exchange_faults(rendezvous, f"round/{number}", fault, leaders)
        if faults:
            break
    # The other ranks of each node wait here until the leaders are through.
    longest = len(rounds) * (rendezvous.timeout + MARGIN)
    require_no_faults(rendezvous, "pairs", "\n".join(faults), longest)
    every = sorted(chain.from_iterable(rounds)) if rendezvous.world.is_first else []
    return [json.loads(rendezvous.store.get(f"pair/{a}/{b}")) for a, b in every]


def _measure_pair(rendezvous: RendezvousStore, ranks: tuple[int, int], size: int) -> str:
    a, b = (rendezvous.nodes[rank] for rank in ranks)
    until = time.monotonic() + rendezvous.timeout
    first = rendezvous.world.rank == ranks[0]
    other = ranks[1] if first else ranks[0]
    try:
        _measure_round_trip(other, first, _MIB, 1, until)
        latency = _measure_round_trip(other, first, 8, _SMALL, until) / 2
        seconds = _measure_round_trip(other, first, size, _LARGE, until) / 2
    except RuntimeError as error:
        return f"{a} and {b}: {size // _MIB} MiB did not get through: {shorten_error(error)}"
    if first:
        speed = {"gb_per_s": _rate(size, seconds), "latency_us": round(latency * 1e6, 1)}
        rendezvous.store.set(f"pair/{ranks[0]}/{ranks[1]}", json.dumps({"a": a, "b": b, **speed}))
    return ""


def _measure_round_trip(other: int, first: bool, size: int, times: int, until: float) -> float:
    """Return the seconds of the fastest round trip; RuntimeError after ``until``."""
    import torch
    from torch import distributed

    message = torch.zeros(size, dtype=torch.uint8)
    steps = (distributed.isend, distributed.irecv)
    quickest = math.inf
    for _ in range(times):
        started = time.monotonic()
        for step in steps if first else reversed(steps):
            left = max(until - time.monotonic(), 0.001)
            step(message, other).wait(timedelta(seconds=left))
        quickest = min(quickest, time.monotonic() - started)
    return quickest


def _measure_sum(rendezvous: RendezvousStore, size: int, backend: str) -> float:
    """Return the seconds of an all-reduce of so many bytes, whose sum was right on every rank."""
    import torch
    from torch import distributed

    world = rendezvous.world
    took, fault = [], ""
    device, group = "cpu", None
    try:
        if backend == "nccl":
            torch.cuda.set_device(world.local_rank)
            device, group = "cuda", distributed.new_group(backend="nccl")
        pattern = (torch.arange(size // 4, device=device) % 7 + 1).to(torch.float32)
        # Whole numbers below 2^24, which float32 holds exactly for up to 37,000 ranks.
        expected = pattern * sum(rank % 64 + 1 for rank in range(world.size))
        for _ in range(_ROUNDS + 1):  # the first one warms up
            tensor = pattern * (world.rank % 64 + 1)
            distributed.barrier()
            started = time.monotonic()
            distributed.all_reduce(tensor, group=group)
            if backend == "nccl":
                torch.cuda.synchronize()
            took.append(time.monotonic() - started)
            fault = fault or _describe_wrong_element(tensor, expected)
    except RuntimeError as error:
        fault = f"the all-reduce did not end: {shorten_error(error)}"
    if fault:
        fault = f"{rendezvous.here}: rank {world.rank}: {fault}"
    require_no_faults(rendezvous, "sum", fault, 2 * _ROUNDS * rendezvous.timeout)
    return min(took[1:])


def _describe_wrong_element(tensor: Tensor, expected: Tensor) -> str:
    wrong = (tensor != expected).nonzero()
    if not len(wrong):
        return ""
    at = int(wrong[0])
    return f"element {at} of the sum is {float(tensor[at]):g}, not {float(expected[at]):g}"


def _choose_backend(world: World, environ: Mapping[str, str]) -> tuple[str, str]:
    """Return the backend, and why it cannot be; empty if it can."""
    import torch

    backend, fault = environ.get("PYTORCH_DIST_BACKEND") or "gloo", ""
    if backend == "nccl":
        node = os.uname().nodename
        fault = dist.describe_missing_gpus(world, node, torch.cuda.device_count())
    elif backend != "gloo":
        fault = f"PYTORCH_DIST_BACKEND={backend} is neither gloo nor nccl"
    return backend, fault


def _rate(size: int, seconds: float) -> float:
    return round(size / max(seconds, 1e-9) / 1e9, 3)
