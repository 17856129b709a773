"""The stream in which the outputs of a job are sent from a node to the login side.

The stream, version 1, is made for a pipe (``srun``): one line of JSON, an uncompressed GNU tar, one
line of JSON. ``tail -n +2 | tar -t`` lists it by hand. The first line::

    {"results": 1, "roots": [path], "entries": n, "files": n, "bytes": n,
     "missing": [output], "left_out": {path: reason}}

``roots`` are the paths that the outputs stand for, none of them inside another; each member of the
tar is one of them or lies below one, directories before their content. ``entries`` (directories
and links too), ``files`` and ``bytes`` (of their content) are upper limits of what follows. The tar
holds directories, files and symbolic links, and the GNU long names, nothing else. The last line
says that the stream is complete, and which files changed while they were sent::

    {"end": 1, "sha256": hex digest of the tar, "changed": {path: what happened}}
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import tarfile
from collections.abc import Mapping, Sequence
from typing import IO, Any

from ..format.manifest import BLOCK, padding
from ..protocol.counts import counted
from ..protocol.problem import NodeError, Problem
from .selection import OutputEntry, measure, select

VERSION = 1
LINE_LIMIT = 16 << 20
"""Bytes that a line of JSON may have."""
CHUNK = 1 << 20
"""Bytes of a file that are held in memory at a time."""
MOST_NAMES = 1000
"""Paths that are named with a reason; the others are only counted."""

_READ_ONLY = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def pack(directory: str, outputs: Sequence[str], stream: IO[bytes]) -> None:
    """Send the outputs that are in a directory.

    A file that changes meanwhile is sent with the length that was announced, or its current length
    if that is less; bytes that are missing then are filled with zeros. It is reported as changed,
    and so is one that has vanished.

    Args:
        directory: the directory where the ranks ran.
        outputs: paths and patterns below it.
        stream: the destination; it is flushed, not closed.

    Raises:
        NodeError: the directory cannot be read, or nobody reads the stream any more.
    """
    selection = select(directory, outputs)
    total = measure(selection.entries)
    writer = _StreamWriter(stream, directory)
    writer.line(
        {
            "results": VERSION,
            "roots": selection.roots,
            "entries": total.entries,
            "files": total.files,
            "bytes": total.bytes,
            "missing": selection.missing,
            "left_out": some_of(selection.left_out),
        }
    )
    changed: dict[str, str] = {}
    for entry in selection.entries:
        if not stat.S_ISREG(entry.mode):
            writer.tar(_header(entry, 0))
            continue
        change = _send_file(entry, writer)
        if change:
            changed[entry.name] = change
    writer.zeros(2 * BLOCK)
    writer.line({"end": 1, "sha256": writer.digest.hexdigest(), "changed": some_of(changed)})
    writer.flush()


def some_of(reasons: Mapping[str, str]) -> dict[str, str]:
    """Return the first ``MOST_NAMES`` paths with their reasons, and how many more there are."""
    first = dict(list(reasons.items())[:MOST_NAMES])
    if len(reasons) > len(first):
        first["..."] = f"and {len(reasons) - len(first)} more"
    return first


class _StreamWriter:
    """The sending end of the stream; it computes the digest of the tar."""

    def __init__(self, stream: IO[bytes], directory: str) -> None:
        self._stream = stream
        self._directory = directory
        self.digest = hashlib.sha256()

    def line(self, content: Mapping[str, Any]) -> None:
        """Write one line of JSON."""
        # Names that are not UTF-8 hold lone surrogates, which only ASCII escapes can carry.
        data = json.dumps(content).encode("ascii") + b"\n"
        if len(data) > LINE_LIMIT:
            raise self._error("there are too many of them", "name directories, not every file")
        self._write(data)

    def tar(self, data: bytes) -> None:
        """Write bytes of the tar."""
        self.digest.update(data)
        self._write(data)

    def zeros(self, count: int) -> None:
        """Write so many zeros into the tar."""
        while count:
            size = min(count, CHUNK)
            self.tar(bytes(size))
            count -= size

    def flush(self) -> None:
        """Flush the stream."""
        try:
            self._stream.flush()
        except (OSError, ValueError) as exc:
            raise self._error(str(exc), "see why the other end went away") from exc

    def _write(self, data: bytes) -> None:
        rest = memoryview(data)
        try:
            while rest:  # an unbuffered stream may take less than it is given
                rest = rest[self._stream.write(rest) :]
        except (OSError, ValueError) as exc:
            raise self._error(str(exc), "see why the other end went away") from exc

    def _error(self, why: str, fix: str) -> NodeError:
        return NodeError(Problem("the outputs could not be sent", self._directory, why, fix))


def _send_file(entry: OutputEntry, writer: _StreamWriter) -> str:
    """Send one file; return what happened to it meanwhile, empty for nothing."""
    try:
        handle = os.open(entry.source, _READ_ONLY)
    except OSError as exc:
        return f"not sent: {exc.strerror or exc}"
    try:
        return _send_open_file(handle, entry, writer)
    finally:
        os.close(handle)


def _send_open_file(handle: int, entry: OutputEntry, writer: _StreamWriter) -> str:
    before = os.fstat(handle)
    if not stat.S_ISREG(before.st_mode):
        return "not sent: it is no longer a file"
    size = min(before.st_size, entry.size)
    writer.tar(_header(entry, size))
    missing, why = _send_content(handle, size, writer)
    writer.zeros(missing + padding(size))
    after = os.fstat(handle)
    if missing:
        return f"zeros stand in for the last {counted(missing, 'byte')}: {why}"
    if (after.st_size, after.st_mtime_ns) != (entry.size, entry.mtime_ns):
        return "it was written to while it was sent"
    return ""


def _send_content(handle: int, size: int, writer: _StreamWriter) -> tuple[int, str]:
    """Send up to ``size`` bytes of a file; return how many are missing, and why."""
    left = size
    while left:
        try:
            data = os.read(handle, min(left, CHUNK))
        except OSError as exc:
            return left, exc.strerror or str(exc)
        if not data:
            return left, "it became shorter"
        writer.tar(data)
        left -= len(data)
    return 0, ""


def _header(entry: OutputEntry, size: int) -> bytes:
    info = tarfile.TarInfo(entry.name)
    info.size = size
    info.mode = stat.S_IMODE(entry.mode) & 0o777
    info.mtime = entry.mtime_ns // 10**9
    if stat.S_ISDIR(entry.mode):
        info.type = tarfile.DIRTYPE
    elif entry.link:
        info.type = tarfile.SYMTYPE
        info.linkname = entry.link
    return info.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")
