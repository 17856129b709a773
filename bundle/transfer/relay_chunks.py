"""The chunks of a relayed file, and the two trees along which they travel."""

from __future__ import annotations

import mmap
import os
import zlib
from array import array
from collections.abc import Callable

from ..system.files import error_text

# --- The two trees along which a relay's file travels --------------------------------------------

# Position 0 is the source; the nodes are 1 to ``nodes``. Both are in-order binary trees: half of
# the positions are leaves, every other one has at most two children, one is the source's child.
# Inner nodes of one tree are leaves of the other, and each carries half of the file: so each node
# takes in the file once, and passes on no more than that. This is the double binary tree of
# Sanders, Speck and Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan"
# (2009).

SOURCE = 0  # the position that has the whole file from the beginning
TREES = 2  # the number of trees; chunk ``n`` of a file travels along tree ``n % TREES``


def find_parent(position: int, nodes: int, tree: int) -> int:
    """Return the parent of a position in one of the trees."""
    if tree == 0:
        return _find_in_order_parent(position, nodes)
    # The place of the node in the second tree: an odd position becomes an even one.
    place = position % nodes + 1 if nodes % 2 else nodes + 1 - position
    above = _find_in_order_parent(place, nodes)
    if above == SOURCE:
        return SOURCE
    return (above - 2) % nodes + 1 if nodes % 2 else nodes + 1 - above


def list_ancestors(position: int, nodes: int, tree: int) -> list[int]:
    """Return the parent of a position in one of the trees, its parent, and so on to the source."""
    chain = [find_parent(position, nodes, tree)]
    while chain[-1] != SOURCE:
        chain.append(find_parent(chain[-1], nodes, tree))
    return chain


def _find_in_order_parent(position: int, nodes: int) -> int:
    """Return the parent where a position's lowest bit is its height above the leaves."""
    height = position & -position
    above = (position ^ height) | (height << 1)
    # At the right end of the tree the parent may be beyond the last node: take the next one up.
    return above if above <= nodes else position ^ height


# --- The chunks of a relayed file ----------------------------------------------------------------

# Chunk ``n`` travels along tree ``n % TREES``, and within a tree in order: so what a node has of a
# tree is told by one number.

_LEAST_CHUNK_BYTES, MOST_CHUNK_BYTES = 1 << 16, 1 << 20
_CHUNKS = 256  # of a middling file: small ones delay less, large ones cost less time in Python

Locate = Callable[[int, int], "tuple[int, int, int]"]
"""Returns the open file that has the bytes at an offset, their offset in it, and how many."""


class UnwritableFile(Exception):
    """The disk does not take a chunk: a fault of this node, and of no connection."""


def choose_chunk_size(size: int) -> int:
    """Return the bytes of a chunk of a file with so many bytes: a power of two."""
    wanted = max(_LEAST_CHUNK_BYTES, min(MOST_CHUNK_BYTES, size // _CHUNKS))
    return 1 << (wanted.bit_length() - 1)


class ChunkFile:
    """A file that comes in chunks; those that are there can be passed on."""

    def __init__(
        self, handle: int, size: int, *, complete: bool = False, locate: Locate | None = None
    ) -> None:
        """Hold the chunks of a file; ``locate`` replaces ``handle`` if its bytes are in several."""
        self.handle, self.size = handle, size
        self.locate: Locate = locate or (lambda offset, length: (handle, offset, length))
        self.chunk_bytes = choose_chunk_size(size)  # the length of each chunk but the last
        count = -(-size // self.chunk_bytes)
        self.totals = [(count - tree + TREES - 1) // TREES for tree in range(TREES)]  # by tree
        self.have = list(self.totals) if complete else [0] * TREES  # from the tree's first on
        self._checksums = array("L", [0]) * count  # of a chunk that is there, or 0
        self.prefix = memoryview(mmap.mmap(-1, 8)).cast("Q")  # shared: the bytes without a gap
        self.prefix[0] = size if complete else 0

    @property
    def complete(self) -> bool:
        """True if all chunks are there."""
        return self.have == self.totals

    def place(self, tree: int, position: int) -> tuple[int, int]:
        """Return where a chunk of a tree lies: its offset and its length in bytes."""
        offset = (position * TREES + tree) * self.chunk_bytes
        return offset, min(self.chunk_bytes, self.size - offset)

    def compute_checksum(self, tree: int, position: int) -> int:
        """Return the CRC-32 of a chunk that is there; OSError if it cannot be read."""
        number = position * TREES + tree
        if not self._checksums[number]:
            offset, length = self.place(tree, position)
            checksum = 0
            while length:
                handle, place, part = self.locate(offset, length)
                data = os.pread(handle, part, place)
                if not data:
                    break
                checksum = zlib.crc32(data, checksum)
                offset, length = offset + len(data), length - len(data)
            self._checksums[number] = checksum
        return self._checksums[number]

    def add(self, tree: int, data: memoryview, checksum: int) -> None:
        """Write the next chunk of a tree; UnwritableFile if the disk does not take it."""
        position = self.have[tree]
        offset, _ = self.place(tree, position)
        try:
            while data:
                written = os.pwrite(self.handle, data, offset)
                data, offset = data[written:], offset + written
        except OSError as exc:
            raise UnwritableFile(error_text(exc)) from exc
        self._checksums[position * TREES + tree] = checksum
        self.have[tree] = position + 1
        missing = min(have * TREES + tree for tree, have in enumerate(self.have))
        self.prefix[0] = min(self.size, missing * self.chunk_bytes)
