"""Counts and bytes in messages."""

from __future__ import annotations

from bundle.protocol.counts import format_count, format_size
from trainer.config import format_count as counted_in_trainer


def test_a_count_has_its_noun_and_bytes_a_unit() -> None:
    for words in (format_count, counted_in_trainer):
        assert [words(number, "layer") for number in (0, 1)] == ["0 layers", "1 layer"]
        assert [words(number, "entry", "entries") for number in (1, 3)] == ["1 entry", "3 entries"]
    assert [format_size(number) for number in (0, 1, 999, 1000, 1_380_000_000, 2 * 10**15)] == [
        "0 bytes", "1 byte", "999 bytes", "1.0 kB", "1.4 GB", "2000000.0 GB",
    ]  # fmt: skip
