"""The chunks of a relayed file, and the trees in which nobody passes on more than it takes in."""

from __future__ import annotations

import math
import os
import tempfile
import zlib
from collections import Counter

import pytest

from bundle.transfer.relay_chunks import (
    SOURCE,
    TREES,
    ChunkFile,
    choose_chunk_size,
    find_parent,
    list_ancestors,
)


def test_chunks_are_small_for_small_files_and_never_large() -> None:
    for size, bits in ((0, 16), (1, 16), (40_000_000, 17), (300_000_000, 20), (8 << 30, 20)):
        assert choose_chunk_size(size) == 1 << bits


@pytest.mark.parametrize("size", [0, 1, 65_536, 65_537, 5_000_000])
def test_the_chunks_of_both_trees_are_the_file(size: int) -> None:
    file = ChunkFile(-1, size)
    places = [
        file.place(tree, position) for tree in range(TREES) for position in range(file.totals[tree])
    ]
    end = 0
    for offset, length in sorted(places):
        assert offset == end
        assert length > 0
        end += length
    assert end == size


def test_what_has_come_is_told_from_the_beginning_without_a_gap() -> None:
    chunk = 1 << 16
    size = 5 * chunk + 7
    content = os.urandom(size)
    with tempfile.TemporaryFile() as stream:
        file, arrived = ChunkFile(stream.fileno(), size), []
        for tree in (0, 0, 1, 0, 1, 1):
            offset, length = file.place(tree, file.have[tree])
            data = memoryview(content)[offset : offset + length]
            file.add(tree, data, zlib.crc32(data))
            arrived.append(file.prefix[0])
        assert arrived == [chunk, chunk, 3 * chunk, 3 * chunk, 5 * chunk, size]
        assert file.complete
        assert stream.read() == content
        there = ChunkFile(stream.fileno(), size, complete=True)
        assert there.complete
        for tree in range(TREES):
            offset, length = there.place(tree, 0)
            assert there.compute_checksum(tree, 0) == zlib.crc32(content[offset : offset + length])


COUNTS = (*range(1, 70), 127, 128, 129, 512, 1000, 4096, 4097)


@pytest.mark.parametrize("nodes", COUNTS)
def test_nobody_serves_more_than_two_in_one_tree_and_everybody_is_near_the_source(
    nodes: int,
) -> None:
    deepest, inner, every = math.ceil(math.log2(nodes + 1)) + 1, [], range(1, nodes + 1)
    for tree in range(TREES):
        served = Counter(find_parent(position, nodes, tree) for position in every)
        assert served.pop(SOURCE) == 1
        assert all(count <= 2 for count in served.values())
        assert served.keys() <= set(every)
        inner.append(served.keys())
        for position in every:
            chain = list_ancestors(position, nodes, tree)
            assert chain[-1] == SOURCE
            assert len(chain) <= deepest
            assert position not in chain
    assert inner[0].isdisjoint(inner[1])
