"""A relay: a node takes a file from others, and passes it on while it comes.

A node pulls each half of the file along one of two trees (:mod:`bundle.transfer.relay_chunks`) from
the node above it, and serves those below. The source runs the same loop with all of the file, in
one process with one selector.
"""

from __future__ import annotations

import contextlib
import functools
import secrets
import selectors
import socket
import time
from collections.abc import Callable, Iterator, Sequence

from ..protocol.dataclass import dataclass
from ..system.files import error_text
from . import relay_chunks
from .relay_chunks import ChunkFile
from .relay_peers import (
    ConnectionOver,
    CorruptChunk,
    Directory,
    ParentBusy,
    ParentSilent,
    RelayCandidates,
    RelayChild,
    RelayParent,
)

_SLOW_SHARE = 0.5  # of the other half's rate, below which a parent is slow: both share a link
_LEAST_CHUNKS = 8  # chunks that should have come before a rate is judged


class Pace:
    """The rate of the chunks from the present parent, beside that of the file's other half."""

    def __init__(self, file: ChunkFile, tree: int, seconds: float, now: float) -> None:
        """Measure rates for at least ``seconds``, longer if little arrives."""
        self._file, self._tree, self._seconds, self._began = file, tree, seconds, now
        self._usual = 0.0  # chunks a second of the other half, until it was there
        self._other_is_there = False
        self.restart(now)

    def restart(self, now: float) -> None:
        """Measure from now on."""
        self._since, self._first = now, list(self._file.have)

    def poll_slow(self, now: float) -> bool:
        """Return, once a measurement ends, whether this half is behind, and has been slow."""
        tree, other, have = self._tree, 1 - self._tree, self._file.have
        if self._other_is_there:
            expected = self._usual * (now - self._since)
        else:
            if now > self._began:
                self._usual = have[other] / (now - self._began)
            self._other_is_there = have[other] == self._file.totals[other]
            expected = have[other] - self._first[other]
        if now < self._since + self._seconds or expected < _LEAST_CHUNKS:
            return False
        gained = have[tree] - self._first[tree]
        self.restart(now)
        return have[tree] < have[other] and gained < _SLOW_SHARE * expected


_RETRY_SECONDS = 0.3  # time between two rounds through all candidates
GIVE_UP_SECONDS = 15.0  # without a chunk, and without a parent: then a node gives up
_UNREACHED_SECONDS = 6.0  # the same where nobody has ever answered: the network may not let it
_SILENT_SOURCE_SECONDS = 60.0  # the same where the source is there and silent: its disk may hang
_SEARCH_SECONDS = 3.0  # of a search at least; without the source nodes give up one after the other
_PATIENCE_SECONDS = 1.0  # for which a parent may be slow
_PATIENCE_A_LEVEL = 0.25  # more for each level below the source: who is above acts first


class Inflow:
    """The chunks of one tree, from one of the nodes above this one, or from the source.

    A candidate that fails is left for the next; beside a slow one the next is tried, and takes its
    place if it is further. All are above this node, so no two nodes can wait for each other.
    """

    def __init__(
        self, file: ChunkFile, tree: int, candidates: Sequence[int], relay: Relay, now: float
    ) -> None:
        """Begin without a parent; the positions above this node are in order of preference."""
        self._file, self.tree, self._relay = file, tree, relay
        self._candidates = list(candidates)
        self.first = candidates[0]  # the best candidate
        self._next = 0  # the index of the candidate that is tried next
        self.parent: RelayParent | None = None  # sends the chunks; None while one is looked for
        self.candidate: RelayParent | None = None  # is tried, and may become the parent
        self.corrupt: list[int] = []  # sent damaged chunks; only the source is used again
        self.refusals: dict[int, str] = {}  # why candidates failed since one is looked for
        self.contact: str | None = None  # why the best candidate cannot be reached; None at first
        self._pace = Pace(file, tree, _PATIENCE_SECONDS + _PATIENCE_A_LEVEL * len(candidates), now)
        self._have, self._fed = 0, now  # the tree's chunks here, and when the last one came
        self._lost = self._again = now  # the last parent was lost; a candidate may be tried
        self._had = 0  # the chunks that were there when the present parent became it
        self._reached = False
        self._source_silent = False  # true if the source, when last asked, said nothing

    @property
    def done(self) -> bool:
        """True if all chunks of the tree are there."""
        return self._file.have[self.tree] == self._file.totals[self.tree]

    @property
    def open_connections(self) -> list[RelayParent]:
        """Those of the parent and of the candidate."""
        return [link for link in (self.parent, self.candidate) if link is not None]

    def has_given_up(self, now: float) -> bool:
        """Return whether no parent can be found."""
        is_untried = any(position not in self.refusals for position in self._candidates)
        if self.done or self.parent is not None or is_untried:
            return False
        patience = GIVE_UP_SECONDS if self._reached else _UNREACHED_SECONDS
        if self._source_silent:
            patience = _SILENT_SOURCE_SECONDS
        return now > max(self._fed + patience, self._lost + _SEARCH_SECONDS)

    def receive(self, link: RelayParent, now: float) -> None:
        """Take what has come over a connection."""
        with self._leave_on_failure(link, now):
            if link.is_connecting:
                link.connect(now)
                self._note_contact("")
                return
            link.receive(self._file, now)
            if link is self.candidate and link.accepted:
                self._adopt_or_disconnect(link, now)

    def tick(self, now: float) -> None:
        """Look after the connections: end those that are of no use, and look for better ones."""
        if self.done:
            self._note_contact("")
            for link in self.open_connections:
                self._end(link)
            return
        if self._have != self._file.have[self.tree]:
            self._have, self._fed = self._file.have[self.tree], now
        for link in self.open_connections:
            with self._leave_on_failure(link, now):
                link.tick(now)
        slow = self._pace.poll_slow(now)
        wanted = slow if self.parent is not None else now >= self._again
        if wanted and self.candidate is None:
            self._try_next(now)

    def _try_next(self, now: float) -> None:
        """Connect to the next candidate above the parent, if any; pause after the last."""
        if self._next == len(self._candidates):
            self._again = now + _RETRY_SECONDS
            self._next = 0
            if self.parent is not None:
                self._next = self._candidates.index(self.parent.position) + 1
            return
        position = self._candidates[self._next]
        self._next += 1
        try:
            self.candidate = self._relay.connect(position, self)
        except OSError as exc:
            self._refuse(position, exc, is_connecting=True)

    def _note_contact(self, failure: str) -> None:
        if self.contact is None:
            self.contact = failure

    def _adopt_or_disconnect(self, link: RelayParent, now: float) -> None:
        """Take a serving node as parent, but none as far as a slow one: its chunk may be coming."""
        self._reached, self.candidate = True, None
        have = self._file.have[self.tree]
        if self.parent is not None:
            is_useful = link.have >= min(have + 2, self._file.totals[self.tree])
            self._relay.disconnect(self.parent if is_useful else link)
            if not is_useful:
                return
        self.parent, self._had = link, have
        self._pace.restart(now)

    @contextlib.contextmanager
    def _leave_on_failure(self, link: RelayParent, now: float) -> Iterator[None]:
        try:
            yield
        except BlockingIOError:  # nothing has come after all
            pass
        except (ConnectionOver, OSError) as exc:
            self._leave(link, exc, now)

    def _leave(self, link: RelayParent, failure: Exception, now: float) -> None:
        position = link.position
        if link is self.parent:
            if self._file.have[self.tree] > self._had:  # else it could fail each time, for ever
                self.refusals.clear()
                self._lost = now
            self._next = self._candidates.index(position) + 1
        self._refuse(position, failure, is_connecting=link.is_connecting)
        self._end(link)
        if isinstance(failure, CorruptChunk):
            self.corrupt.append(position)
            if position != relay_chunks.SOURCE:  # there is no other
                self._next = self._candidates.index(position)  # there will be the one after it
                del self._candidates[self._next]

    def _refuse(self, position: int, failure: Exception, *, is_connecting: bool) -> None:
        why = error_text(failure).lower() if isinstance(failure, OSError) else str(failure)
        self.refusals[position] = why
        if is_connecting:
            self._note_contact(why)
        # One that is busy lives, and has proved that it knows this transfer.
        self._reached |= isinstance(failure, ParentBusy)
        if position == relay_chunks.SOURCE:
            self._source_silent = isinstance(failure, ParentSilent)

    def _end(self, link: RelayParent) -> None:
        self._relay.disconnect(link)
        if link is self.parent:
            self.parent = None
        if link is self.candidate:
            self.candidate = None


MOST_CHILDREN = 8  # of a node: two in its own tree, and those whose parent has failed
MAX_SOURCE_CONNECTIONS = 64  # served by the source, the last that a node can turn to
MOST_STRANGERS = 64  # without a proof; one more ends any: the oldest may be a node of ours
_MOST_ACCEPTED = 16  # connections in a round, so that the others are served in between
_TICK_SECONDS = 0.05  # time between two looks at all connections
_PAUSE_SECONDS = 0.002  # for bytes to gather: a round for each packet would cost much CPU time
BACKLOG = 512
MOST_ROUND_SECONDS = 0.5  # that a round counts: a longer one was stopped, or waited for the disk
_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


@dataclass(frozen=True)
class RelayOutcome:
    """The end of a transfer on one node."""

    failure: str = ""  # why the file did not come; empty if it did
    unreached: tuple[tuple[int, str], ...] = ()  # places that were tried, with the reasons
    seconds: float = 0.0  # from the beginning to the last byte
    corrupt: tuple[int, ...] = ()  # the places of those that sent damaged chunks


def listen(address: str) -> socket.socket:
    """Return a socket that listens on an address, on a port that is free; OSError if it cannot."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, 0), family=family, backlog=BACKLOG)
    listener.setblocking(False)
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
        self._directory, self._rounds = directory, rounds
        self._most_children = MOST_CHILDREN
        self._file, self._token, self._listener = file, token, listener
        self._addresses: dict[int, tuple[str, int]] = {}
        self._position = relay_chunks.SOURCE
        self._now = 0.0  # the beginning of the round, in which all that came before it is seen
        self._read_at = time.monotonic()
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, _READ, self._accept)
        self._children: list[RelayChild] = []
        self._inflows: list[Inflow] = []
        self._began = 0.0
        self._next_tick = 0.0
        self._drained = True  # false if this round has left bytes to take or send at once

    def run(
        self,
        candidates: RelayCandidates | None,
        control: int,
        on_report: Callable[[dict[int, str] | RelayOutcome], None],
    ) -> None:
        """Take the file and serve others, until something is written to a pipe or it is closed.

        A node reports the best candidates that it cannot reach, then the outcome; without the file
        it serves nobody from then on. UnwritableFile if this node's disk does not take a chunk.
        """
        due = [self._report_contact, self._outcome]
        if candidates is None:
            self._most_children = MAX_SOURCE_CONNECTIONS
            due.clear()
        else:
            self._position = candidates.position
            places = candidates.places
            self._addresses = {one.position: (one.address, one.port) for one in places}
            for tree, chain in enumerate(candidates.by_tree):
                self._inflows.append(Inflow(self._file, tree, chain, self, self._now))
        self._began = time.monotonic()
        self._selector.register(control, _READ)
        while self._do_round(control):
            report = due[0]() if due else None
            if report is not None:
                del due[0]
                on_report(report)
                if isinstance(report, RelayOutcome) and report.failure:
                    return
            if self._drained:
                time.sleep(_PAUSE_SECONDS)

    def _do_round(self, control: int) -> bool:
        self._rounds[0] += 1
        real = time.monotonic()
        self._now += min(real - self._read_at, MOST_ROUND_SECONDS)
        self._read_at = real
        self._drained = True
        had = list(self._file.have)
        for key, events in self._selector.select(_TICK_SECONDS):
            if key.fileobj == control:
                return False
            key.data(events)
        now = self._now
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
            for link in inflow.open_connections:
                self.disconnect(link)
        self._selector.close()
        self._listener.close()

    def connect(self, position: int, inflow: Inflow) -> RelayParent:
        """Begin to connect to a position; what comes goes to the inflow; OSError if it cannot."""
        link = RelayParent(position, self._addresses[position], self._token, inflow.tree, self._now)

        def receive(events: int) -> None:
            if link not in inflow.open_connections:  # ended in this round
                return
            inflow.receive(link, self._now)
            self._drained &= link.drained
            if events & _WRITE and link in inflow.open_connections:
                self._selector.modify(link, _READ, receive)

        self._selector.register(link, _WRITE, receive)
        return link

    def disconnect(self, link: RelayParent) -> None:
        """End a connection."""
        self._selector.unregister(link)
        link.close()

    def _report_contact(self) -> dict[int, str] | None:
        """Return the parents that cannot be connected to, and why; None while that is unknown."""
        contacts = {inflow.first: inflow.contact for inflow in self._inflows}
        if None in contacts.values():
            return None
        contacts.pop(relay_chunks.SOURCE, None)
        return {place: why for place, why in contacts.items() if why}

    def _outcome(self) -> RelayOutcome | None:
        failed = [inflow for inflow in self._inflows if inflow.has_given_up(self._now)]
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
                common = self._position, self._token, self._file, self._now, self._directory
                child = RelayChild(connection, *common)
                self._children.append(child)
                serve = functools.partial(self._serve, child)
                self._selector.register(child, _READ | _WRITE, serve)
                strangers = [child for child in self._children if not child.accepted]
                if len(strangers) > MOST_STRANGERS:
                    self._drop(secrets.choice(strangers))

    def _serve(self, child: RelayChild, events: int) -> None:
        if child not in self._children:  # ended in this round
            return
        with self._drop_on_failure(child):
            if events & _READ:
                served = sum(other.accepted for other in self._children)
                child.receive(room=served < self._most_children)
            if events & _WRITE:
                child.send(self._now)
            self._drained &= child.blocked or not child.has_more
            self._await_child(child)

    @contextlib.contextmanager
    def _drop_on_failure(self, child: RelayChild) -> Iterator[None]:
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
            with self._drop_on_failure(child):
                child.tick(now)
                self._await_child(child)

    def _await_child(self, child: RelayChild) -> None:
        wanted = _READ | (_WRITE if child.has_more else 0)
        key = self._selector.get_key(child)
        if key.events != wanted:
            self._selector.modify(child, wanted, key.data)
