"""The chunks of a relayed file: those that have come, where they lie, and their checksums.

Chunk ``n`` travels along tree ``n % TREES``, and within a tree in order. So what a node has of a
tree is told by one number.
"""

from __future__ import annotations

import mmap
import os
import zlib
from array import array
from collections.abc import Callable

from ..system.files import error_text
from .trees import TREES

_LEAST_CHUNK_BYTES, MOST_CHUNK_BYTES = 1 << 16, 1 << 20
_CHUNKS = 256
"""Chunks that a file of a middling size is cut into.

A chunk is passed on once it has come as a whole. So small ones let a slow link's bytes go through
many nodes without much delay; large ones cost a fast link's nodes less time in Python.
"""


Locate = Callable[[int, int], "tuple[int, int, int]"]
"""Returns the open file that has the bytes at an offset, their offset in it, and how many of the
wanted ones it has."""


class UnwritableFile(Exception):
    """The disk does not take a chunk: a fault of this node, and of no connection."""


def chunk_size(size: int) -> int:
    """Return the bytes of a chunk of a file with so many bytes: a power of two."""
    wanted = max(_LEAST_CHUNK_BYTES, min(MOST_CHUNK_BYTES, size // _CHUNKS))
    return 1 << (wanted.bit_length() - 1)


class ChunkFile:
    """A file that comes in chunks; those that are there can be passed on.

    Attributes:
        handle: the open file.
        have: for each tree, the chunks that are there, from the tree's first on.
        totals: for each tree, the number of all its chunks.
        chunk_bytes: the length of each chunk but the last.
        prefix: one number, shared with forked processes: the bytes from the beginning without a
            gap.
    """

    def __init__(
        self, handle: int, size: int, *, complete: bool = False, locate: Locate | None = None
    ) -> None:
        """Hold the chunks of a file; ``locate`` replaces ``handle`` if its bytes are in several."""
        self.handle, self.size = handle, size
        self.locate: Locate = locate or (lambda offset, length: (handle, offset, length))
        self.chunk_bytes = chunk_size(size)
        count = -(-size // self.chunk_bytes)
        self.totals = [(count - tree + TREES - 1) // TREES for tree in range(TREES)]
        self.have = list(self.totals) if complete else [0] * TREES
        self._checksums = array("L", [0]) * count
        self._known = bytearray(count)
        self.prefix = memoryview(mmap.mmap(-1, 8)).cast("Q")
        self.prefix[0] = size if complete else 0

    @property
    def complete(self) -> bool:
        """True if all chunks are there."""
        return self.have == self.totals

    def place(self, tree: int, position: int) -> tuple[int, int]:
        """Return where a chunk of a tree lies: its offset and its length in bytes."""
        offset = (position * TREES + tree) * self.chunk_bytes
        return offset, min(self.chunk_bytes, self.size - offset)

    def checksum(self, tree: int, position: int) -> int:
        """Return the CRC-32 of a chunk that is there.

        Raises:
            OSError: it cannot be read.
        """
        number = position * TREES + tree
        if not self._known[number]:
            offset, length = self.place(tree, position)
            checksum = 0
            while length:
                handle, place, part = self.locate(offset, length)
                data = os.pread(handle, part, place)
                if not data:
                    break
                checksum = zlib.crc32(data, checksum)
                offset, length = offset + len(data), length - len(data)
            self._note(number, checksum)
        return self._checksums[number]

    def add(self, tree: int, data: memoryview, checksum: int) -> None:
        """Write the next chunk of a tree.

        Raises:
            UnwritableFile: it cannot be written.
        """
        position = self.have[tree]
        offset, _ = self.place(tree, position)
        try:
            while data:
                written = os.pwrite(self.handle, data, offset)
                data, offset = data[written:], offset + written
        except OSError as exc:
            raise UnwritableFile(error_text(exc)) from exc
        self._note(position * TREES + tree, checksum)
        self.have[tree] = position + 1
        missing = min(have * TREES + tree for tree, have in enumerate(self.have))
        self.prefix[0] = min(self.size, missing * self.chunk_bytes)

    def _note(self, number: int, checksum: int) -> None:
        self._checksums[number] = checksum
        self._known[number] = True
