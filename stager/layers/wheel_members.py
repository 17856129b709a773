"""Checks of the members of a wheel's archive, made before any of them is read."""

from __future__ import annotations

import lzma
import stat
import struct
import zipfile
import zlib
from pathlib import Path

from bundle.format.layer import LayerError, check_path

from ..core.errors import WheelError

MOST_FAULTS = 50
"""Number of members of one wheel that a message names."""
DAMAGED = (
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    struct.error,
    EOFError,
    NotImplementedError,  # a compression method or zip version that nobody writes
)
"""Exceptions of ``zipfile`` for an archive whose bytes make no sense."""
UNREADABLE = (*DAMAGED, OSError, RuntimeError, ValueError, KeyError)
"""Exceptions of reading a wheel whose members or names are damaged, missing or encrypted."""
_BOUNDED = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
"""The compressions that wheels have; of others, ``zipfile`` unpacks all that it has read."""


def beginning_of(archive: zipfile.ZipFile, name: str, limit: int) -> bytes:
    """Return the first bytes of a member; no more is unpacked, whatever it claims to be.

    Raises:
        ValueError: it is compressed as wheels are not; or any other of ``UNREADABLE``.
    """
    if archive.getinfo(name).compress_type not in _BOUNDED:
        raise ValueError(f"{name} is neither stored nor deflated")
    with archive.open(name) as member:
        return member.read(limit)


def refuse_members(wheel: Path, archive: zipfile.ZipFile, data_dir: str) -> None:
    """Look at every member before any is read, and report all faults at once.

    Raises:
        WheelError: there are members that no wheel may have.
    """
    faults: list[str] = []
    seen = set()
    for member in archive.infolist():
        faults += _name_faults(member, data_dir)
        if member.filename in seen:
            faults.append(f"{member.filename} occurs twice")
        seen.add(member.filename)
        faults += _kind_faults(member)
    if len(faults) > MOST_FAULTS:
        faults[MOST_FAULTS:] = [f"and {len(faults) - MOST_FAULTS} more"]
    if faults:
        raise WheelError(
            "the archive has members that no wheel may have",
            hint=f"do not use this file; remove {wheel}",
            context=faults,
        )


def _name_faults(member: zipfile.ZipInfo, data_dir: str) -> list[str]:
    faults = []
    name = member.filename
    if member.is_dir():
        name = name.rstrip("/")
    try:
        check_path(name)
    except LayerError as exc:
        faults.append(str(exc))
    # A file of the first name would make installer 1.1 loop forever, one of the second fail.
    is_scheme = name == data_dir or (name.startswith(f"{data_dir}/") and name.count("/") == 1)
    if is_scheme and not member.is_dir():
        faults.append(f"{name} is a file, where a directory is expected")
    if "\\" in member.filename:
        faults.append(f"backslash in {member.filename!r}")
    return faults


def _kind_faults(member: zipfile.ZipInfo) -> list[str]:
    faults = []
    kind = stat.S_IFMT(member.external_attr >> 16)
    if kind == stat.S_IFLNK:
        faults.append(f"{member.filename} is a symbolic link")
    elif kind not in (0, stat.S_IFREG, stat.S_IFDIR):
        faults.append(f"{member.filename} is a device or special file")
    if member.flag_bits & 0x1:
        faults.append(f"{member.filename} is encrypted")
    return faults
