"""What a program or shared library says to the dynamic loader (elf(5))."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from pathlib import Path

_64_BIT_LITTLE_ENDIAN = b"\x7fELF\x02\x01"
_HEADER = struct.Struct("<32xQ14xHH6x")
"""Where the program headers begin, the size of one, and their number."""
_SEGMENT = struct.Struct("<I4xQQ8xQ16x")
"""Type, offset, address and size in the file."""
_DYNAMIC = struct.Struct("<qQ")
_LOAD, _TABLE, _LOADER = 1, 2, 3
"""``PT_LOAD``, ``PT_DYNAMIC``, ``PT_INTERP``."""
_NEEDED, _STRINGS, _STRINGS_SIZE, _RPATH, _RUNPATH = 1, 5, 10, 15, 29
"""``DT_NEEDED``, ``DT_STRTAB``, ``DT_STRSZ``, ``DT_RPATH``, ``DT_RUNPATH``."""
_GLIBC = re.compile(rb"\0GLIBC_(\d+)\.(\d+)")


@dataclass(frozen=True, kw_only=True)
class Elf:
    """The part of a program or shared library that the dynamic loader follows."""

    loader: str
    """The dynamic loader that it asks for; empty for a library, or a static program."""
    needed: tuple[str, ...]
    """Names of the shared libraries that it needs."""
    run_path: str
    """Directories where they are looked for first, with colons between; empty for none."""
    run_path_at: int
    """Where that stands in the file."""
    glibc: tuple[int, int]
    """The oldest glibc that has all that it needs; (0, 0) for any."""


def read(path: Path) -> Elf | None:
    """Read a file; None if it is no program or shared library for 64 bits, little-endian.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        data = file.read(len(_64_BIT_LITTLE_ENDIAN))
        if data != _64_BIT_LITTLE_ENDIAN:
            return None
        data += file.read()
    try:
        return _parsed(data)
    except (struct.error, ValueError):  # cut short, or it contradicts itself
        return None


def _parsed(data: bytes) -> Elf:
    segments = list(_segments(data))
    loader = next((_bytes(data, segment) for segment in segments if segment.kind == _LOADER), b"")
    entries: list[tuple[int, int]] = []
    for segment in segments:
        if segment.kind == _TABLE:
            table = _bytes(data, segment)
            entries += _DYNAMIC.iter_unpack(table[: len(table) // _DYNAMIC.size * _DYNAMIC.size])
    single = dict(entries)
    strings = _offset(segments, single[_STRINGS]) if _STRINGS in single else 0
    run_path = single.get(_RUNPATH, single.get(_RPATH))
    text = data[strings : strings + single.get(_STRINGS_SIZE, 0)]
    versions = [(int(major), int(minor)) for major, minor in _GLIBC.findall(text)]
    return Elf(
        loader=loader.rstrip(b"\0").decode(errors="replace"),
        needed=tuple(_text(text, at) for tag, at in entries if tag == _NEEDED),
        run_path="" if run_path is None else _text(text, run_path),
        run_path_at=strings + (run_path or 0),
        glibc=max(versions, default=(0, 0)),
    )


@dataclass(frozen=True, kw_only=True)
class _Segment:
    """A program header."""

    kind: int
    offset: int
    address: int
    size: int


def _segments(data: bytes) -> list[_Segment]:
    start, size, count = _HEADER.unpack_from(data)
    found = []
    for number in range(count):
        kind, offset, address, length = _SEGMENT.unpack_from(data, start + number * size)
        found.append(_Segment(kind=kind, offset=offset, address=address, size=length))
    return found


def _bytes(data: bytes, segment: _Segment) -> bytes:
    return data[segment.offset : segment.offset + segment.size]


def _offset(segments: list[_Segment], address: int) -> int:
    """Return where in the file an address lies.

    Raises:
        ValueError: nowhere.
    """
    for segment in segments:
        if segment.kind == _LOAD and 0 <= address - segment.address < segment.size:
            return segment.offset + address - segment.address
    raise ValueError(address)


def _text(strings: bytes, at: int) -> str:
    return strings[at : strings.index(b"\0", at)].decode(errors="surrogateescape")
