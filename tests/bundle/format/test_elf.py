"""What is laid out of a shared library."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import io
import struct
import sys
import zipfile
from pathlib import Path

import pytest
import zstandard

from bundle.format.zstd import load_decompressor, mapped
from stager.core.values import Wheel

LIBRARY = Path(zstandard.backend_c.__file__) if hasattr(zstandard, "backend_c") else None
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
    short = mapped(io.BytesIO(whole))
    assert len(short) == 4596
    assert short[:0x28] == whole[:0x28]
    assert short[0x28:0x30] == bytes(8)  # there are no section headers any more
    assert short[0x30:0x3A] == whole[0x30:0x3A]
    assert short[0x3A:HEADER] == bytes(6)
    assert short[HEADER:] == whole[HEADER:4596]


def test_the_tail_is_not_even_read() -> None:
    whole = io.BytesIO(library((0, 2000), tail=bytes(1 << 20)))
    mapped(whole)
    assert whole.tell() == 2000


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
    assert mapped(io.BytesIO(strange)) == strange


def test_a_library_that_is_cut_short_gains_nothing() -> None:
    whole = library((0, 5000), tail=b"")[:3000]
    assert len(mapped(io.BytesIO(whole))) == 3000


@pytest.mark.skipif(LIBRARY is None, reason="zstandard has another backend here")
def test_python_loads_what_is_left_of_a_real_one(tmp_path: Path) -> None:
    assert LIBRARY is not None
    target = tmp_path / LIBRARY.name
    with LIBRARY.open("rb") as file:
        target.write_bytes(mapped(file))
    assert target.stat().st_size <= LIBRARY.stat().st_size
    loader = importlib.machinery.ExtensionFileLoader("zstandard.backend_c", str(target))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    packed = zstandard.ZstdCompressor().compress(b"a" * 10_000)
    assert module.ZstdDecompressor().decompress(packed) == b"a" * 10_000


def test_little_of_the_decompressor_is_written(tmp_path: Path, zstd_wheel: Wheel | None) -> None:
    if zstd_wheel is None:
        pytest.skip("this Python has zstd of its own")
    before = {name: sys.modules.pop(name) for name in [*sys.modules] if "zstandard" in name}
    try:
        decompress = load_decompressor(
            zstd_wheel.path.name, zstd_wheel.path.read_bytes(), str(tmp_path)
        )
        assert decompress(zstandard.ZstdCompressor().compress(b"abc" * 500), 1500) == b"abc" * 500
        loaded = sys.modules["zstandard"]
        assert str(loaded.__file__).startswith(str(tmp_path))
    finally:
        for name in [name for name in sys.modules if "zstandard" in name]:
            del sys.modules[name]
        sys.modules.update(before)
    written = sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file())
    with zipfile.ZipFile(zstd_wheel.path) as wheel:
        assert written < sum(info.file_size for info in wheel.infolist()) / 10
