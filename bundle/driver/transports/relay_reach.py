"""Whether the nodes of a relay can connect to each other; counted as they tell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...protocol.requests import RELAY_SOURCE
from ...transfer import trees
from ...transfer.relay import MOST_OF_SOURCE
from ...transfer.relay_contact import tries_source

SPARE_NODES = MOST_OF_SOURCE // trees.TREES - 1
"""Nodes that the source can send to besides those at the top of the trees, which have one
connection of each tree. A node that reaches no other has as many: one for each part of the file."""


class Reach:
    """The nodes that cannot connect to others, as far as they have told.

    Attributes:
        why: why most nodes cannot take part in a relay; empty while they can.
    """

    def __init__(self, nodes: Sequence[str]) -> None:
        """Begin with no complaint.

        Args:
            nodes: all nodes, in the order of their places.
        """
        count = len(nodes)
        places = enumerate(nodes, 1)
        self._trying = {node for place, node in places if tries_source(place, count)}
        self._most_cut_off = max(count // 2, SPARE_NODES)
        self._alone = self._cut_off = 0
        self._told: set[str] = set()
        self.why = ""

    def add(self, node: str, others: Mapping[str, str]) -> None:
        """Count a node.

        Args:
            node: its name.
            others: whom it cannot connect to, with the reasons.
        """
        if node in self._told:
            return
        self._told.add(node)
        if node in self._trying and RELAY_SOURCE in others:
            self._alone += 1
            if 2 * self._alone > len(self._trying):
                why = others[RELAY_SOURCE]
                self.why = f"nodes cannot connect to this host, {node} for example: {why}"
        nodes = [other for other in others if other != RELAY_SOURCE]
        if nodes:
            self._cut_off += 1
            if self._cut_off > self._most_cut_off:
                example = f"{node} to {nodes[0]} for example: {others[nodes[0]]}"
                self.why = self.why or f"most nodes cannot connect to others, {example}"
