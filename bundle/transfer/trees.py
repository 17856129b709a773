"""The two trees along which a relay's file travels. Pure functions.

Position 0 is the source; the nodes are 1 to ``nodes``. Both trees are in-order binary trees: half
of the positions are leaves, every other one has at most two children, and one is the child of the
source. The second tree is the first with the positions moved or mirrored, so that whoever is an
inner node of one is a leaf of the other. Each tree carries half of the file: so each node takes in
the file once, and passes on no more than the file once, whatever the number of nodes. This is the
double binary tree of Sanders, Speck and Träff, "Two-tree algorithms for full bandwidth broadcast,
reduction and scan" (2009).
"""

from __future__ import annotations

SOURCE = 0
"""The position that has the whole file from the beginning."""
TREES = 2
"""The number of trees; chunk ``n`` of a file travels along tree ``n % TREES``."""


def parent(position: int, nodes: int, tree: int) -> int:
    """Return the parent of a position in one of the trees."""
    if tree == 0:
        return _in_order_parent(position, nodes)
    above = _in_order_parent(_renumbered(position, nodes), nodes)
    return above and _original(above, nodes)


def ancestors(position: int, nodes: int, tree: int) -> list[int]:
    """Return the parent of a position in one of the trees, its parent, and so on to the source."""
    chain = [parent(position, nodes, tree)]
    while chain[-1] != SOURCE:
        chain.append(parent(chain[-1], nodes, tree))
    return chain


def _in_order_parent(position: int, nodes: int) -> int:
    """Return the parent where a position's lowest bit is its height above the leaves."""
    height = position & -position
    above = (position ^ height) | (height << 1)
    # At the right end of the tree the parent may be beyond the last node: take the next one up.
    return above if above <= nodes else position ^ height


def _renumbered(position: int, nodes: int) -> int:
    """Return the place of a node in the second tree: an odd position becomes an even one."""
    return position % nodes + 1 if nodes % 2 else nodes + 1 - position


def _original(place: int, nodes: int) -> int:
    """Return the node at a place of the second tree."""
    return (place - 2) % nodes + 1 if nodes % 2 else nodes + 1 - place
