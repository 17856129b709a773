"""A node's part in a relay, as its agent sees it: it waits for the file, and serves others."""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import replace

from ..channel.agent_channel import RELAY, AgentChannel, unpacked
from ..format.archive import Arrival
from ..protocol.codec import decode
from ..protocol.messages import (
    RELAY_SOURCE,
    Incoming,
    OutOfReach,
    Ready,
    Relayed,
    RelayStart,
    RelayTask,
)
from ..protocol.problem import NodeError, Problem, ProblemCode
from ..system import files, hostlist
from . import relay_chunks
from .relay import RelayOutcome, listen
from .relay_chunks import ChunkFile
from .relay_peers import RelayCandidates, RelayPlace, SourceUnreachable, ask_source, first_pause
from .relay_process import RelayProcess

# --- The check that a node can connect to those that it would take the file from -----------------

# A firewall between nodes that drops what is sent shows in nothing but time. So each node tries all
# at once, while the relay begins, and tells the driver whom it cannot connect to.

CONTACT_SECONDS = 1.5
"""Time for all connections to stand. A lost packet is sent again after a second."""


def unreachable(candidates: RelayCandidates) -> dict[int, str]:
    """Try to connect to the parents of this node; return whom it cannot reach, and why.

    The source is left out: a node has asked it for its places. Takes :data:`CONTACT_SECONDS` at
    most. Nothing is sent.
    """
    parents = {chain[0] for chain in candidates.by_tree} - {relay_chunks.SOURCE}
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


_TOPOLOGY = "SLURM_TOPOLOGY_ADDR"
"""The variable of a step with the switches above a node, see srun(1)."""


class RelayReceiver:
    """The nodes pass the file on to each other.

    Attributes:
        arrival: the file's progress on this node.
    """

    def __init__(self, incoming: Incoming, task: RelayTask) -> None:
        self._taking: threading.Thread | None = None
        """Takes the file, and reports the outcome."""
        self._over = threading.Event()
        """Set when the driver has said the end, or this node ends by itself."""
        self._source_unreached = False
        """True once the driver has been told that the source cannot be connected to."""
        self._token = bytes.fromhex(task.token)
        path = incoming.target
        try:
            self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as exc:
            full, unwritable = ProblemCode.INCOMING_DISK_FULL, ProblemCode.INCOMING_UNWRITABLE
            raise NodeError(files.disk_problem(exc, path, full, unwritable)) from exc
        try:
            file = ChunkFile(self._handle, incoming.size)
            self.arrival = Arrival(file.prefix)
            listener = listen(task.address)
            self._address, self._port = listener.getsockname()[:2]
            self._relay = RelayProcess(file, self._token, listener)
        except OSError as exc:
            os.close(self._handle)
            values = {"why": files.error_text(exc)}
            problem = Problem(ProblemCode.RELAY_NOT_STARTED, task.address, values)
            raise NodeError(problem) from exc

    def ready(self) -> Ready:
        """Return the event that tells the driver where this node listens."""
        # What Slurm knows of the network: the switches from the top down, and the node.
        switches = os.environ.get(_TOPOLOGY, "").rpartition(".")[0]
        return Ready(address=self._address, port=self._port, switches=switches)

    def follow(self, channel: AgentChannel) -> None:
        """Take part from the driver's word on, and serve others until it says the end."""
        command = channel.command()
        start = None
        if command.startswith(RELAY):
            start = decode(RelayStart, unpacked(command[len(RELAY) :]))
        if start is None or channel.node in start.left_out:  # the driver has given this node up
            self.arrival.end(whole=False)
            return
        taking = threading.Thread(target=self._take, args=(channel, start), daemon=True)
        try:
            taking.start()
        except RuntimeError as exc:  # the limit on threads
            self._report(channel, RelayOutcome(failure=str(exc)), {})
            return
        self._taking = taking
        channel.command()  # whatever it is, there is no more to do for others
        self._end()

    def _take(self, channel: AgentChannel, start: RelayStart) -> None:
        names: dict[int, str] = {}
        try:
            candidates = self._ask(channel, start)
        except SourceUnreachable as exc:
            outcome = RelayOutcome(
                "no other node can be reached", unreached=((relay_chunks.SOURCE, str(exc)),)
            )
            names = {relay_chunks.SOURCE: RELAY_SOURCE}
            self._relay.end()  # it can serve nobody
        else:
            names = {place.position: place.name for place in candidates.places}
            self._relay.begin(candidates)
            trying = threading.Thread(
                target=self._try, args=(channel, candidates, names), daemon=True
            )
            with contextlib.suppress(RuntimeError):  # the limit on threads; it is only a test
                trying.start()
            outcome = self._relay.outcome()
        self._report(channel, outcome, names)

    def _ask(self, channel: AgentChannel, start: RelayStart) -> RelayCandidates:
        driver_host = hostlist.driver_host(os.environ)

        def report_unreached(why: str) -> None:
            self._source_unreached = True
            _tell(channel, OutOfReach(nodes=((RELAY_SOURCE, why),)))

        self._over.wait(first_pause(channel.node, start.nodes))
        source = (driver_host, start.port)
        candidates = ask_source(source, self._token, channel.node, self._over, report_unreached)
        places = tuple(_with_address(place, driver_host) for place in candidates.places)
        return replace(candidates, places=places)

    def _try(
        self, channel: AgentChannel, candidates: RelayCandidates, names: Mapping[int, str]
    ) -> None:
        """Report unreachable parents, or that the source is reachable, until the relay is over."""
        failures = unreachable(candidates)
        if (failures or self._source_unreached) and not self._over.is_set():
            out_of_reach = tuple((names[place], why) for place, why in failures.items())
            _tell(channel, OutOfReach(nodes=out_of_reach))

    def _report(
        self, channel: AgentChannel, outcome: RelayOutcome, names: Mapping[int, str]
    ) -> None:
        self.arrival.end(whole=not outcome.failure)
        _tell(channel, _relayed(outcome, names))

    def _end(self) -> None:
        self._over.set()
        self._relay.end()
        if self._taking is not None:
            self._taking.join()

    def close(self) -> None:
        """End the relay, and forget the file."""
        self._end()
        self._relay.close()
        os.close(self._handle)


def _with_address(place: RelayPlace, driver_host: str) -> RelayPlace:
    """Give the source, which has no address of its own, that of the driver's host."""
    return place if place.address else replace(place, address=driver_host)


def _tell(channel: AgentChannel, event: OutOfReach | Relayed) -> None:
    with contextlib.suppress(OSError):  # the driver has gone
        channel.emit(event)


def _relayed(outcome: RelayOutcome, names: Mapping[int, str]) -> Relayed:
    reasons = "; ".join(f"{names[place]}: {why}" for place, why in outcome.unreached)
    return Relayed(
        seconds=outcome.seconds,
        failure=f"{outcome.failure}: {reasons}" if reasons else outcome.failure,
        corrupt=tuple(names[place] for place in outcome.corrupt),
    )
