"""The files of a job: only regular ones, inside their directory, and of long ones both ends."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ..core.errors import StagerError
from ..redaction.redactor import HELD, Kept, Redactor

_CHUNK = 1 << 20
_ALIGN = 1 << 16
"""Bytes within which the end of a line is looked for, where a file is cut."""


class UnfitError(StagerError):
    """A file that cannot go into the archive; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Cut:
    """The part that is left out of the middle of a file."""

    start: int
    """The first byte that is left out."""
    end: int
    """The first byte after them."""
    first: int
    """The number of the first line of which something is left out."""
    last: int
    """The number of the last such line."""

    def notice(self) -> str:
        """Return the line that stands in its place."""
        lines = f"lines {self.first} to {self.last}"
        if self.first == self.last:
            lines = f"line {self.first}"
        return f"[stager support: {self.end - self.start} bytes left out here, {lines}]"


def opened(path: Path, folder: Path) -> BinaryIO:
    """Open a regular file below a directory; a link is followed if it does not lead out of it.

    Raises:
        UnfitError: it is not a regular file, leads out of the directory, or cannot be read.
    """
    try:
        real = path.resolve(strict=True)
        if not real.is_relative_to(folder.resolve()):
            raise UnfitError(f"{path.name}: a link that points outside {folder}")
        # A pipe would block, a device may do anything: neither is opened to be read.
        handle = os.open(real, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as exc:
        raise UnfitError(f"{path.name}: {exc.strerror or exc}") from exc
    except RuntimeError as exc:  # links in a circle, before Python 3.13
        raise UnfitError(f"{path.name}: a broken link") from exc
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise UnfitError(f"{path.name}: not a regular file")
    return os.fdopen(handle, "rb")


def whole(path: Path, folder: Path, limit: int) -> bytes:
    """Return the content of a small file.

    Raises:
        UnfitError: see :func:`opened`, or it is larger than ``limit`` bytes.
    """
    with opened(path, folder) as handle:
        data = handle.read(limit + 1)
    if len(data) > limit:
        raise UnfitError(f"{path.name}: it has more than {limit} bytes")
    return data


def size_of(path: Path, folder: Path) -> int:
    """Return the size of a file in bytes.

    Raises:
        UnfitError: see :func:`opened`.
    """
    with opened(path, folder) as handle:
        return os.fstat(handle.fileno()).st_size


def cut(handle: BinaryIO, size: int, limit: int) -> Cut | None:
    """Return the middle of a file to leave out; None for one that is short enough.

    The file is cut between lines, unless lines are very long.
    """
    if size <= limit:
        return None
    start, end = limit // 2, size - (limit - limit // 2)
    handle.seek(max(0, start - _ALIGN))
    above = handle.read(start - handle.tell())
    newline = above.rfind(b"\n")
    if newline >= 0:
        start -= len(above) - newline - 1
    handle.seek(end)
    newline = handle.read(min(_ALIGN, size - end)).find(b"\n")
    if newline >= 0:
        end += newline + 1
    before = sum(piece.count(b"\n") for piece in between(handle, 0, start))
    within, last = 0, b""
    for piece in between(handle, start, end):
        within += piece.count(b"\n")
        last = piece[-1:]
    return Cut(start=start, end=end, first=before + 1, last=before + within + (last != b"\n"))


def redacted(handle: BinaryIO, size: int, limit: int, redactor: Redactor) -> Iterator[bytes]:
    """Yield a file without secrets, and without its middle if it is long.

    The text around the cut is read, too, so that a secret which the cut divides is recognised.
    """
    gap = cut(handle, size, limit)
    if gap is None:
        yield from redactor.stream(between(handle, 0, size))
        return
    head = between(handle, 0, min(size, gap.start + HELD))
    last = b"\n"
    for piece in redactor.stream(head, Kept(end=gap.start)):
        yield piece
        last = piece[-1:] or last
    yield (b"" if last == b"\n" else b"\n") + gap.notice().encode() + b"\n"
    begin = max(0, gap.end - HELD)
    yield from redactor.stream(between(handle, begin, size), Kept(start=gap.end - begin))


def between(handle: BinaryIO, start: int, end: int) -> Iterator[bytes]:
    """Yield a part of a file in pieces; it ends early where the file does."""
    at = start
    while at < end:
        handle.seek(at)
        piece = handle.read(min(_CHUNK, end - at))
        if not piece:
            return
        yield piece
        at += len(piece)
