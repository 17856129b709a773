"""A node's part in a relay, as its agent sees it: it waits for the file, and serves others."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Mapping
from dataclasses import replace

from ..channel.agent_channel import RELAY, AgentChannel, unpack_line
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
from .relay_peers import SourceUnreachable, ask_source, compute_first_pause
from .relay_process import RelayProcess
from .staging import BroadcastReceiver, report_unwritable

_TOPOLOGY = "SLURM_TOPOLOGY_ADDR"  # has the switches above a node, see srun(1)


class RelayReceiver(BroadcastReceiver):
    """The nodes pass the file on to each other."""

    def __init__(self, incoming: Incoming, task: RelayTask) -> None:
        self._taking: threading.Thread | None = None  # takes the file, and reports the outcome
        self._over = threading.Event()  # set at the driver's word, or this node's own end
        self._source_unreached = False  # true once the driver knows that it cannot be reached
        self._token = bytes.fromhex(task.token)
        path = incoming.target
        with report_unwritable(path):
            self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            file = ChunkFile(self._handle, incoming.size)
            self.arrival = Arrival(file.prefix)
            listener = listen(task.address)
            self._address, self._port = listener.getsockname()[:2]
            self._relay = RelayProcess(file, self._token, listener)
        except OSError as exc:
            os.close(self._handle)
            why = {"why": files.error_text(exc)}
            raise NodeError(Problem(ProblemCode.RELAY_NOT_STARTED, task.address, why)) from exc

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
            start = decode(RelayStart, unpack_line(command[len(RELAY) :]))
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
        driver_host = hostlist.get_driver_host(os.environ)
        names = {relay_chunks.SOURCE: RELAY_SOURCE}

        def report_unreached(unreached: Mapping[int, str]) -> None:
            """Report unreachable parents, or that the source is reachable, until it is over."""
            if (unreached or self._source_unreached) and not self._over.is_set():
                out_of_reach = tuple((names[place], why) for place, why in unreached.items())
                _tell(channel, OutOfReach(nodes=out_of_reach))

        def report_source_unreached(why: str) -> None:
            self._source_unreached = True
            _tell(channel, OutOfReach(nodes=((RELAY_SOURCE, why),)))

        self._over.wait(compute_first_pause(channel.node, start.nodes))
        source = (driver_host, start.port)
        try:
            asked = source, self._token, channel.node, self._over
            candidates = ask_source(*asked, report_source_unreached)
        except SourceUnreachable as exc:
            unreached = ((relay_chunks.SOURCE, str(exc)),)
            outcome = RelayOutcome("no other node can be reached", unreached=unreached)
            self._relay.end()  # it can serve nobody
        else:
            # The source has no address of its own: it is the driver's host.
            places = tuple(
                replace(place, address=place.address or driver_host) for place in candidates.places
            )
            names = {place.position: place.name for place in places}
            self._relay.begin(replace(candidates, places=places))
            outcome = self._relay.outcome(report_unreached)
        self._report(channel, outcome, names)

    def _report(
        self, channel: AgentChannel, outcome: RelayOutcome, names: Mapping[int, str]
    ) -> None:
        self.arrival.end(whole=not outcome.failure)
        reasons = "; ".join(f"{names[place]}: {why}" for place, why in outcome.unreached)
        relayed = Relayed(
            seconds=outcome.seconds,
            failure=f"{outcome.failure}: {reasons}" if reasons else outcome.failure,
            corrupt=tuple(names[place] for place in outcome.corrupt),
        )
        _tell(channel, relayed)

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


def _tell(channel: AgentChannel, event: OutOfReach | Relayed) -> None:
    with contextlib.suppress(OSError):  # the driver has gone
        channel.emit(event)
