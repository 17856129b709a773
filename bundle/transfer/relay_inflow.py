"""One tree's half of the file on its way to this node: who it comes from, and who is next."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Protocol

from ..system.files import error_text
from . import trees
from .chunks import ChunkFile
from .relay_child import ConnectionOver
from .relay_pace import Pace
from .relay_parent import CorruptChunk, ParentBusy, ParentSilent, RelayParent

_PAUSE_SECONDS = 0.3
"""Time between two rounds through all candidates."""
GIVE_UP_SECONDS = 15.0
"""Time without a chunk after which a node gives up, if it has no parent and finds none."""
_UNREACHED_SECONDS = 6.0
"""The same where nobody has ever answered: it may be a network that does not let it."""
_SILENT_SOURCE_SECONDS = 60.0
"""The same where the source can be connected to, and says nothing: its disk may hang for a while.
Should it have ended, the driver knows, and tells all."""
_SEARCH_SECONDS = 3.0
"""Time that a node looks for another parent at least, however long the last one sent nothing. Where
the source is gone, all nodes on the way to a leaf give up one after the other: so it is short."""
_PATIENCE_SECONDS = 1.0
_PATIENCE_A_LEVEL = 0.25
"""Time for which a parent may be slow, more for each level below the source: who is above acts
first."""


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

    The candidates are nodes above this one in the tree, and the source. They are gone through in
    the order of preference, again and again: a parent that fails is left for the
    next one; beside a slow one the next is tried, and takes its place if it is further. Chunks come
    from no other nodes, so no two nodes can wait for each other.

    Attributes:
        tree: the tree.
        parent: the node that the chunks come from; None while one is looked for.
        candidate: a node that is tried, and may become the parent.
        corrupt: the positions that sent damaged chunks; only the source is used again.
        refusals: why candidates could not be used, by position, since one is looked for.
    """

    def __init__(
        self,
        file: ChunkFile,
        tree: int,
        candidates: Sequence[int],
        connections: Connections,
        now: float,
    ) -> None:
        """Begin without a parent; the positions above this node are in order of preference."""
        self._file, self.tree, self._connections = file, tree, connections
        self._candidates = list(candidates)
        self._next = 0
        """The index of the candidate that is tried next."""
        self.parent: RelayParent | None = None
        self.candidate: RelayParent | None = None
        self.corrupt: list[int] = []
        self.refusals: dict[int, str] = {}
        self._pace = Pace(file, tree, _PATIENCE_SECONDS + _PATIENCE_A_LEVEL * len(candidates), now)
        self._have, self._fed = 0, now
        """The chunks of the tree that are there, and the time at which the last one came."""
        self._lost = self._again = now
        """When the last parent was lost, and when the next candidate may be tried."""
        self._had = 0
        """The chunks that were there when the present parent became it."""
        self._reached = False
        self._source_silent = False
        """True if the source, when it was last asked, stood and said nothing."""

    @property
    def done(self) -> bool:
        """True if all chunks of the tree are there."""
        return self._file.have[self.tree] == self._file.totals[self.tree]

    @property
    def connections(self) -> list[RelayParent]:
        """The open connections."""
        return [link for link in (self.parent, self.candidate) if link is not None]

    def gave_up(self, now: float) -> bool:
        """Return whether no parent can be found."""
        if self.done or self.parent is not None:
            return False
        if not all(position in self.refusals for position in self._candidates):
            return False
        patience = GIVE_UP_SECONDS if self._reached else _UNREACHED_SECONDS
        if self._source_silent:
            patience = _SILENT_SOURCE_SECONDS
        return now > max(self._fed + patience, self._lost + _SEARCH_SECONDS)

    def receive(self, link: RelayParent, now: float) -> None:
        """Take what has come over a connection."""
        with self._leaving_if_it_fails(link, now):
            if link.connecting:
                link.connect(now)
                return
            link.receive(self._file, now)
            if link is self.candidate and link.accepted:
                self._take_or_leave(link, now)

    def tick(self, now: float) -> None:
        """Look after the connections: end those that are of no use, and look for better ones."""
        if self.done:
            for link in self.connections:
                self._end(link)
            return
        if self._have != self._file.have[self.tree]:
            self._have, self._fed = self._file.have[self.tree], now
        for link in self.connections:
            with self._leaving_if_it_fails(link, now):
                link.tick(now)
        slow = self._pace.is_slow(now)
        wanted = slow if self.parent is not None else now >= self._again
        if wanted and self.candidate is None:
            self._try_next(now)

    def _try_next(self, now: float) -> None:
        """Connect to the next candidate above the parent, if any; pause after the last."""
        if self._next == len(self._candidates):
            self._again = now + _PAUSE_SECONDS
            self._next = 0 if self.parent is None else self._above(self.parent)
            return
        position = self._candidates[self._next]
        self._next += 1
        try:
            self.candidate = self._connections.connect(position, self)
        except OSError as exc:
            self._refuse(position, error_text(exc).lower())

    def _take_or_leave(self, link: RelayParent, now: float) -> None:
        """Take a serving node as parent, but none as far as a slow one: its chunk may be coming."""
        self._reached, self.candidate = True, None
        if self.parent is not None:
            useful = min(self._file.have[self.tree] + 2, self._file.totals[self.tree])
            if link.have < useful:
                self._connections.disconnect(link)
                return
            self._connections.disconnect(self.parent)
        self.parent, self._had = link, self._file.have[self.tree]
        self._pace.restart(now)

    @contextlib.contextmanager
    def _leaving_if_it_fails(self, link: RelayParent, now: float) -> Iterator[None]:
        """Leave a node whose connection the block fails on, but not for a full disk here."""
        try:
            yield
        except BlockingIOError:  # nothing has come after all
            pass
        except ConnectionOver as exc:
            # One that is busy lives, and has proved that it knows this transfer.
            self._reached = self._reached or isinstance(exc, ParentBusy)
            self._leave(link, str(exc), now, silent=isinstance(exc, ParentSilent))
            if isinstance(exc, CorruptChunk):
                self._exclude(link.position)
        except OSError as exc:
            self._leave(link, error_text(exc).lower(), now)

    def _leave(self, link: RelayParent, why: str, now: float, *, silent: bool = False) -> None:
        """End a connection that has failed; if it was the parent's, look for another one.

        A parent that sent nothing does not renew the time for which others are looked for: one
        that fails each time would be asked for ever.
        """
        if link is self.parent:
            if self._file.have[self.tree] > self._had:
                self.refusals.clear()
                self._lost = now
            self._next = self._above(link)
        self._refuse(link.position, why, silent=silent)
        self._end(link)

    def _refuse(self, position: int, why: str, *, silent: bool = False) -> None:
        """Record why a candidate is unusable; ``silent`` if it is connected but sends nothing."""
        self.refusals[position] = why
        if position == trees.SOURCE:
            self._source_silent = silent

    def _exclude(self, position: int) -> None:
        """Exclude a node that sent damaged chunks, but never the source: there is no other."""
        self.corrupt.append(position)
        if position != trees.SOURCE:
            self._next = self._candidates.index(position)  # there will be the one after it
            del self._candidates[self._next]

    def _above(self, link: RelayParent) -> int:
        return self._candidates.index(link.position) + 1

    def _end(self, link: RelayParent) -> None:
        self._connections.disconnect(link)
        if link is self.parent:
            self.parent = None
        if link is self.candidate:
            self.candidate = None
