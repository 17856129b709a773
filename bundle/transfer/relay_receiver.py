"""A node's part in a relay, as its agent sees it: it waits for the file, and serves others."""

from __future__ import annotations

import contextlib
import os
import threading

from ..channel.agent_channel import RELAY, REPORT, AgentChannel, unpacked
from ..format.arriving_file import Arrival
from ..protocol.answers import OutOfReach, Ready, Relayed, Relaying
from ..protocol.codec import decode
from ..protocol.problem import NodeError, Problem, ProblemCode
from ..protocol.requests import RELAY_SOURCE, Incoming, RelayNodes, RelayTask
from ..system import files
from .chunks import ChunkFile
from .relay import RelayAddresses, RelayOutcome, listen
from .relay_contact import unreachable
from .relay_process import RelayProcess

_DRIVER_HOST = "SLURM_LAUNCH_NODE_IPADDR"
"""The variable of a step with the address of the host that has started it, see srun(1)."""
_TOPOLOGY = "SLURM_TOPOLOGY_ADDR"
"""The variable of a step with the switches above a node, see srun(1)."""


class RelayReceiver:
    """The nodes pass the file on to each other.

    Attributes:
        arrival: the file's progress on this node.
    """

    def __init__(self, incoming: Incoming, task: RelayTask) -> None:
        """Make the file, and listen.

        Raises:
            NodeError: one of both cannot be done.
        """
        self._waiting: threading.Thread | None = None
        """Waits for the outcome."""
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
            self._relay = RelayProcess(file, bytes.fromhex(task.token), listener)
        except OSError as exc:
            os.close(self._handle)
            values = {"why": exc.strerror or str(exc)}
            problem = Problem(ProblemCode.RELAY_NOT_STARTED, task.address, values)
            raise NodeError(problem) from exc

    def ready(self) -> Ready:
        """Return the event that tells the driver where this node listens."""
        # What Slurm knows of the network: the switches from the top down, and the node.
        switches = os.environ.get(_TOPOLOGY, "").rpartition(".")[0]
        return Ready(address=self._address, port=self._port, switches=switches)

    def follow(self, channel: AgentChannel) -> None:
        """Begin when the driver says where the others are, and serve them until it says the end."""
        command = channel.command()
        nodes = None
        if command.startswith(RELAY):
            nodes = decode(RelayNodes, unpacked(command[len(RELAY) :]))
        if nodes is None or channel.node not in nodes.nodes:  # the driver has given this node up
            self.arrival.end(whole=False)
            return
        waiting = threading.Thread(target=self._wait, args=(channel, nodes), daemon=True)
        waiting.start()
        self._waiting = waiting
        addresses = _addresses(nodes, channel.node)
        self._relay.begin(addresses)
        over = threading.Event()
        threading.Thread(target=_try, args=(channel, nodes, addresses, over), daemon=True).start()
        while channel.command() == REPORT:  # whatever else it is, there is no more to do for others
            if waiting.is_alive():
                channel.emit(Relaying())
        over.set()
        self._relay.end()
        waiting.join()

    def _wait(self, channel: AgentChannel, nodes: RelayNodes) -> None:
        """Wait until the file is here, or cannot come, and report it."""
        outcome = self._relay.outcome()
        self.arrival.end(whole=not outcome.failure)
        with contextlib.suppress(OSError):  # the driver has gone
            channel.emit(_relayed(outcome, nodes))

    def close(self) -> None:
        """End the relay."""
        self._relay.end()
        if self._waiting is not None:
            self._waiting.join()
        self._relay.close()
        os.close(self._handle)


def _addresses(nodes: RelayNodes, node: str) -> RelayAddresses:
    """Return where the others are, and the place of this node among them."""
    addresses = [address or os.environ.get(_DRIVER_HOST, "") for address in nodes.addresses]
    places = tuple(zip(addresses, nodes.ports))
    return RelayAddresses(places, nodes.nodes.index(node) + 1)


def _try(
    channel: AgentChannel, nodes: RelayNodes, addresses: RelayAddresses, over: threading.Event
) -> None:
    """Tell the driver whom this node cannot connect to, unless the relay is over by then."""
    names = _names(nodes)
    failures = unreachable(addresses)
    if failures and not over.is_set():
        told = OutOfReach(nodes=tuple((names[place], why) for place, why in failures.items()))
        with contextlib.suppress(OSError):  # the driver has gone
            channel.emit(told)


def _names(nodes: RelayNodes) -> tuple[str, ...]:
    """Return the names of all places."""
    return (RELAY_SOURCE, *nodes.nodes)


def _relayed(outcome: RelayOutcome, nodes: RelayNodes) -> Relayed:
    """Return the outcome with the names of nodes."""
    names = _names(nodes)
    reasons = "; ".join(f"{names[place]}: {why}" for place, why in outcome.unreached)
    return Relayed(
        seconds=outcome.seconds,
        failure=f"{outcome.failure}: {reasons}" if reasons else outcome.failure,
        corrupt=tuple(names[place] for place in outcome.corrupt),
    )
