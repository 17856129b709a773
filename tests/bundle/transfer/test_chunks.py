"""The chunks of a relayed file."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import pytest

from bundle.transfer.relay_chunks import TREES, ChunkFile, chunk_size


@pytest.fixture
def handle(tmp_path: Path) -> int:
    return os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)


@pytest.mark.parametrize(
    ("size", "chunk"),
    [(0, 1 << 16), (1, 1 << 16), (40_000_000, 1 << 17), (300_000_000, 1 << 20), (8 << 30, 1 << 20)],
)
def test_chunks_are_small_for_small_files_and_never_large(size: int, chunk: int) -> None:
    assert chunk_size(size) == chunk


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
        assert file.checksum(tree, 0) == zlib.crc32(os.pread(handle, length, offset))
