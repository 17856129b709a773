"""The connections that nodes of a relay cannot make to each other, counted as they report."""

from __future__ import annotations

from collections.abc import Mapping

from ...protocol.messages import RELAY_SOURCE
from ...transfer import relay_chunks
from ...transfer.relay import MOST_OF_SOURCE

SPARE_NODES = MOST_OF_SOURCE // relay_chunks.TREES - 1
"""Nodes that the source can send to besides those at the top of the trees, which have one
connection of each tree. A node that reaches no other has as many: one for each part of the file."""


class Reachability:
    """The nodes that cannot connect to others, as far as they have reported.

    Attributes:
        why: why most nodes cannot take part in a relay; empty while they can.
    """

    def __init__(self, nodes: int) -> None:
        self._nodes = nodes
        self._most_without_parent = max(nodes // 2, SPARE_NODES)
        self._without_source: set[str] = set()
        """The nodes that cannot connect to the source."""
        self._without_parent: set[str] = set()
        """The nodes that cannot connect to a node above them."""
        self.why = ""

    def add(self, node: str, unreachable: Mapping[str, str]) -> None:
        """Count a node; one that no longer reports the source has reached it since."""
        self._without_source.discard(node)
        if RELAY_SOURCE in unreachable:
            self._without_source.add(node)
            if 2 * len(self._without_source) > self._nodes:
                why = unreachable[RELAY_SOURCE]
                self.why = f"nodes cannot connect to this host, for example {node}: {why}"
        parents = [other for other in unreachable if other != RELAY_SOURCE]
        if parents:
            self._without_parent.add(node)
            if len(self._without_parent) > self._most_without_parent:
                example = f"for example {node} to {parents[0]}: {unreachable[parents[0]]}"
                self.why = self.why or f"most nodes cannot connect to others, {example}"
