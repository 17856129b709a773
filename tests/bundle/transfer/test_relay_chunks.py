"""The chunks of a relayed file, and the trees in which nobody passes on more than it takes in."""

from __future__ import annotations

import math
import os
import zlib
from collections import Counter
from pathlib import Path

import pytest

from bundle.transfer.relay_chunks import (
    SOURCE,
    TREES,
    ChunkFile,
    choose_chunk_size,
    find_parent,
    list_ancestors,
)


@pytest.fixture
def handle(tmp_path: Path) -> int:
    return os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)


@pytest.mark.parametrize(
    ("size", "chunk"),
    [(0, 1 << 16), (1, 1 << 16), (40_000_000, 1 << 17), (300_000_000, 1 << 20), (8 << 30, 1 << 20)],
)
def test_chunks_are_small_for_small_files_and_never_large(size: int, chunk: int) -> None:
    assert choose_chunk_size(size) == chunk


@pytest.mark.parametrize("size", [0, 1, 65_535, 65_536, 65_537, 131_072, 200_000, 5_000_000])
def test_the_chunks_of_both_trees_are_the_file(handle: int, size: int) -> None:
    file = ChunkFile(handle, size)
    places = [
        file.place(tree, position) for tree in range(TREES) for position in range(file.totals[tree])
    ]
    end = 0
    for offset, length in sorted(places):
        assert offset == end
        assert length > 0
        end += length
    assert end == size


def test_what_has_come_is_told_from_the_beginning_without_a_gap(handle: int) -> None:
    size = 5 * (1 << 16) + 7
    content = os.urandom(size)
    file = ChunkFile(handle, size)
    arrived = []
    for tree in (0, 0, 1, 0, 1, 1):
        offset, length = file.place(tree, file.have[tree])
        data = memoryview(content)[offset : offset + length]
        file.add(tree, data, zlib.crc32(data))
        arrived.append(file.prefix[0])
    chunk = 1 << 16
    assert arrived == [chunk, chunk, 3 * chunk, 3 * chunk, 5 * chunk, size]
    assert file.complete
    assert os.pread(handle, size + 1, 0) == content


def test_a_checksum_is_that_of_the_bytes(handle: int) -> None:
    os.write(handle, os.urandom(100_000))
    file = ChunkFile(handle, 100_000, complete=True)
    assert file.complete
    for tree, (offset, length) in ((0, (0, 65_536)), (1, (65_536, 34_464))):
        assert file.compute_checksum(tree, 0) == zlib.crc32(os.pread(handle, length, offset))


COUNTS = (*range(1, 70), 127, 128, 129, 511, 512, 1000, 4095, 4096, 4097)


def children(nodes: int, tree: int) -> Counter[int]:
    """The number of children of each position."""
    return Counter(find_parent(position, nodes, tree) for position in range(1, nodes + 1))


@pytest.mark.parametrize("nodes", COUNTS)
def test_nobody_serves_more_than_two_in_one_tree_and_everybody_is_near_the_source(
    nodes: int,
) -> None:
    deepest, inner = math.ceil(math.log2(nodes + 1)) + 1, []
    for tree in range(TREES):
        served = children(nodes, tree)
        assert served.pop(SOURCE) == 1
        assert all(count <= 2 for count in served.values())
        assert served.keys() <= set(range(1, nodes + 1))
        inner.append(served.keys())
        for position in range(1, nodes + 1):
            chain = list_ancestors(position, nodes, tree)
            assert chain[-1] == SOURCE
            assert len(chain) <= deepest
            assert position not in chain
    assert inner[0].isdisjoint(inner[1])
