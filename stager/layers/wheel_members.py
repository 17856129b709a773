"""The members of a wheel's archive, looked at before any of them is believed."""

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
"""How many members of one wheel a message names."""
DAMAGED = (
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    struct.error,
    EOFError,
    NotImplementedError,  # a compression method or zip version that nobody writes
)
"""What ``zipfile`` raises for an archive whose bytes make no sense."""


def refuse_members(wheel: Path, archive: zipfile.ZipFile, data_dir: str) -> None:
    """Look at every member before any is read, and report all that are wrong at once.

    Args:
        wheel: the file, for the message.
        archive: the same, open.
        data_dir: the directory in it whose members go elsewhere.

    Raises:
        WheelError: there are members that no wheel may have.
    """
    faults, seen = [], set()
    for member in archive.infolist():
        name = member.filename.rstrip("/") if member.is_dir() else member.filename
        kind = stat.S_IFMT(member.external_attr >> 16)
        try:
            check_path(name)
        except LayerError as exc:
            faults.append(str(exc))
        # On the first of these installer 1.1 would loop for ever, on the other it would fail.
        if name == data_dir or (name.startswith(f"{data_dir}/") and name.count("/") == 1):
            faults += [] if member.is_dir() else [f"{name} is a file, where a directory belongs"]
        if "\\" in member.filename:
            faults.append(f"backslash in {member.filename!r}")
        if member.filename in seen:
            faults.append(f"{member.filename} is there twice")
        seen.add(member.filename)
        if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
            what = "symbolic link" if kind == stat.S_IFLNK else "device or special file"
            faults.append(f"{member.filename} is a {what}")
        if member.flag_bits & 0x1:
            faults.append(f"{member.filename} is encrypted")
    if faults[MOST_FAULTS:]:
        faults[MOST_FAULTS:] = [f"and {len(faults) - MOST_FAULTS} more"]
    if faults:
        raise WheelError(
            "the archive has members that no wheel may have",
            hint=f"do not use this file; remove {wheel}",
            context=faults,
        )
