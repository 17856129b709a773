"""The instructions of a program or shared library to the dynamic loader (elf(5))."""

from __future__ import annotations

import os
import re
import struct
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import islice, takewhile
from pathlib import Path
from typing import NamedTuple

Read = Callable[[int, int], bytes]  # returns so many bytes from a place in a file, fewer at its end

_64_BIT_LITTLE_ENDIAN = b"\x7fELF\x02\x01"
_HEADER = struct.Struct("<18xH12xQ14xHH6x")  # processor; program headers' place, size and number
_SEGMENT = struct.Struct("<I4xQQ8xQ16x")  # type, offset, address and size in the file
_DYNAMIC = struct.Struct("<qQ")
_LOAD, _TABLE, _LOADER = 1, 2, 3  # ``PT_LOAD``, ``PT_DYNAMIC``, ``PT_INTERP``
_END, _NEEDED, _STRINGS, _RPATH, _RUNPATH = 0, 1, 5, 15, 29
"""``DT_NULL``, ``DT_NEEDED``, ``DT_STRTAB``, ``DT_RPATH``, ``DT_RUNPATH``."""
_VERSIONS, _VERSION_FILES = 0x6FFFFFFE, 0x6FFFFFFF  # ``DT_VERNEED``, ``DT_VERNEEDNUM``
_VERSION_FILE = struct.Struct("<2xH4xII")  # ``Elf64_Verneed``: number, way to the first, and next
_VERSION = struct.Struct("<4xH2xII")  # ``Elf64_Vernaux``: flags, place of the name, way to the next
_WEAK = 2  # ``VER_FLG_WEAK``: the loader only warns where the library lacks this version
_GLIBC = re.compile(r"GLIBC_(\d{1,4})\.(\d{1,4})(?:\.\d+)?")
_MARKS = {"GLIBC_ABI_DT_RELR": (2, 36)}  # keeps a file away from a loader too old for it
_TEXT = 4096  # the longest text that is read; longer names are not those of files
_FEW = 512  # bytes of strings read at a time
_MOST = 4096  # the largest number of headers, of libraries and of versions that is believed

MACHINES = {62: "x86_64", 183: "aarch64", 243: "riscv64", 21: "ppc64le", 22: "s390x"}


class Elf(NamedTuple):
    """The part of a program or shared library that the dynamic loader follows."""

    machine: str  # the processor it is for; empty for another than those of :data:`MACHINES`
    loader: str  # the dynamic loader that it asks for; empty for a library, or a static program
    needed: tuple[str, ...]
    run_path: str  # directories where they are looked for first, with colons between
    run_path_at: int
    glibc: tuple[int, int]  # the oldest glibc that has all that it needs; (0, 0) for any


def read_elf(path: Path) -> Elf | None:
    """Read a file; None if it is no program or library for 64 bits, little-endian; OSError."""
    with path.open("rb") as file:
        return parse(lambda at, size: os.pread(file.fileno(), size, at))


def parse(read: Read) -> Elf | None:
    """Read what the dynamic loader reads, and no more; None as for :func:`read`."""
    if read(0, len(_64_BIT_LITTLE_ENDIAN)) != _64_BIT_LITTLE_ENDIAN:
        return None
    try:
        return _File(read).read_header()
    except (struct.error, ValueError, OverflowError):  # cut short, or it contradicts itself
        return None


class _File:
    def __init__(self, read: Read) -> None:
        self._read = read
        machine, start, size, count = _HEADER.unpack(read(0, _HEADER.size))
        table = read(start, size * min(count, _MOST))
        self._machine = MACHINES.get(machine, "")
        self._segments: list[tuple[int, int, int, int]] = [
            _SEGMENT.unpack_from(table, number * size) for number in range(count)
        ]
        self._dynamic: dict[int, list[int]] = defaultdict(list)
        for table in self._read_segments(_TABLE):
            whole = table[: len(table) // _DYNAMIC.size * _DYNAMIC.size]
            for tag, value in takewhile(lambda one: one[0] != _END, _DYNAMIC.iter_unpack(whole)):
                self._dynamic[tag].append(value)
        strings = self._dynamic[_STRINGS]
        self._strings = self._find_offset(strings[-1]) if strings else 0

    def read_header(self) -> Elf:
        entries = islice(self._read_versions(), _MOST)
        versions = [self._read_text(name) for flags, name in entries if not flags & _WEAK]
        run_path = (self._dynamic[_RUNPATH] or self._dynamic[_RPATH])[-1:]
        loader = next(self._read_segments(_LOADER), b"")
        return Elf(
            machine=self._machine,
            loader=loader.rstrip(b"\0").decode(errors="replace"),
            needed=tuple(map(self._read_text, self._dynamic[_NEEDED])),
            run_path="".join(map(self._read_text, run_path)),
            run_path_at=self._strings + sum(run_path),
            glibc=max(map(_parse_glibc, versions), default=(0, 0)),
        )

    def _read_segments(self, kind: int) -> Iterator[bytes]:
        for found, offset, _, size in self._segments:
            if found == kind:
                yield self._read(offset, min(size, _TEXT * _DYNAMIC.size))

    def _read_versions(self) -> Iterator[tuple[int, int]]:
        if not self._dynamic[_VERSIONS]:
            return
        place = self._find_offset(self._dynamic[_VERSIONS][-1])
        for _ in range(min(_MOST, sum(self._dynamic[_VERSION_FILES][-1:]))):
            count, first, following = _VERSION_FILE.unpack(self._read(place, _VERSION_FILE.size))
            version = place + first
            for _ in range(count):
                flags, name, step = _VERSION.unpack(self._read(version, _VERSION.size))
                yield flags, name
                version += step
            place += following

    def _find_offset(self, address: int) -> int:
        for kind, offset, begin, size in self._segments:
            if kind == _LOAD and 0 <= address - begin < size:
                return offset + address - begin
        raise ValueError(address)

    def _read_text(self, at: int) -> str:
        data, place = b"", self._strings + at
        while b"\0" not in data and len(data) < _TEXT:
            more = self._read(place + len(data), _FEW)
            if not more:
                break
            data += more
        return os.fsdecode(data[: data.index(b"\0")])


def _parse_glibc(version: str) -> tuple[int, int]:
    match = _GLIBC.fullmatch(version)
    return (int(match[1]), int(match[2])) if match else _MARKS.get(version, (0, 0))
