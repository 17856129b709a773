"""The archive: members in order, no owners, no times, written beside its place and renamed."""

from __future__ import annotations

import contextlib
import gzip
import os
import tarfile
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import IO

from bundle.protocol.enumerations import LogMode
from bundle.system import permissions

from ..core.files import output_file

_LEVEL = 6


class ArchiveWriter:
    """An archive whose members wait in a temporary file until all are known."""

    def __init__(self) -> None:
        self._file: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the object
        self.members: dict[str, tuple[int, int]] = {}

    def __enter__(self) -> ArchiveWriter:
        return self

    def __exit__(self, *exc: object) -> None:
        with contextlib.suppress(OSError):  # what could not be written is not needed any more
            self._file.close()

    def add(self, name: str, pieces: Iterable[bytes]) -> int:
        """Add a member, and return its size in bytes."""
        start = self._file.seek(0, os.SEEK_END)
        for piece in pieces:
            self._file.write(piece)
        size = self._file.tell() - start
        self.members[name] = start, size
        return size

    def clear(self) -> None:
        """Forget all members."""
        self._file.seek(0)
        self._file.truncate()
        self.members.clear()

    def write(self, target: Path, top: str) -> int:
        """Write the archive, and return its size in bytes.

        Raises:
            StagerError: it cannot be written.
        """
        with output_file(target, permissions.opener(LogMode.PRIVATE)) as out:
            packed = gzip.GzipFile(
                filename="", mode="wb", compresslevel=_LEVEL, fileobj=out, mtime=0
            )
            with (
                packed,
                tarfile.open(fileobj=packed, mode="w", format=tarfile.GNU_FORMAT) as archive,
            ):
                for name in sorted(self.members):
                    start, size = self.members[name]
                    self._file.seek(start)
                    member = tarfile.TarInfo(f"{top}/{name}")
                    member.size, member.mode, member.mtime = size, 0o644, 0
                    archive.addfile(member, self._file)
            out.flush()
            return out.tell()
