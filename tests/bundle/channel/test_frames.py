"""Frames and lines through a channel that cuts, mixes and loses what is written."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

from bundle.channel.frames import KEPT, LONGEST, FrameReader, FrameWriter, Lines

ALPHABET = 'ab {}[]":,.+ \t\x1e\r\n\\' + "\u00fc\u20ac\N{SNOWMAN}\U0001f600"


def some_message(rng: random.Random) -> str:
    length = rng.choice([0, 1, 5, 900, 953, 954, 955, 960, 1024, 3000, 40_000])
    text = "".join(rng.choices(ALPHABET, k=max(0, length + rng.randint(-3, 3))))
    return json.dumps({"text": text}, ensure_ascii=False)


def messages_of(rng: random.Random, most: int = 9) -> dict[str, list[str]]:
    return {
        f"node{number:0{rng.choice([1, 4])}}:{number}": [
            some_message(rng) for _ in range(rng.randint(1, 6))
        ]
        for number in range(rng.randint(1, most))
    }


def frames_of(data: bytes) -> list[bytes]:
    return data.splitlines(keepends=True)


def mixed(rng: random.Random, queues: list[list[bytes]]) -> bytes:
    """Blocks as srun passes them on: those of all sources mixed, each source's in order."""
    queues, out = [list(queue) for queue in queues], []
    while left := [queue for queue in queues if queue]:
        out.append(rng.choice(left).pop(0))
    return b"".join(out)


def pieces(rng: random.Random, data: bytes) -> Iterator[bytes]:
    while data:
        count = rng.choice([1, 2, 7, 100, 4096, 1 << 16])
        yield data[:count]
        data = data[count:]


def received(
    rng: random.Random, queues: list[list[bytes]]
) -> tuple[dict[str, list[str]], dict[str, int]]:
    """What a reader makes of it: messages by source, and what is lost."""
    found: dict[str, list[str]] = {}
    reader = FrameReader()
    parts = pieces(rng, mixed(rng, queues))
    for source, line in [*(one for part in parts for one in reader.feed(part)), *reader.end()]:
        found.setdefault(source, []).append(line)
    return found, reader.lost


@pytest.mark.parametrize("seed", range(40))
def test_any_mix_in_any_pieces_gives_the_messages_back(seed: int) -> None:
    rng = random.Random(seed)
    messages = messages_of(rng)
    queues = []
    for source, own in messages.items():
        writer = FrameWriter(source)
        queues.append(frames_of(b"".join(writer.frames(one.encode()) for one in own)))
    assert all(len(frame) <= LONGEST for queue in queues for frame in queue)
    found, lost = received(rng, queues)
    assert (found, lost) == (messages, {})


def blocks(rng: random.Random, data: bytes) -> list[bytes]:
    """As slurmstepd cuts what a task has left when it ends: without regard to line ends."""
    found = []
    while data:
        count = rng.randint(1, 1024)
        found.append(data[:count])
        data = data[count:]
    return found


@pytest.mark.parametrize("seed", range(200))
def test_whatever_is_cut_is_delivered_or_counted(seed: int) -> None:
    """Every source ends and has its bytes cut anywhere, so that others' are in between."""
    rng = random.Random(seed)
    messages = messages_of(rng, 16)
    queues = []
    for source, own in messages.items():
        writer = FrameWriter(source)
        queues.append(blocks(rng, b"".join(writer.frames(one.encode()) for one in own)))
    if rng.random() < 0.5:
        queues.append([b"slurmstepd: error: *** STEP 7.4 CANCELLED ***\n", b"\x1e", b"no line end"])
    found, lost = received(rng, queues)
    for source, own in messages.items():
        delivered, left = found.get(source, []), iter(own)
        assert all(one in left for one in delivered)  # in order
        # The last frames may be missing without anything behind them that shows it.
        if len(delivered) == len(own):
            assert not lost.get(source)
        elif delivered and delivered[-1] == own[-1] and own.count(own[-1]) == 1:
            assert lost[source] > 0
    assert found.keys() <= {*messages, ""}


@pytest.mark.parametrize("seed", range(60))
def test_what_is_cut_and_sent_again_is_all_there(seed: int) -> None:
    """As the driver asks for it; the last word is said again by itself."""
    rng = random.Random(seed)
    messages = messages_of(rng, 12)
    writers = {source: FrameWriter(source) for source in messages}
    queues, last = [], {}
    for source, own in messages.items():
        data = b""
        for one in own:
            last[source] = writers[source].number + 1
            data += writers[source].frames(one.encode())
        queues.append(blocks(rng, data))
    reader = FrameReader()
    found: dict[str, list[str]] = {}

    def feed(data: bytes) -> None:
        for piece in pieces(rng, data):
            for source, line in reader.feed(piece):
                found.setdefault(source, []).append(line)

    feed(mixed(rng, queues))
    feed(b"\n")
    for source, writer in writers.items():
        feed(writer.again(last[source], writer.number))
        for gaps in [reader.find_gaps().get(source, [])] * 3:
            for first, end in gaps:
                feed(writer.again(first, end))
    found.pop("", None)
    assert found == messages
    assert (reader.find_gaps(), list(reader.end()), reader.lost) == ({}, [], {})


def test_a_flipped_bit_is_never_delivered() -> None:
    data = FrameWriter("n7:0").frames(b'{"a": 1}')
    for at in range(len(data)):
        for bit in range(8):
            broken = bytearray(data)
            broken[at] ^= 1 << bit
            reader = FrameReader()
            found = [line for source, line in reader.feed(bytes(broken)) if source]
            found += [line for source, line in reader.end() if source]
            assert found == [], (at, bit)


def test_what_is_missing_is_given_up_and_counted_with_what_it_was_part_of() -> None:
    writer = FrameWriter("n7:0")
    long, short = b'"' + b"x" * 5000 + b'"', b'"after"'
    frames = frames_of(writer.frames(long)) + frames_of(writer.frames(short))
    reader = FrameReader()
    assert list(reader.feed(b"".join(frames[:2] + frames[3:]))) == []
    assert reader.find_gaps() == {"n7:0": [(3, 3)]}
    assert list(reader.give_up("n7:0")) == [("n7:0", '"after"')]
    assert (reader.find_gaps(), reader.lost) == ({}, {"n7:0": len(frames) - 1})


def test_a_gap_does_not_fill_the_memory() -> None:
    writer = FrameWriter("n7:0")
    writer.frames(b'"lost"')
    reader = FrameReader()
    message = b'"' + b"x" * 60_000 + b'"'
    sent = KEPT // len(message) + 2
    found = [one for _ in range(sent) for one in reader.feed(writer.frames(message))]
    assert len(found) >= sent - 1
    assert reader.lost == {"n7:0": 1}


def test_a_writer_keeps_so_much_and_goes_on_where_another_was() -> None:
    writer = FrameWriter("n7:0", 41)
    assert writer.frames(b"{}").startswith(b"\x1en7:0 42 2 ")
    for _ in range(KEPT // 900 + 1):
        writer.frames(b"x" * 900)
    assert writer.again(42, 42) == b""
    assert 0.9 * KEPT < len(writer.again(1, writer.number)) <= KEPT


def test_a_long_name_leaves_room() -> None:
    writer = FrameWriter("n" * 255 + ":12345")
    frames = frames_of(writer.frames(("\u20ac" * 5000).encode()))
    assert all(len(frame) <= LONGEST for frame in frames)
    reader = FrameReader()
    assert [line for _, line in reader.feed(b"".join(frames))] == ["\u20ac" * 5000]


def test_what_is_no_frame_has_no_source_and_a_shell_sends_one_without_a_checksum() -> None:
    data = FrameWriter("n7:0").frames(b'"x"')
    for line in ("slurmstepd: error: *** STEP ***", "n7:0 1 2 deadbeef . {}", "\N{SNOWMAN}"):
        reader = FrameReader()
        assert list(reader.feed(f"{line}\n".encode() + data)) == [("", line), ("n7:0", '"x"')]
        assert list(reader.end()) == []
    shell = b'\x1en7:3 0 0 - . {"v": 1}\n'
    assert list(FrameReader().feed(shell)) == [("n7:3", '{"v": 1}')]


class Piece(bytes):
    """Bytes that may be cut and joined, but not added to: that copies what was there before."""

    def __add__(self, other: Any) -> bytes:
        raise AssertionError("a long line is copied with every piece")

    __radd__ = __add__


@pytest.mark.parametrize("seed", range(20))
def test_lines_of_any_length_in_any_pieces(seed: int) -> None:
    rng = random.Random(seed)
    lines = [rng.randbytes(rng.choice([0, 1, 9, 3000])).replace(b"\n", b"") for _ in range(50)]
    reader = Lines()
    found = [line for piece in pieces(rng, b"\n".join(lines)) for line in reader.feed(Piece(piece))]
    assert [*found, reader.last()] == lines
    assert reader.last() == b""
