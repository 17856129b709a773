"""Shared libraries of a few hundred bytes, which the dynamic loader takes as it takes any other."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

X86_64, AARCH64 = 62, 183
HOST = {"x86_64": X86_64, "aarch64": AARCH64}
"""Numbers of processors in ELF headers, by the names that ``uname -m`` prints."""
_HEADER, _SEGMENT = 64, 56
_LOAD, _DYNAMIC = 1, 2
_WEAK = 2


@dataclass(frozen=True, kw_only=True)
class SharedObject:
    versions: Mapping[str, Sequence[str]]
    """The versions of symbols that it needs, by library: ``{"libc.so.6": ["GLIBC_2.17"]}``."""
    weak: bool = False  # True for versions that it can do without
    needed: Sequence[str] = ()  # further libraries that it needs
    machine: int = X86_64

    def data(self) -> bytes:
        strings = _Strings()
        needed = [strings.at(name) for name in (*self.versions, *self.needed)]
        needs = self._needs(strings)
        start = _HEADER + 2 * _SEGMENT
        symbols, hashes = bytes(24), struct.pack("<4I", 1, 1, 0, 0)
        places, body = {}, b""
        parts = {"symbols": symbols, "hash": hashes, "versions": needs, "strings": strings.data}
        parts["symbol versions"] = bytes(2)
        for name, part in parts.items():
            body += bytes(-len(body) % 8)
            places[name] = start + len(body)
            body += part
        body += bytes(-len(body) % 8)
        entries = [(1, place) for place in needed]
        entries += [(4, places["hash"]), (5, places["strings"]), (6, places["symbols"])]
        entries += [(10, len(strings.data)), (11, 24)]
        if needs:
            entries += [(0x6FFFFFFE, places["versions"]), (0x6FFFFFFF, len(self.versions))]
            entries.append((0x6FFFFFF0, places["symbol versions"]))
        table = b"".join(struct.pack("<qQ", *entry) for entry in [*entries, (0, 0)])
        at, size = start + len(body), start + len(body) + len(table)
        identity = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
        numbers = (3, self.machine, 1, 0, _HEADER, 0, 0, _HEADER, _SEGMENT, 2, 0, 0, 0)
        header = identity + struct.pack("<HHIQQQIHHHHHH", *numbers)
        segments = _segment(_LOAD, 0, size) + _segment(_DYNAMIC, at, len(table))
        return header + segments + body + table

    def _needs(self, strings: _Strings) -> bytes:
        blocks = []
        for library, versions in self.versions.items():
            entries = []
            for number, version in enumerate(versions):
                flags = _WEAK if self.weak else 0
                step = 16 if number < len(versions) - 1 else 0
                entry = (_elf_hash(version), flags, number + 2, strings.at(version), step)
                entries.append(struct.pack("<IHHII", *entry))
            blocks.append((library, b"".join(entries), len(versions)))
        data = b""
        for number, (library, entries_of, count) in enumerate(blocks):
            following = 16 + len(entries_of) if number < len(blocks) - 1 else 0
            data += struct.pack("<HHIII", 1, count, strings.at(library), 16, following)
            data += entries_of
        return data


class _Strings:
    def __init__(self) -> None:
        self.data = b"\0"

    def at(self, text: str) -> int:
        place = len(self.data)
        self.data += text.encode() + b"\0"
        return place


def glibc(*versions: str, weak: bool = False, machine: int = X86_64) -> bytes:
    """A library that needs these versions of glibc, such as ``2.17``."""
    names = [f"GLIBC_{version}" for version in versions]
    return SharedObject(versions={"libc.so.6": names}, weak=weak, machine=machine).data()


def _segment(kind: int, offset: int, size: int) -> bytes:
    return struct.pack("<IIQQQQQQ", kind, 6, offset, offset, offset, size, size, 0x1000)


def _elf_hash(name: str) -> int:
    """Return the hash of a version's name, as the System V ABI defines it."""
    value = 0
    for char in name.encode():
        value = (value << 4) + char
        high = value & 0xF0000000
        value = (value ^ (high >> 24)) & ~high
    return value
