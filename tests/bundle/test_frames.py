"""Lines of many sources through one pipe, in any mix and any pieces."""

from __future__ import annotations

import random

import pytest

from bundle.talking.frames import LONGEST, Joiner, split

ALPHABET = 'ab {}[]":,.+ \t\x1e\r\\' + "\u00fc\u20ac\N{SNOWMAN}\U0001f600"


def some_line(rng: random.Random) -> str:
    length = rng.choice([0, 1, 5, 900, 953, 954, 955, 960, 1024, 3000, 40_000])
    return "".join(rng.choices(ALPHABET, k=max(0, length + rng.randint(-3, 3))))


def mixed(rng: random.Random, queues: list[list[bytes]]) -> bytes:
    """Frames as srun passes them on: whole ones of all sources mixed, each source's in order."""
    out = []
    while left := [queue for queue in queues if queue]:
        out.append(rng.choice(left).pop(0))
    return b"".join(out)


def pieces(rng: random.Random, data: bytes) -> list[bytes]:
    found = []
    while data:
        count = rng.choice([1, 2, 7, 100, 4096, 1 << 16])
        found.append(data[:count])
        data = data[count:]
    return found


@pytest.mark.parametrize("seed", range(40))
def test_any_mix_in_any_pieces_gives_the_lines_back(seed: int) -> None:
    rng = random.Random(seed)
    lines = {
        f"node{number:0{rng.choice([1, 4])}}:{number}": [
            some_line(rng) for _ in range(rng.randint(0, 6))
        ]
        for number in range(rng.randint(1, 9))
    }
    queues = [
        [frame for line in own for frame in split(source, line)] for source, own in lines.items()
    ]
    assert all(len(frame) <= LONGEST for queue in queues for frame in queue)
    joiner = Joiner()
    found: dict[str, list[str]] = {source: [] for source in lines}
    for piece in pieces(rng, mixed(rng, queues)):
        for source, line in joiner.feed(piece):
            found[source].append(line)
    assert found == lines


def test_a_short_line_is_one_frame() -> None:
    assert list(split("n7:0", "hello")) == [b"n7:0 . hello\n"]
    assert list(split("n7:0", "")) == [b"n7:0 . \n"]


@pytest.mark.parametrize("more", [0, 1])
def test_where_a_line_begins_to_take_two(more: int) -> None:
    source = "n7:0"
    room = LONGEST - len(source) - len(" . \n")
    frames = list(split(source, "x" * (room + more)))
    assert len(frames) == 1 + more
    assert len(frames[0]) == LONGEST


def test_a_long_name_leaves_room() -> None:
    source = "n" * 255 + ":12345"
    assert all(len(frame) <= LONGEST for frame in split(source, "\u20ac" * 5000))


@pytest.mark.parametrize(
    "line",
    [
        "slurmstepd: error: *** STEP 7.4 ON node01 CANCELLED ***",
        "Traceback (most recent call last):",
        "",
        "word",
        "two words",
        " . starts with a blank",
    ],
)
def test_what_is_no_frame_has_no_source(line: str) -> None:
    assert list(Joiner().feed(line.encode() + b"\n")) == [("", line)]


def test_a_foreign_line_between_two_pieces_does_not_part_them() -> None:
    first, *rest = split("n7:0", "x" * 2000)
    joined = Joiner().feed(b"".join([first, b"srun: warning: odd\n", *rest]))
    assert list(joined) == [("", "srun: warning: odd"), ("n7:0", "x" * 2000)]


def test_what_has_no_end_yet_is_kept_back() -> None:
    joiner = Joiner()
    (frame,) = split("n7:0", "hello")
    assert list(joiner.feed(frame[:-1])) == []
    assert list(joiner.feed(b"\n")) == [("n7:0", "hello")]
    assert list(joiner.feed(b"")) == []
