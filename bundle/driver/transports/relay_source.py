"""The driver's part in a relay: it is the source of the file, and tells each node its places."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import socket
import time
from collections.abc import Iterable, Iterator, Mapping

from ...channel import agent_channel
from ...format.archive import digest_of
from ...protocol.enumerations import PhaseName
from ...protocol.messages import RELAY_SOURCE, Ready, RelayStart
from ...protocol.problem import NodeError, Problem, ProblemCode
from ...system.files import error_text
from ...transfer import relay_chunks
from ...transfer.plan import digest_of_all
from ...transfer.relay import BACKLOG
from ...transfer.relay_chunks import ChunkFile
from ...transfer.relay_peers import RelayPlace
from ...transfer.relay_process import RelayProcess
from .agent_program import packed
from .phase_run import SECONDS, PhaseRun
from .relay_candidates import RelayDirectory
from .relay_wait import RelayWait, SourceEnded, await_listeners, settle_late
from .source_watch import SourceWatch
from .transport import Transfer


def send(
    transfer: Transfer, run: PhaseRun, ports: range | None = None
) -> tuple[dict[str, str], float]:
    """Let the agents of a step take a file from this host, and from each other.

    Returns:
        The nodes that it did not reach, with the reasons, and the seconds that it took.

    Raises:
        NodeError: the file cannot be read here.
    """
    deadline = time.monotonic() + SECONDS[PhaseName.UNPACK]
    silent = await_listeners(run, deadline)
    nodes = in_network_order(run.answers.nodes, run.answers.listening)
    started = time.monotonic()
    failed = _relay(transfer, run, nodes, ports, deadline) if nodes else {}
    run.step.tell(agent_channel.GO)
    failed.update(settle_late(run, silent))
    in_order = {node: failed[node] for node in run.answers.nodes if node in failed}
    return in_order, time.monotonic() - started


def in_network_order(nodes: Iterable[str], listening: Mapping[str, Ready]) -> tuple[str, ...]:
    """Return the nodes that listen: those below one switch together, where Slurm knows them.

    Neighbours in this order are close to each other in the trees.
    """
    there = [node for node in nodes if node in listening]
    return tuple(sorted(there, key=lambda node: listening[node].switches.split(".")))


def _relay(
    transfer: Transfer,
    run: PhaseRun,
    nodes: tuple[str, ...],
    ports: range | None,
    deadline: float,
) -> dict[str, str]:
    with contextlib.ExitStack() as resources:
        file = resources.enter_context(_opened(transfer))
        try:
            listener = resources.enter_context(contextlib.closing(listen(ports)))
            port = int(listener.getsockname()[1])
            directory = RelayDirectory(_places(nodes, run, port))
            source = resources.enter_context(_source(transfer, file, listener, directory))
        except OSError as exc:
            why = f"{os.uname().nodename} cannot be its source: {error_text(exc)}"
            return dict.fromkeys(nodes, why)
        left_out = tuple(sorted(run.answers.nodes - set(nodes)))
        start = RelayStart(port, len(nodes), left_out)
        run.step.tell(agent_channel.RELAY + packed(start))
        resources.enter_context(run.step.waking(source))
        watch = SourceWatch(source, run.watch.take)
        try:
            failed = RelayWait(run, nodes, watch.failure).failures(deadline)
        except SourceEnded as exc:
            code = ProblemCode.RELAY_SOURCE_ENDED
            raise NodeError(_source_problem(code, transfer, str(exc))) from exc
        hung = watch.hung()
    reports = run.answers.relayed
    if reports and all(report.failure for report in reports.values()):
        if hung:  # to read the file here, or to send it by sbcast, would hang as well
            raise NodeError(_source_problem(ProblemCode.RELAY_SOURCE_HANGS, transfer, hung))
        _refuse_unreadable(transfer)
    return failed


@contextlib.contextmanager
def _opened(transfer: Transfer) -> Iterator[ChunkFile]:
    if transfer.bundle is not None:
        yield ChunkFile(-1, transfer.size, complete=True, locate=transfer.bundle.locate)
        return
    try:
        handle = os.open(transfer.source, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as exc:
        values = {"why": error_text(exc)}
        raise NodeError(Problem(ProblemCode.BUNDLE_UNREADABLE, transfer.source, values)) from exc
    try:
        yield ChunkFile(handle, transfer.size, complete=True)
    finally:
        os.close(handle)


@contextlib.contextmanager
def _source(
    transfer: Transfer, file: ChunkFile, listener: socket.socket, directory: RelayDirectory
) -> Iterator[RelayProcess]:
    source = RelayProcess(file, bytes.fromhex(transfer.token), listener, directory)
    with contextlib.closing(source):
        source.begin(None)
        yield source


def _source_problem(code: ProblemCode, transfer: Transfer, why: str) -> Problem:
    """Describe a problem of this host; no node is at fault."""
    values = {"host": os.uname().nodename, "why": why}
    return Problem(code, transfer.source, values)


def _refuse_unreadable(transfer: Transfer) -> None:
    """Reread the file if no node has it: an unreadable or shorter file is no node's fault."""
    if transfer.bundle is not None:
        digest_of_all(transfer.bundle)
        return
    digest_of(transfer.source)
    size = os.path.getsize(transfer.source)
    if size < transfer.size:
        why = f"it has become shorter: {size} of {transfer.size} bytes are left"
        raise NodeError(Problem(ProblemCode.BUNDLE_UNREADABLE, transfer.source, {"why": why}))


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


def _places(nodes: Iterable[str], run: PhaseRun, port: int) -> list[RelayPlace]:
    places = [RelayPlace(relay_chunks.SOURCE, RELAY_SOURCE, "", port)]
    for position, node in enumerate(nodes, 1):
        ready = run.answers.listening[node]
        places.append(RelayPlace(position, node, ready.address, ready.port))
    return places
