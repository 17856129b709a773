"""The places that each node of a relay must know, and the source's answers to those that ask.

A node takes each half of the file from the nodes above it in one tree, or from the source. Of N
nodes that are about 2 log2 N, whatever N.
"""

from __future__ import annotations

import functools
import json
import zlib
from collections.abc import Sequence

from ...protocol.codec import encode
from ...transfer import relay_chunks
from ...transfer.relay_peers import RelayCandidates, RelayPlace, key_of

_BEFORE_SOURCE = 3
"""Ancestors that are tried before the source: a firewall that drops what is sent costs the time of
a connection for each. The source may be busy, so those further up come after it."""


def in_order_of_preference(position: int, nodes: int, tree: int) -> tuple[int, ...]:
    """Return the positions that a node may take the chunks of a tree from, the best one first.

    Args:
        position: that of the node, 1 to ``nodes``.
        nodes: the number of nodes.
        tree: 0 or 1.
    """
    *above, source = relay_chunks.ancestors(position, nodes, tree)
    return (*above[:_BEFORE_SOURCE], source, *above[_BEFORE_SOURCE:])


def candidates_of(position: int, places: Sequence[RelayPlace]) -> RelayCandidates:
    """Return what the node at a position must know."""
    nodes = len(places) - 1
    by_tree = tuple(
        in_order_of_preference(position, nodes, tree) for tree in range(relay_chunks.TREES)
    )
    wanted = sorted({candidate for chain in by_tree for candidate in chain})
    return RelayCandidates(position, by_tree, tuple(places[candidate] for candidate in wanted))


class RelayDirectory:
    """The source's answers to nodes that ask for their places; each is made when it is asked."""

    def __init__(self, places: Sequence[RelayPlace]) -> None:
        self._places = places
        self._encoded = functools.lru_cache(maxsize=None)(_encoded_place)
        """Each place as JSON, made once: those far up are in the answer to every node."""
        self._positions = {key_of(place.name): place.position for place in places[1:]}

    def __call__(self, key: int) -> bytes | None:
        """Return the answer to the node with a key; None if it takes no part."""
        position = self._positions.get(key)
        if position is None:
            return None
        candidates = candidates_of(position, self._places)
        own = encode(candidates, names={"position", "by_tree"})
        places = [self._encoded(place) for place in candidates.places]
        return zlib.compress(json.dumps({**own, "places": places}).encode())


def _encoded_place(place: RelayPlace) -> dict[str, object]:
    return encode(place)
