"""Whom a node tries to connect to, and what it says of those that it cannot reach."""

from __future__ import annotations

import contextlib
import select
import socket
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from bundle.transfer import relay_chunks, relay_receiver
from bundle.transfer.relay import listen
from bundle.transfer.relay_receiver import unreachable
from tests.support.relay_places import at_addresses


@contextlib.contextmanager
def listening(count: int) -> Iterator[list[tuple[str, int]]]:
    """The addresses of so many that listen, the source among them."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(listen("127.0.0.1")) for _ in range(count)]
        yield [one.getsockname() for one in sockets]


@contextlib.contextmanager
def closed_port() -> Iterator[tuple[str, int]]:
    """An address at which nobody listens, and nobody else can."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()


def parents(position: int, nodes: int) -> set[int]:
    """The nodes that a node would take the file from."""
    above = {relay_chunks.parent(position, nodes, tree) for tree in range(relay_chunks.TREES)}
    return above - {relay_chunks.SOURCE}


def test_those_that_listen_are_reached() -> None:
    with listening(8) as places:
        for position in range(1, 8):
            assert unreachable(at_addresses(places, position)) == {}


def test_those_that_do_not_are_named_with_the_reason() -> None:
    with listening(8) as places, closed_port() as closed:
        below = next(place for place in range(1, 8) if 4 in parents(place, 7))
        places[4] = closed
        assert unreachable(at_addresses(places, below)) == {4: "connection refused"}


def test_silence_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A queue that is full answers as a firewall that drops packets does: not at all."""
    monkeypatch.setattr(relay_receiver, "CONTACT_SECONDS", 0.3)
    with socket.socket() as full, contextlib.ExitStack() as stack, listening(4) as places:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(3):
            one = stack.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(full.getsockname())
        below = next(place for place in (1, 2, 3) if parents(place, 3))
        (above,) = parents(below, 3)
        places[above] = full.getsockname()
        failures = unreachable(at_addresses(places, below))
    assert failures == {above: "no answer within 0.3 s"}


def test_what_stands_is_seen_by_a_node_that_stood_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of its time is over when it first looks at the connections that it has begun."""
    times = iter([100.0])

    def stand_still() -> float:
        for begun in times:
            return begun
        for listener in wanted:
            assert select.select([listener], [], [], 300)[0]
        return 200.0

    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(listen("127.0.0.1")) for _ in range(8)]
        wanted = [sockets[place] for place in parents(1, 7)]
        assert wanted
        clock = SimpleNamespace(monotonic=stand_still)
        monkeypatch.setattr(relay_receiver, "time", clock)
        assert unreachable(at_addresses([one.getsockname() for one in sockets], 1)) == {}


def test_an_address_that_leads_nowhere() -> None:
    with listening(3) as places:
        below = next(place for place in (1, 2) if parents(place, 2))
        (above,) = parents(below, 2)
        places[above] = ("255.255.255.255", 9)
        (why,) = unreachable(at_addresses(places, below)).values()
    assert why in ("network is unreachable", "permission denied")
