"""A relay: a node takes a file from others, and passes it on while it comes.

A node learns its place in the two trees (:mod:`bundle.transfer.trees`) and where those above it
listen (:mod:`bundle.transfer.relay_places`), pulls each half of the file from the node above it,
and serves those below. The source runs the same loop with all of the file. One process and one
selector do it; it needs less than 6 MB of memory of its own, whatever the size of the file.
"""

from __future__ import annotations

import contextlib
import secrets
import selectors
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from . import trees
from .chunks import ChunkFile
from .relay_child import ConnectionOver, Directory, RelayChild
from .relay_clock import RelayClock
from .relay_inflow import Inflow
from .relay_parent import RelayParent
from .relay_places import RelayCandidates

MOST_CHILDREN = 8
"""Nodes that one node serves at a time: two in its own tree, and those whose parent has failed."""
MOST_OF_SOURCE = 64
"""Connections that the source serves: it is the last that a node can turn to."""
MOST_STRANGERS = 64
"""Connections that have not proved their right; a further one ends any of them. If it ended the
oldest, whoever connects fast enough would keep everybody out."""
_MOST_ACCEPTED = 16
"""Connections that are taken in one round, so that those that stand are served in between."""
_TICK_SECONDS = 0.05
"""Time between two looks at all connections."""
_PAUSE_SECONDS = 0.002
"""Time for bytes to gather after a round that has left none: on a slow link one round for each
packet would cost several times the processor time of the relaying."""
BACKLOG = 512
_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


@dataclass(frozen=True)
class RelayOutcome:
    """The end of a transfer on one node."""

    failure: str = ""
    """Why the file did not come; empty if it did."""
    unreached: tuple[tuple[int, str], ...] = ()
    """If nobody could be reached: the places of those that were tried, with the reasons."""
    seconds: float = 0.0
    """From the beginning to the last byte."""
    corrupt: tuple[int, ...] = ()
    """The places of those that sent damaged chunks."""


def listen(address: str) -> socket.socket:
    """Return a socket that listens on an address, on a port that is free.

    Raises:
        OSError: the address cannot be used.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.bind((address, 0))
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


class Relay:
    """The loop of one node, or of the source."""

    def __init__(
        self,
        file: ChunkFile,
        token: bytes,
        listener: socket.socket,
        rounds: memoryview,
        directory: Directory | None = None,
    ) -> None:
        """Count the loop's rounds in ``rounds``, which the parent process reads to find hangs."""
        self._directory = directory
        self._rounds = rounds
        self._most_children = MOST_CHILDREN
        self._file, self._token, self._listener = file, token, listener
        self._addresses: dict[int, tuple[str, int]] = {}
        self._position = trees.SOURCE
        self._clock = RelayClock()
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, _READ, self._accept)
        self._children: list[RelayChild] = []
        self._inflows: list[Inflow] = []
        self._began = 0.0
        self._next_tick = 0.0
        self._drained = True
        """False if the present round has left bytes that could be taken or sent at once."""

    def run(
        self,
        candidates: RelayCandidates | None,
        control: int,
        on_outcome: Callable[[RelayOutcome], None],
    ) -> None:
        """Take the file and serve others, until something is written to a pipe or it is closed.

        A node that cannot get the file serves nobody from then on: whoever took chunks from it
        would wait for the rest in vain.

        Raises:
            UnwritableFile: this node's disk does not take a chunk.
        """
        if candidates is not None:
            self._position = candidates.position
            self._addresses = {
                place.position: (place.address, place.port) for place in candidates.places
            }
            for tree, chain in enumerate(candidates.by_tree):
                self._inflows.append(Inflow(self._file, tree, chain, self, self._clock.now))
        self._began = time.monotonic()
        self._selector.register(control, _READ)
        reported = candidates is None
        if candidates is None:
            self._most_children = MOST_OF_SOURCE
        while self._do_round(control):
            outcome = None if reported else self._outcome()
            if outcome is not None:
                reported = True
                on_outcome(outcome)
                if outcome.failure:
                    return
            if self._drained:
                time.sleep(_PAUSE_SECONDS)

    def _do_round(self, control: int) -> bool:
        """Serve the ready connections; return False at the end."""
        self._rounds[0] += 1
        self._clock.advance()
        self._drained = True
        had = list(self._file.have)
        for key, events in self._selector.select(_TICK_SECONDS):
            if key.fileobj == control:
                return False
            key.data(events)
        now = self._clock.now
        if now >= self._next_tick:
            self._next_tick = now + _TICK_SECONDS
            self._tick(now)
        if had != self._file.have:
            for child in self._children:
                self._await_child(child)
        return True

    def close(self) -> None:
        """End all connections."""
        for child in list(self._children):
            self._drop(child)
        for inflow in self._inflows:
            for link in inflow.connections:
                self.disconnect(link)
        self._selector.close()
        self._listener.close()

    def connect(self, position: int, inflow: Inflow) -> RelayParent:
        """Begin to connect to a position; what comes goes to the inflow.

        Raises:
            OSError: it cannot be reached.
        """
        address = self._addresses[position]
        link = RelayParent(position, address, self._token, inflow.tree, self._clock.now)

        def receive(events: int) -> None:
            if link not in inflow.connections:  # ended in this round
                return
            inflow.receive(link, self._clock.now)
            self._drained &= link.drained
            if events & _WRITE and link in inflow.connections:
                self._selector.modify(link, _READ, receive)

        self._selector.register(link, _WRITE, receive)
        return link

    def disconnect(self, link: RelayParent) -> None:
        """End a connection."""
        self._selector.unregister(link)
        link.close()

    def _outcome(self) -> RelayOutcome | None:
        failed = [inflow for inflow in self._inflows if inflow.gave_up(self._clock.now)]
        if not self._file.complete and not failed:
            return None
        return RelayOutcome(
            failure="no other node can be reached" if failed else "",
            unreached=tuple(failed[0].refusals.items()) if failed else (),
            seconds=round(time.monotonic() - self._began, 3),
            corrupt=tuple(place for inflow in self._inflows for place in inflow.corrupt),
        )

    def _accept(self, events: int) -> None:
        with contextlib.suppress(OSError):  # there are no more, or too many files are open
            for _ in range(_MOST_ACCEPTED):
                connection, _ = self._listener.accept()
                child = RelayChild(
                    *(connection, self._position, self._token, self._file, self._clock.now),
                    self._directory,
                )
                self._children.append(child)
                self._selector.register(child, _READ | _WRITE, self._server_of(child))
                strangers = [child for child in self._children if not child.accepted]
                if len(strangers) > MOST_STRANGERS:
                    self._drop(secrets.choice(strangers))

    def _server_of(self, child: RelayChild) -> Callable[[int], None]:
        def serve(events: int) -> None:
            if child not in self._children:  # ended in this round
                return
            with self._dropping(child):
                if events & _READ:
                    served = sum(other.accepted for other in self._children)
                    child.receive(room=served < self._most_children)
                if events & _WRITE:
                    child.send(self._clock.now)
                self._drained &= child.blocked or not child.has_more
                self._await_child(child)

        return serve

    @contextlib.contextmanager
    def _dropping(self, child: RelayChild) -> Iterator[None]:
        try:
            yield
        except BlockingIOError:  # it takes no more at present
            pass
        except (ConnectionOver, OSError):
            self._drop(child)

    def _drop(self, child: RelayChild) -> None:
        self._children.remove(child)
        self._selector.unregister(child)
        child.close()

    def _tick(self, now: float) -> None:
        for inflow in self._inflows:
            inflow.tick(now)
        for child in list(self._children):
            with self._dropping(child):
                child.tick(now)
                self._await_child(child)

    def _await_child(self, child: RelayChild) -> None:
        wanted = _READ | (_WRITE if child.has_more else 0)
        key = self._selector.get_key(child)
        if key.events != wanted:
            self._selector.modify(child, wanted, key.data)
