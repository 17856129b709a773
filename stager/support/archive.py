"""The archive: members in order, no owners, no times, written beside its place and renamed."""

from __future__ import annotations

import contextlib
import gzip
import os
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO

from ..core.errors import StagerError

_LEVEL = 6
_MODE = 0o600


class Shelf:
    """Where members wait until all are known: in one file without a name."""

    def __init__(self) -> None:
        """Open it."""
        self._file: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the object
        self.members: dict[str, tuple[int, int]] = {}

    def __enter__(self) -> Shelf:
        return self

    def __exit__(self, *exc: object) -> None:
        with contextlib.suppress(OSError):  # of what could not be written before, nothing is wanted
            self._file.close()

    def put(self, name: str, pieces: Iterable[bytes]) -> int:
        """Keep a member; how many bytes it has."""
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

    def sizes(self) -> Mapping[str, int]:
        """The bytes of each member, by name and in order."""
        return {name: self.members[name][1] for name in sorted(self.members)}

    def write(self, target: Path, top: str) -> int:
        """Write the archive; how many bytes it has.

        Args:
            target: its place; what is there is replaced once the new one is whole.
            top: the folder that all members are in.

        Raises:
            StagerError: it cannot be written.
        """
        try:
            with _publishing(target) as out:
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
            return target.stat().st_size
        except OSError as exc:
            raise StagerError(
                f"cannot write {target}: {exc.strerror or exc}",
                hint="name another place with --output",
            ) from exc


@contextlib.contextmanager
def _publishing(target: Path) -> Iterator[IO[bytes]]:
    """A new file beside a place, for nobody else to read; it gets there when all went well."""
    handle, name = tempfile.mkstemp(prefix=f".{target.name[:100]}-", dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as out:
            os.fchmod(handle, _MODE)
            yield out
            out.flush()
            os.fsync(handle)
        Path(name).replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        raise
