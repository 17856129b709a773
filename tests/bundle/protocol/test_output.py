"""Output of ranks on the wire: every byte, whatever it is, and few where they repeat."""

from __future__ import annotations

import json
import os
import zlib
from base64 import b64encode

import pytest

from bundle.protocol import messages
from bundle.protocol.events import RankOutput, read_agent_line

REPEATED = b"".join(b"rank 3 step %d: loss is 0.25\n" % step for step in range(3000))


@pytest.mark.parametrize(
    ("data", "key"),
    [
        (b"one line\n", "text"),
        (b"\xff\xfe\n", "base64"),
        (REPEATED, "zlib"),
        (REPEATED + b"\xff", "zlib"),
        (os.urandom(100_000), "base64"),
    ],
)
def test_every_byte_comes_back(data: bytes, key: str) -> None:
    line = messages.output_line("n1", 3, data)
    assert key in json.loads(line)
    assert b"\n" not in line
    assert b"\x1e" not in line  # it begins a frame
    assert read_agent_line(line, "n1", "launch") == RankOutput("n1", 3, data, of_ranks=True)


def test_what_repeats_is_short() -> None:
    assert len(messages.output_line("n1", 3, REPEATED)) < len(REPEATED) / 3


@pytest.mark.parametrize(
    "packed",
    [
        b"no zlib",
        zlib.compress(REPEATED)[:-30],
        zlib.compress(b"x" * 20_000_000),  # no agent sends as much: the driver's memory is bounded
    ],
)
def test_what_cannot_be_decompressed_is_kept_as_it_came(packed: bytes) -> None:
    event = {"v": 1, "event": "output", "rank": 3, "zlib": b64encode(packed).decode()}
    line = json.dumps(event).encode()
    assert read_agent_line(line, "n1", "launch") == RankOutput("n1", data=line + b"\n")
