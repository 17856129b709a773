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
    return [frame + b"\n" for frame in data.split(b"\n")[:-1]]


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


def read(reader: FrameReader, parts: Iterator[bytes]) -> tuple[dict[str, list[str]], list[str]]:
    """What a reader makes of it: messages by source, and lines of nobody."""
    found: dict[str, list[str]] = {}
    for part in parts:
        for source, line in reader.feed(part):
            found.setdefault(source, []).append(line)
    for source, line in reader.end():
        found.setdefault(source, []).append(line)
    return found, found.pop("", [])


@pytest.mark.parametrize("seed", range(40))
def test_any_mix_in_any_pieces_gives_the_messages_back(seed: int) -> None:
    rng = random.Random(seed)
    messages = messages_of(rng)
    queues = []
    for source, own in messages.items():
        writer = FrameWriter(source)
        queues.append(frames_of(b"".join(writer.frames(one.encode()) for one in own)))
    assert all(len(frame) <= LONGEST for queue in queues for frame in queue)
    reader = FrameReader()
    found, stray = read(reader, pieces(rng, mixed(rng, queues)))
    assert (found, stray, reader.lost) == (messages, [], {})


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
    writers = {source: FrameWriter(source) for source in messages}
    sent = {
        source: b"".join(writers[source].frames(one.encode()) for one in own)
        for source, own in messages.items()
    }
    queues = [blocks(rng, data) for data in sent.values()]
    if rng.random() < 0.5:
        queues.append([b"slurmstepd: error: *** STEP 7.4 CANCELLED ***\n", b"\x1e", b"no line end"])
    reader = FrameReader()
    found, _ = read(reader, pieces(rng, mixed(rng, queues)))
    for source, own in messages.items():
        delivered = found.get(source, [])
        assert subsequence(delivered, own)
        # The last frames may be missing without anything behind them that shows it.
        if len(delivered) == len(own):
            assert not reader.lost.get(source)
        elif delivered and delivered[-1] == own[-1] and own.count(own[-1]) == 1:
            assert reader.lost[source] > 0
    assert found.keys() <= messages.keys()


def subsequence(some: list[str], whole: list[str]) -> bool:
    left = iter(whole)
    return all(one in left for one in some)


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


def test_a_frame_that_a_shell_sends() -> None:
    reader = FrameReader()
    assert list(reader.feed(b'\x1en7:3 0 0 - . {"v": 1}\n')) == [("n7:3", '{"v": 1}')]


def test_a_long_name_leaves_room() -> None:
    writer = FrameWriter("n" * 255 + ":12345")
    frames = frames_of(writer.frames(("\u20ac" * 5000).encode()))
    assert all(len(frame) <= LONGEST for frame in frames)
    reader = FrameReader()
    assert [line for _, line in reader.feed(b"".join(frames))] == ["\u20ac" * 5000]


@pytest.mark.parametrize(
    "line",
    [
        "slurmstepd: error: *** STEP 7.4 ON node01 CANCELLED ***",
        "Traceback (most recent call last):",
        "n7:0 1 2 deadbeef . {}",
        "\N{SNOWMAN}",
    ],
)
def test_what_is_no_frame_has_no_source(line: str) -> None:
    reader = FrameReader()
    data = FrameWriter("n7:0").frames(b'"x"')
    assert list(reader.feed(f"{line}\n".encode() + data)) == [("", line), ("n7:0", '"x"')]
    assert list(reader.end()) == []


# --- Lines out of pieces; and that long ones are not copied again with every piece ---------------


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
