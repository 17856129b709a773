"""One tree's half of the file on its way to this node: who it comes from, and who is next."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Protocol

from . import trees
from .chunks import ChunkFile
from .relay_child import ConnectionOver
from .relay_parent import CorruptChunk, ParentBusy, RelayParent

_TRIED_ANCESTORS = 3
"""Ancestors that are tried before the source: each may take the time of a connection. All of them
are, once these have failed."""
_PAUSE_SECONDS = 0.3
"""Time between two rounds through all candidates."""
GIVE_UP_SECONDS = 15.0
"""Time without a chunk and without a parent, after which a node gives up."""
_UNREACHED_SECONDS = 6.0
"""The same where nobody has ever answered: it may be a network that does not let it."""
_BEHIND_CHUNKS = 8
_BEHIND_SHARE = 0.05
"""How far one half of the file may be behind the other: so many chunks, or this part of it."""
_PATIENCE_SECONDS = 1.0
_PATIENCE_A_LEVEL = 0.5
"""Time for which it may be so, more for each level below the source: who is above acts first."""


class Connections(Protocol):
    """Makes and ends the connections of a node."""

    def connect(self, position: int, inflow: Inflow) -> RelayParent:
        """Begin to connect to a position; what comes goes to :meth:`Inflow.receive`.

        Raises:
            OSError: it cannot be reached.
        """

    def disconnect(self, link: RelayParent) -> None:
        """End a connection."""


class Inflow:
    """The chunks of one tree, from one parent or the next.

    Attributes:
        tree: the tree.
        parent: the node that they come from; None while another one is looked for.
        trial: a node that may take its place.
        left: the positions that were left, with the reasons.
        corrupt: the positions that sent damaged chunks.
    """

    def __init__(
        self, file: ChunkFile, tree: int, chain: list[int], connections: Connections
    ) -> None:
        """Begin with no parent.

        Args:
            file: the file.
            tree: the tree.
            chain: the positions above this node in the tree, up to the source. Chunks may come from
                the next ones and the source; so no two nodes can wait for each other.
            connections: makes and ends connections.
        """
        self._file, self.tree, self._connections = file, tree, connections
        self._chain = chain
        self._above = [*chain[:-1][:_TRIED_ANCESTORS], trees.SOURCE]
        self._patience = _PATIENCE_SECONDS + _PATIENCE_A_LEVEL * len(chain)
        self.parent: RelayParent | None = None
        self.trial: RelayParent | None = None
        self.left: list[tuple[int, str]] = []
        self.corrupt: list[int] = []
        self._refusals: dict[int, str] = {}
        """The reasons of the candidates that have failed since the last chunk."""
        self._next = 0
        self._again = 0.0
        self._fed: float | None = None
        """The time at which a chunk came last, or the search for a parent began."""
        self._behind_since: float | None = None
        self._reached = False
        self._have = 0

    @property
    def done(self) -> bool:
        """True if all chunks of the tree are there."""
        return self._file.have[self.tree] == self._file.totals[self.tree]

    @property
    def connections(self) -> list[RelayParent]:
        """The open connections."""
        return [link for link in (self.parent, self.trial) if link is not None]

    @property
    def reasons(self) -> dict[int, str]:
        """Why each candidate could not be used, by position."""
        return {**dict(self.left), **self._refusals}

    def tick(self, now: float) -> None:
        """Look after the connections: end those that are of no use, and look for better ones."""
        if self.done:
            for link in self.connections:
                self._end(link)
            return
        if self._fed is None or self._have != self._file.have[self.tree]:
            self._have, self._fed = self._file.have[self.tree], now
            self._refusals.clear()
        for link in self.connections:
            with self.guarded(link):
                link.tick(now)
        if self.trial is None:
            self._look_for_another(now)

    def _look_for_another(self, now: float) -> None:
        """Connect to the next candidate, where there is no parent or a slow one."""
        if self.parent is None:
            if now >= self._again:
                self._try_next(now)
        elif self._is_behind(now):
            self._try_above(self.parent)

    def gave_up(self, now: float) -> bool:
        """Return whether no parent can be found."""
        if self.done or self.parent is not None or self._fed is None:
            return False
        if len(self._refusals) < len(self._above):
            return False
        return now > self._fed + (GIVE_UP_SECONDS if self._reached else _UNREACHED_SECONDS)

    def receive(self, link: RelayParent, now: float) -> None:
        """Take what has come over a connection."""
        with self.guarded(link):
            if link.connecting:
                link.connect(now)
            else:
                was_accepted = link.accepted
                link.receive(self._file, now)
                if link.accepted and not was_accepted:
                    self._use(link)

    @contextlib.contextmanager
    def guarded(self, link: RelayParent) -> Iterator[None]:
        """Leave a parent on whose connection the block fails; a full disk is not its fault."""
        try:
            yield
        except BlockingIOError:  # nothing has come after all
            pass
        except CorruptChunk as exc:
            self.corrupt.append(link.position)
            self._leave(link, str(exc))
        except ParentBusy as exc:
            self._reached = True  # it lives, and has proved that it knows this transfer
            self._leave(link, str(exc))
        except ConnectionOver as exc:
            self._leave(link, str(exc))
        except OSError as exc:
            self._leave(link, (exc.strerror or str(exc)).lower())

    def _use(self, link: RelayParent) -> None:
        """Let a node that has proved itself be the parent, if it is better than the present one."""
        self._reached = True
        if self.parent is None:
            self.parent, self.trial = link, None
            return
        self._behind_since = None
        if link.have <= self._file.have[self.tree] + 1:
            self._end(link)  # it is no further
            return
        slow, self.parent, self.trial = self.parent, link, None
        self.left.append((slow.position, "it was slow"))
        self._connections.disconnect(slow)

    def _try_next(self, now: float) -> None:
        """Connect to the next candidate; pause after a round through all of them."""
        position = self._above[self._next % len(self._above)]
        self._next += 1
        if self._next % len(self._above) == 0:
            self._again, self._next = now + _PAUSE_SECONDS, 0
            self._above = self._chain
        if position in self.corrupt and position != trees.SOURCE:
            self._refusals[position] = "it sent damaged chunks"
            return
        self._try(position)

    def _try_above(self, parent: RelayParent) -> None:
        """Connect to the next candidate above the present parent."""
        above = self._above[self._above.index(parent.position) + 1 :]
        self._behind_since = None
        if above:
            self._try(above[0])

    def _try(self, position: int) -> None:
        try:
            self.trial = self._connections.connect(position, self)
        except OSError as exc:
            self._refusals[position] = (exc.strerror or str(exc)).lower()

    def _is_behind(self, now: float) -> bool:
        """Return whether the other half has been well ahead for a while: this parent is slow."""
        mine = self._file.have[self.tree]
        other = max(have for tree, have in enumerate(self._file.have) if tree != self.tree)
        allowed = max(_BEHIND_CHUNKS, _BEHIND_SHARE * self._file.totals[self.tree])
        if other - mine <= allowed:
            self._behind_since = None
            return False
        if self._behind_since is None:
            self._behind_since = now
        return now > self._behind_since + self._patience

    def _leave(self, link: RelayParent, why: str) -> None:
        """End a connection that has failed, and note the reason."""
        if link is self.parent:
            self.left.append((link.position, why))
            self._next = self._above.index(link.position) + 1
        self._refusals[link.position] = why
        self._end(link)

    def _end(self, link: RelayParent) -> None:
        self._connections.disconnect(link)
        if link is self.parent:
            self.parent = None
        if link is self.trial:
            self.trial = None
