"""The driver's part in a relay: it tells the nodes of each other, and is the source of the file."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import socket
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ...channel import agent_channel
from ...protocol.answers import Ready, Relayed
from ...protocol.counts import counted, sized
from ...protocol.problem import NodeError, Problem, ProblemCode
from ...protocol.requests import RELAY_SOURCE, RelayNodes
from ...transfer import trees
from ...transfer.chunks import ChunkFile
from ...transfer.relay import BACKLOG, MOST_CHILDREN
from ...transfer.relay_contact import tries_source
from ...transfer.relay_process import RelayProcess
from .agent_program import packed
from .phase_answers import PhaseAnswers
from .phase_run import SECONDS, PhaseRun
from .transport import Transfer

_SLOW_SHARE = 3.0
"""A node is slow if its file took so many times as long as the others' ..."""
_SLOW_SECONDS = 6.0
"""... and so many seconds more: for as long a sound node may wait for a slow or silent parent,
until it takes another one."""
_SPARE_CHILDREN = MOST_CHILDREN - trees.TREES
"""Nodes that this host can send to besides those at the top of the trees."""
_MOST_REMARKS = 8
"""Lines of one kind."""


def send(
    transfer: Transfer, run: PhaseRun, ports: range | None = None
) -> tuple[dict[str, str], float]:
    """Let the agents of a step take a file from this host, and from each other.

    Args:
        transfer: the file.
        run: the step whose agents listen, or begin to.
        ports: those that nodes may connect to on this host; None for any.

    Returns:
        The nodes that it did not reach, with the reasons, and the seconds that it took.

    Raises:
        NodeError: the file cannot be read, or this host cannot listen.
    """
    deadline = time.monotonic() + SECONDS["unpack"]
    _await_listeners(run, deadline)
    nodes = in_network_order(run.answers.nodes, run.answers.listening)
    started = time.monotonic()
    failed: dict[str, str] = {}
    if nodes:
        with _source(transfer, ports) as port:
            run.step.tell(agent_channel.RELAY + packed(_relay_nodes(nodes, run, port)))
            failed = _await_all(run, nodes, deadline)
    run.step.tell(agent_channel.GO)
    return failed, time.monotonic() - started


def in_network_order(nodes: Iterable[str], listening: Mapping[str, Ready]) -> tuple[str, ...]:
    """Return the nodes that listen: those below one switch together, where Slurm knows them.

    Neighbours in this order are close to each other in the trees.

    Args:
        nodes: all nodes, in the order of Slurm's list.
        listening: what those that listen have said.
    """
    there = [node for node in nodes if node in listening]
    return tuple(sorted(there, key=lambda node: listening[node].switches.split(".")))


@contextlib.contextmanager
def _source(transfer: Transfer, ports: range | None) -> Iterator[int]:
    """Serve a file while the block runs, on the port that it gets.

    Raises:
        NodeError: the file cannot be read, or nobody can connect to this host.
    """
    with contextlib.ExitStack() as resources:
        try:
            handle = os.open(transfer.source, os.O_RDONLY | os.O_CLOEXEC)
            resources.callback(os.close, handle)
            listener = listen(ports)
            port = int(listener.getsockname()[1])
            file = ChunkFile(handle, transfer.size, complete=True)
            source = RelayProcess(file, bytes.fromhex(transfer.token), listener)
        except OSError as exc:
            values = {"why": exc.strerror or str(exc)}
            raise NodeError(
                Problem(ProblemCode.RELAY_NOT_STARTED, transfer.source, values)
            ) from exc
        resources.callback(source.close)
        source.begin(None)
        yield port


def listen(ports: range | None) -> socket.socket:
    """Listen on all addresses of this host, of IPv4 and of IPv6 where it has both.

    Args:
        ports: those to choose from; None for any.

    Raises:
        OSError: none of the ports is free.
    """
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    candidates = random.sample(ports, len(ports)) if ports else [0]
    for port in candidates:
        try:
            listener = socket.create_server(
                ("", port), family=family, backlog=BACKLOG, dualstack_ipv6=both
            )
        except OSError as exc:
            if exc.errno != errno.EADDRINUSE:
                raise
        else:
            listener.setblocking(False)
            return listener
    raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))


def _relay_nodes(nodes: tuple[str, ...], run: PhaseRun, port: int) -> RelayNodes:
    """Return what the agents must know of each other, and of this host."""
    places = [run.answers.listening[node] for node in nodes]
    return RelayNodes(
        nodes=nodes,
        addresses=("", *(place.address for place in places)),
        ports=(port, *(place.port for place in places)),
    )


def _await_listeners(run: PhaseRun, deadline: float) -> None:
    """Wait until every agent listens, has failed, or is lost."""
    step, answers = run.step, run.answers
    while not step.ended and time.monotonic() < deadline:
        if answers.nodes <= answers.ready | answers.answered.keys() | run.lost_nodes():
            return
        step.pump(answers.take)


def _await_all(run: PhaseRun, nodes: tuple[str, ...], deadline: float) -> dict[str, str]:
    """Wait until every node has the file, has failed, or is lost; return those that have failed.

    Where most nodes cannot connect to the others, none is waited for: then it would be this host
    that sends to all of them.
    """
    step, answers = run.step, run.answers
    waiting, hopeless = set(nodes), ""
    while waiting and not hopeless and not step.ended and time.monotonic() < deadline:
        step.pump(answers.take)
        waiting -= answers.relayed.keys() | answers.answered.keys() | run.lost_nodes()
        hopeless = why_hopeless(nodes, answers.out_of_reach)
    failed = {node: report.failure for node, report in answers.relayed.items() if report.failure}
    if hopeless:
        failed.update(dict.fromkeys(waiting, hopeless))
    return {node: failed[node] for node in answers.nodes if node in failed}


def why_hopeless(nodes: Sequence[str], out_of_reach: Mapping[str, Mapping[str, str]]) -> str:
    """Return why most nodes cannot take part in a relay; empty if they can.

    Args:
        nodes: all nodes, in the order of their places.
        out_of_reach: whom each node cannot connect to, with the reasons.
    """
    trying = [node for place, node in enumerate(nodes, 1) if tries_source(place, len(nodes))]
    alone = [node for node in trying if RELAY_SOURCE in out_of_reach.get(node, ())]
    if 2 * len(alone) > len(trying):
        why = out_of_reach[alone[0]][RELAY_SOURCE]
        return f"nodes cannot connect to this host, {alone[0]} for example: {why}"
    cut_off = [node for node in nodes if out_of_reach.get(node, {}).keys() - {RELAY_SOURCE}]
    if len(cut_off) > max(len(nodes) // 2, _SPARE_CHILDREN):
        other, why = next(iter(out_of_reach[cut_off[0]].items()))
        return f"most nodes cannot connect to others, {cut_off[0]} to {other} for example: {why}"
    return ""


def remarks(answers: PhaseAnswers, size: int) -> tuple[str, ...]:
    """Return what a person should know.

    It is which nodes were slow, who sent damaged bytes, and who could not connect to whom.

    Args:
        answers: what the nodes have said.
        size: bytes of the file.
    """
    damaged = [
        f"{other} sent damaged bytes to {node}, which took them from another node"
        for node, report in answers.relayed.items()
        for other in dict.fromkeys(report.corrupt)
    ]
    apart = [
        f"{node} cannot connect to {other} ({why}), and took the file from another node"
        for node, others in answers.out_of_reach.items()
        for other, why in others.items()
        if node in answers.relayed and not answers.relayed[node].failure
    ]
    return (*_first(_slow(answers.relayed, size)), *_first(damaged), *_first(apart))


def _slow(relayed: Mapping[str, Relayed], size: int) -> list[str]:
    """Return a line for each node that was slow."""
    lines = []
    seconds = {node: report.seconds for node, report in relayed.items() if not report.failure}
    usual = statistics.median(seconds.values()) if seconds else 0.0
    for node, taken in seconds.items():
        if taken > max(_SLOW_SHARE * usual, usual + _SLOW_SECONDS):
            rate, others = sized(int(size / taken)), sized(int(size / max(usual, 0.001)))
            lines.append(f"{node} is slow: it received {rate}/s, the median is {others}/s")
    return lines


def _first(lines: list[str]) -> list[str]:
    """Return the first lines, and how many more there are."""
    more = len(lines) - _MOST_REMARKS
    return lines if more <= 0 else [*lines[:_MOST_REMARKS], f"... and {counted(more, 'more line')}"]
