"""Lines out of pieces; and that long ones are not copied again with every piece."""

from __future__ import annotations

import random
from typing import Any

import pytest

from bundle.channel.frames import Lines
from bundle.launch import output_reader


class Piece(bytes):
    """Bytes that may be cut and joined, but not added to: that copies what was there before."""

    def __add__(self, other: Any) -> bytes:
        raise AssertionError("a long line is copied with every piece")

    __radd__ = __add__


@pytest.mark.parametrize("seed", range(20))
def test_lines_of_any_length_in_any_pieces(seed: int) -> None:
    rng = random.Random(seed)
    lines = [rng.randbytes(rng.choice([0, 1, 9, 3000])).replace(b"\n", b"") for _ in range(50)]
    data = b"\n".join(lines)
    found, reader = [], Lines()
    while data:
        count = rng.choice([1, 7, 100, 4096])
        found += reader.feed(data[:count])
        data = data[count:]
    assert [*found, reader.last()] == lines
    assert reader.last() == b""


def test_a_line_of_many_pieces_is_joined_once() -> None:
    reader = Lines()
    pieces = [Piece(b"x" * 1000) for _ in range(5000)]
    assert [line for piece in pieces for line in reader.feed(piece)] == []
    (line,) = reader.feed(b"\n")
    assert len(line) == 5_000_000


def test_a_ranks_long_line_is_joined_once_and_passed_on_in_pieces() -> None:
    """50 MB: each byte is copied once, whatever the size of the pieces."""
    stream = output_reader._Stream(0, None)
    passed = [stream.take(Piece(b"y" * 4096)) for _ in range(50_000_000 // 4096)]
    whole = [data for data in passed if data]
    assert sum(map(len, whole)) + len(stream.last()) == 50_000_000 // 4096 * 4096
    assert len(whole) <= 50_000_000 // output_reader.LONGEST_LINE + 1
    assert (stream.held, stream.last()) == (0, b"")


def test_what_is_remembered_of_long_lines_is_little() -> None:
    """A diagnosis looks at it with one expression after the other."""
    lines = output_reader._last_lines(b"z" * 10_000_000 + b"\nshort\n")
    assert [len(line) for line in lines] == [output_reader._KEPT_BYTES, 5]
