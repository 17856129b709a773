"""The zstd library of a bundle's wheel under any Python, and what of it is laid out."""

from __future__ import annotations

import io
import struct
import subprocess
import zipfile
from pathlib import Path

import pytest
import zstandard

from bundle.format.layer import LayerError
from bundle.format.zstd import load_decompressor, strip_unmapped_tail
from bundle.protocol.problem import NodeError, ProblemCode
from stager.core.values import Wheel
from tests.support.interpreters import OTHERS

CONTENT = b"a layer's content, " * 5000
REPO = Path(__file__).resolve().parents[3]
ELSEWHERE = """\
import sys
sys.path.insert(0, sys.argv[1])
from bundle.format.zstd import load_decompressor
decompress = load_decompressor(sys.argv[3], open(sys.argv[2], "rb").read(), sys.argv[4])
sys.stdout.buffer.write(decompress(sys.stdin.buffer.read(), int(sys.argv[5])))
"""


@pytest.fixture
def wheel(zstd_wheel: Wheel | None) -> Wheel:
    """The decompressor for the Python that runs the tests."""
    if zstd_wheel is None:
        pytest.skip("this Python has zstd of its own")
    return zstd_wheel


def test_frames_are_decompressed(wheel: Wheel, tmp_path: Path) -> None:
    decompress = load_decompressor(wheel.path.name, wheel.path.read_bytes(), str(tmp_path))
    compress = zstandard.ZstdCompressor().compress
    for content in (CONTENT, b""):
        assert decompress(compress(content), len(content)) == content
        assert decompress(compress(content), -1) == content
    written = sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file())
    with zipfile.ZipFile(wheel.path) as whole:
        assert written < sum(info.file_size for info in whole.infolist()) / 10


def test_what_is_no_whole_frame_is_refused(wheel: Wheel, tmp_path: Path) -> None:
    decompress = load_decompressor(wheel.path.name, wheel.path.read_bytes(), str(tmp_path))
    frame = zstandard.ZstdCompressor(write_checksum=True).compress(CONTENT)
    changed = bytearray(frame)
    changed[-1] ^= 1
    for damaged in (frame[:-1], frame + b"x", frame + frame, bytes(changed), b"", b"x" * 40):
        with pytest.raises(LayerError, match="frame"):
            decompress(damaged, len(CONTENT))
    with pytest.raises(LayerError, match="claims to hold"):
        decompress(frame, len(CONTENT) - 1)
    unsized = io.BytesIO()
    with zstandard.ZstdCompressor().stream_writer(unsized, closefd=False) as writer:
        writer.write(CONTENT)
    with pytest.raises(LayerError, match="claims to hold None"):
        decompress(unsized.getvalue(), -1)


@pytest.mark.parametrize("data", [b"no wheel", b""])
def test_a_wheel_without_the_library_does_not_load(
    data: bytes, wheel: Wheel, tmp_path: Path
) -> None:
    with pytest.raises(NodeError) as caught:
        load_decompressor(wheel.path.name, data, str(tmp_path))
    assert caught.value.problem.code is ProblemCode.DECOMPRESSOR_UNUSABLE


@pytest.mark.parametrize("python", OTHERS)
def test_each_python_loads_the_wheel_for_this_one(
    python: str, wheel: Wheel, tmp_path: Path
) -> None:
    argv = [python, "-I", "-S", "-c", ELSEWHERE, str(REPO), str(wheel.path), wheel.path.name]
    frame = zstandard.ZstdCompressor().compress(CONTENT)
    done = subprocess.run(
        [*argv, str(tmp_path), str(len(CONTENT))], input=frame, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout == CONTENT


HEADER = 64


def library(*segments: tuple[int, int], tail: bytes = b"debug") -> bytes:
    """A file with these segments (offset, length), something in them, and something behind them."""
    header = bytearray(HEADER)
    header[:6] = b"\x7fELF\x02\x01"
    end = max([HEADER + 56 * len(segments), *(offset + size for offset, size in segments)])
    struct.pack_into("<QQ", header, 0x20, HEADER, end)
    struct.pack_into("<HHHHHH", header, 0x34, HEADER, 56, len(segments), 64, 30, 29)
    table = b"".join(struct.pack("<II6Q", 1, 5, at, at, at, size, size, 1) for at, size in segments)
    return (bytes(header) + table).ljust(end, b"x") + tail


def test_what_is_behind_the_last_segment_is_left_out() -> None:
    whole = library((0, 100), (4096, 500), (300, 10), tail=b"y" * 9999)
    file = io.BytesIO(whole)
    short = strip_unmapped_tail(file)
    assert file.tell() == 4596  # the tail is not even read
    assert len(short) == 4596
    assert short[:0x28] == whole[:0x28]
    assert short[0x28:0x30] == bytes(8)  # there are no section headers any more
    assert short[0x30:0x3A] == whole[0x30:0x3A]
    assert short[0x3A:HEADER] == bytes(6)
    assert short[HEADER:] == whole[HEADER:4596]


@pytest.mark.parametrize(
    "strange",
    [
        b"",
        b"\x7fELF\x02\x01",
        b"#!/bin/sh\n" * 100,
        b"\x7fELF\x01\x01" + bytes(500),  # 32 bits
        b"\x7fELF\x02\x02" + bytes(500),  # big-endian
        library((0, 100))[:0x20] + struct.pack("<Q", 128) + library((0, 100))[0x28:],
        library((0, 100))[:100],  # ends in the table of segments
    ],
)
def test_what_is_of_another_shape_stays_as_it_is(strange: bytes) -> None:
    assert strip_unmapped_tail(io.BytesIO(strange)) == strange
