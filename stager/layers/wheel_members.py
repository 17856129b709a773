"""Checks of the members of a wheel's archive, made before any of them is read."""

from __future__ import annotations

import hashlib
import lzma
import stat
import struct
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from bundle.format.layer import LayerError, check_path
from bundle.protocol.dataclass import dataclass

from ..core.errors import WheelError

MOST_FAULTS = 50  # number of members of one wheel that a message names
DAMAGED = (  # exceptions of ``zipfile`` for an archive whose bytes make no sense
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    struct.error,
    EOFError,
    NotImplementedError,  # a compression method or zip version that nobody writes
)
UNREADABLE = (*DAMAGED, OSError, RuntimeError, ValueError, KeyError)
METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # of others, ``zipfile`` unpacks all


def read_beginning(archive: zipfile.ZipFile, name: str, limit: int) -> bytes:
    """Return the first bytes of a member, and unpack no more; ValueError or ``UNREADABLE``."""
    if archive.getinfo(name).compress_type not in METHODS:
        raise ValueError(f"{name} is neither stored nor deflated")
    with archive.open(name) as member:
        return member.read(limit)


def refuse_members(wheel: Path, archive: zipfile.ZipFile, data_dir: str) -> None:
    """Look at every member before any is read, and report all faults at once."""
    names = Counter(member.filename for member in archive.infolist())
    faults = [f"{name} occurs twice" for name, count in names.items() if count > 1]
    for member in archive.infolist():
        faults += [*_list_name_faults(member, data_dir), *_list_kind_faults(member)]
    if faults:
        left = len(faults) - MOST_FAULTS
        faults[MOST_FAULTS:] = [f"and {left} more"] if left > 0 else []
        raise WheelError(
            "the archive has members that no wheel may have",
            hint=f"do not use this file; remove {wheel}",
            context=faults,
        )


def _list_name_faults(member: zipfile.ZipInfo, data_dir: str) -> Iterator[str]:
    name = member.filename
    try:
        check_path(name.rstrip("/") if member.is_dir() else name)
    except LayerError as exc:
        yield str(exc)
    # A file of the first name would make installer 1.1 loop forever, one of the second fail.
    is_scheme = name == data_dir or (name.startswith(f"{data_dir}/") and name.count("/") == 1)
    if is_scheme and not member.is_dir():
        yield f"{name} is a file, where a directory is expected"
    if "\\" in name:
        yield f"backslash in {name!r}"


def _list_kind_faults(member: zipfile.ZipInfo) -> Iterator[str]:
    name = member.filename
    kind = stat.S_IFMT(member.external_attr >> 16)
    if kind == stat.S_IFLNK:
        yield f"{name} is a symbolic link"
    elif kind not in (0, stat.S_IFREG, stat.S_IFDIR):
        yield f"{name} is a device or special file"
    if member.flag_bits & 0x1:
        yield f"{name} is encrypted"


# --- A large member of a wheel, which is read when its layer is written and not before -----------

# RECORD has its size and digest, so no copy is needed in between. ``zipfile`` takes half as long
# again as zlib by itself.

LARGE = 1 << 20  # bytes from which a member is large
DENSE = 0.5
"""The share of its size that a deflated member keeps if little is to be gained from it. NVIDIA's
libraries for many kinds of GPU keep 0.54 and more, others 0.45 and less."""
_PIECE = 256 << 10  # packed bytes read at a time
_HEADER = struct.Struct("<26x2H")
"""The header before a member's bytes (APPNOTE.TXT 4.3.7): the lengths of its name and its extra
field. ``zipfile`` has compared the name with the directory's."""


class ChangedMemberError(ValueError):
    """The member does not have the digest that was promised."""


@dataclass(frozen=True, kw_only=True)
class LargeMember:
    """A member that is read later."""

    wheel: Path
    member: zipfile.ZipInfo  # packed by one of ``METHODS``
    size: int
    sha256: bytes

    @property
    def dense(self) -> bool:
        """True for content that is mostly compressed in itself."""
        is_packed = self.member.compress_type == zipfile.ZIP_DEFLATED
        return is_packed and self.member.compress_size > DENSE * self.size

    def chunks(self, length: int) -> Iterator[bytes | bytearray]:
        """Yield the content in pieces; at its end, ChangedMemberError if it is another."""
        state, left = hashlib.sha256(), self.size
        with self.wheel.open("rb") as file:
            file.seek(self.member.header_offset)
            file.seek(sum(_HEADER.unpack(file.read(_HEADER.size))), 1)
            is_packed = self.member.compress_type == zipfile.ZIP_DEFLATED
            read = _inflate if is_packed else _read_stored
            for chunk in read(file, self.member.compress_size, length):
                left -= len(chunk)
                if left < 0:
                    break
                state.update(chunk)
                yield chunk
        if left or state.digest() != self.sha256:
            raise ChangedMemberError


def _read_stored(file: BinaryIO, size: int, length: int) -> Iterator[bytes]:
    while size:
        chunk = file.read(min(size, length))
        if not chunk:
            raise EOFError("the archive ends within a member")
        size -= len(chunk)
        yield chunk


def _inflate(file: BinaryIO, size: int, length: int) -> Iterator[bytearray]:
    inflate = zlib.decompressobj(-zlib.MAX_WBITS)
    chunk = bytearray()
    while not inflate.eof:
        packed = inflate.unconsumed_tail
        if not packed:
            packed = file.read(min(size, _PIECE))
            size -= len(packed)
        made = inflate.decompress(packed, length - len(chunk))
        if not (made or packed):
            raise EOFError("the archive ends within a member")
        chunk += made
        if len(chunk) == length:
            yield chunk
            chunk = bytearray()
    if chunk:
        yield chunk
