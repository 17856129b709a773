"""The driver's part in a relay: it tells the nodes of each other, and is the source of the file."""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Iterator, Mapping

from ...channel import agent_channel
from ...protocol.answers import Relayed
from ...protocol.counts import sized
from ...protocol.problem import NodeError, Problem, ProblemCode
from ...protocol.requests import RelayNodes
from ...transfer.chunks import ChunkFile
from ...transfer.relay import listen
from ...transfer.relay_process import RelayProcess
from .agent_program import packed
from .phase_run import SECONDS, PhaseRun
from .transport import Transfer

_SLOW_SHARE = 3.0
"""A node is slow if its file took so many times as long as the others' ..."""
_SLOW_SECONDS = 2.0
"""... and so many seconds more."""


class RelaySource:
    """Sends files to the agents of steps that wait for them, through each other."""

    def send(self, transfer: Transfer, run: PhaseRun) -> tuple[dict[str, str], float]:
        """Let the nodes take the file, until all have it or have failed.

        Args:
            transfer: the file.
            run: the step whose agents listen, or begin to.

        Returns:
            The nodes that it did not reach, with the reasons, and the seconds that it took.

        Raises:
            NodeError: the file cannot be read, or nobody can connect to this host.
        """
        deadline = time.monotonic() + SECONDS["unpack"]
        _await_listeners(run, deadline)
        nodes = tuple(node for node in run.answers.nodes if node in run.answers.listening)
        started = time.monotonic()
        if nodes:
            with _source(transfer) as port:
                run.step.tell(agent_channel.RELAY + packed(_relay_nodes(nodes, run, port)))
                _await_all(run, nodes, deadline)
        run.step.tell(agent_channel.GO)
        reports = run.answers.relayed.items()
        failed = {node: report.failure for node, report in reports if report.failure}
        return failed, time.monotonic() - started


@contextlib.contextmanager
def _source(transfer: Transfer) -> Iterator[int]:
    """Serve a file while the block runs, on the port that it gets.

    Raises:
        NodeError: the file cannot be read, or nobody can connect to this host.
    """
    with contextlib.ExitStack() as resources:
        try:
            handle = os.open(transfer.source, os.O_RDONLY | os.O_CLOEXEC)
            resources.callback(os.close, handle)
            listener = listen("")
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


def _relay_nodes(nodes: tuple[str, ...], run: PhaseRun, port: int) -> RelayNodes:
    """Return what the agents must know of each other, and of this host."""
    places = [run.answers.listening[node] for node in nodes]
    return RelayNodes(
        nodes=nodes,
        addresses=("", *(address for address, _ in places)),
        ports=(port, *(port for _, port in places)),
    )


def _await_listeners(run: PhaseRun, deadline: float) -> None:
    """Wait until every agent listens, has failed, or is lost."""
    step, answers = run.step, run.answers
    while not step.ended and time.monotonic() < deadline:
        if answers.nodes <= answers.ready | answers.answered.keys() | run.lost_nodes():
            return
        step.pump(answers.take)


def _await_all(run: PhaseRun, nodes: tuple[str, ...], deadline: float) -> None:
    """Wait until every node has the file, has failed, or is lost."""
    step, answers = run.step, run.answers
    while not step.ended and time.monotonic() < deadline:
        done = answers.relayed.keys() | answers.answered.keys() | run.lost_nodes()
        if set(nodes) <= done:
            return
        step.pump(answers.take)


def remarks(relayed: Mapping[str, Relayed], size: int) -> tuple[str, ...]:
    """Return what a person should know: slow nodes with their rates, and who sent damaged bytes.

    Args:
        relayed: the outcome on each node.
        size: bytes of the file.
    """
    lines = []
    seconds = {node: report.seconds for node, report in relayed.items() if not report.failure}
    usual = statistics.median(seconds.values()) if seconds else 0.0
    for node, taken in seconds.items():
        if taken > max(_SLOW_SHARE * usual, usual + _SLOW_SECONDS):
            rate, others = sized(int(size / taken)), sized(int(size / max(usual, 0.001)))
            lines.append(f"{node} is slow: it received {rate}/s, the median is {others}/s")
    for node, report in relayed.items():
        for other in dict.fromkeys(report.corrupt):
            lines.append(f"{other} sent damaged bytes to {node}, which took them from another node")
    return tuple(lines)
