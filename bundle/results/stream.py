"""The stream in which the outputs of a job are sent from a node to the login side.

The stream, version 3, is made for a pipe (``srun``): one line of JSON, an uncompressed GNU tar, one
line of JSON. ``tail -n +2 | tar -t`` lists it by hand. The first, a :class:`StreamHead`, counts
all members of the tar, regular files, and bytes of their content::

    {"results": 3, "roots": [path], "entries": n, "files": n, "bytes": n,
     "missing": [output that matches nothing], "left_out": {path: reason}}

The tar holds directories, files and symbolic links, and the GNU long names, nothing else. The last
line, a :class:`StreamEnd`, says that the stream is complete::

    {"end": 1, "sha256": hex digest of the tar, "changed": {path: what happened}, "gaps": n,
     "deleted": [path]}
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import stat
import tarfile
from collections.abc import Mapping, Sequence
from typing import IO, TypeVar

from ..format.manifest import BLOCK, count_padding
from ..protocol.codec import AnyText, DecodeError, decode, encode
from ..protocol.counts import format_count
from ..protocol.dataclass import dataclass
from ..protocol.problem import NodeError, Problem, ProblemCode
from ..system.files import error_text
from .selection import OutputEntry, Selection, exclude_received, measure_entries, select_outputs

VERSION = 3
LINE_LIMIT = 16 << 20  # bytes that a line of JSON may have
CHUNK = 1 << 20  # bytes of a file that are held in memory at a time
MOST_NAMES = 1000  # paths that are named with a reason; the others are only counted

_SHOWN_BYTES = 80  # bytes of a line that a message shows
_SHOWN_FAULT = 200  # characters of a fault that a message shows: names in it may be long
_DELETED_NAMES = LINE_LIMIT // 8  # characters of all their names; if more, the files stay at home
_Line = TypeVar("_Line")
_READ_ONLY = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class InvalidStream(Exception):
    """The stream holds something that no honest sender sends; the text is the reason."""


@dataclass(frozen=True)
class StreamHead:
    """The first line of the stream; its counts are upper limits of what follows."""

    results: int
    roots: tuple[AnyText, ...]
    """The paths that the outputs stand for, none inside another, with all members of the tar."""
    entries: int
    files: int
    bytes: int
    missing: tuple[AnyText, ...]
    left_out: dict[str, AnyText]

    def __post_init__(self) -> None:
        if self.results != VERSION:
            raise ValueError(f"it has version {self.results}, this program reads {VERSION}")
        if min(self.entries, self.files, self.bytes) < 0:
            raise ValueError("a count is below zero")


@dataclass(frozen=True)
class StreamEnd:
    """The last line of the stream."""

    end: int
    sha256: AnyText
    changed: dict[str, AnyText]  # files that changed while they were sent, with what happened
    gaps: int  # files and directories that could not be read, or not to their end; unnamed ones too
    deleted: tuple[AnyText, ...] = ()  # earlier results that the job has deleted on the node

    def __post_init__(self) -> None:
        if self.end != 1 or self.gaps < 0:
            raise ValueError(f"end is {self.end}, gaps is {self.gaps}")


def read_head(line: bytes) -> StreamHead:
    """Read the first line; InvalidStream if it is no such line."""
    return _read_line(StreamHead, line, "results", "it begins with")


def read_end(line: bytes) -> StreamEnd:
    """Read the last line; InvalidStream if it is no such line."""
    return _read_line(StreamEnd, line, "end", "instead of its end mark there is")


def _read_line(kind: type[_Line], line: bytes, mark: str, what: str) -> _Line:
    try:
        raw = json.loads(line.decode("ascii"))
        if isinstance(raw, dict) and mark in raw:
            return decode(kind, raw)
    except DecodeError as exc:
        raise InvalidStream(f"a line is damaged: {str(exc)[:_SHOWN_FAULT]}") from exc
    except (ValueError, RecursionError):
        pass
    raise InvalidStream(f"{what} {line[:_SHOWN_BYTES]!r}")


def limit_reasons(reasons: Mapping[str, str]) -> dict[str, str]:
    """Return the first ``MOST_NAMES`` paths with their reasons, and how many more there are."""
    first = dict(list(reasons.items())[:MOST_NAMES])
    if len(reasons) > len(first):
        first["..."] = f"and {len(reasons) - len(first)} more"
    return first


def send_outputs(
    directory: str,
    outputs: Sequence[str],
    stream: IO[bytes],
    deleted: Sequence[str] = (),
    brought: Sequence[str] | None = None,
) -> None:
    """Send the outputs in a directory, only those besides ``brought`` if given."""
    selection = select_outputs(directory, outputs)
    if brought is not None:
        selection = exclude_received(selection, brought)
    send_selection(selection, directory, stream, deleted)


def send_selection(
    selection: Selection, directory: str, stream: IO[bytes], deleted: Sequence[str] = ()
) -> StreamEnd:
    """Send what was selected in a directory; return the end of the stream.

    A file that changes meanwhile is sent with the length that was announced, filled up with zeros,
    or its current length if that is less. It is reported as changed, also if it has vanished.
    """
    files, size, entries = measure_entries(selection.entries)
    named = limit_reasons(selection.left_out)
    head = StreamHead(VERSION, selection.roots, entries, files, size, selection.missing, named)
    writer = _StreamWriter(stream, directory)
    changed: dict[str, str] = {}
    gaps = selection.unread
    try:
        writer.line(head)
        for entry in selection.entries:
            change, is_gap = _send(entry, writer)
            gaps += is_gap
            changed.update({entry.name: change} if change else {})
        writer.zeros(2 * BLOCK)
        known = tuple(deleted) if sum(map(len, deleted)) < _DELETED_NAMES else ()
        end = StreamEnd(1, writer.digest.hexdigest(), limit_reasons(changed), gaps, known)
        writer.line(end)
        stream.flush()
    except (OSError, ValueError) as exc:  # of the stream: those of files are caught before
        values = {"why": str(exc)}
        raise NodeError(Problem(ProblemCode.OUTPUTS_NOT_SENT, directory, values)) from exc
    return end


class _StreamWriter:
    def __init__(self, stream: IO[bytes], directory: str) -> None:
        self._stream = stream
        self._directory = directory
        self.digest = hashlib.sha256()

    def line(self, content: StreamHead | StreamEnd) -> None:
        # Names that are not UTF-8 hold lone surrogates, which only ASCII escapes can carry.
        data = json.dumps(encode(content)).encode("ascii") + b"\n"
        if len(data) > LINE_LIMIT:
            raise NodeError(Problem(ProblemCode.TOO_MANY_OUTPUTS, self._directory))
        self._write(data)

    def tar(self, data: bytes) -> None:
        self.digest.update(data)
        self._write(data)

    def zeros(self, count: int) -> None:
        while count:
            size = min(count, CHUNK)
            self.tar(bytes(size))
            count -= size

    def _write(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:  # an unbuffered stream may take less than it is given
            rest = rest[self._stream.write(rest) :]


def _send(entry: OutputEntry, writer: _StreamWriter) -> tuple[str, bool]:
    """Send one entry; return what has happened to it meanwhile, and whether bytes are missing."""
    if not stat.S_ISREG(entry.mode):
        writer.tar(_header(entry, 0))
        return "", False
    try:
        handle = os.open(entry.source, _READ_ONLY)
    except OSError as exc:
        return f"not sent: {error_text(exc)}", True
    with open(handle, "rb", buffering=0) as file:
        before = os.fstat(handle)
        if not stat.S_ISREG(before.st_mode):
            return "not sent: it is no longer a file", True
        size = min(before.st_size, entry.size)
        writer.tar(_header(entry, size))
        missing, why = _send_content(file, size, writer)
        writer.zeros(missing + count_padding(size))
        after = os.fstat(handle)
    if missing:
        return f"zeros stand in for the last {format_count(missing, 'byte')}: {why}", True
    if (after.st_size, after.st_mtime_ns) != (entry.size, entry.mtime_ns):
        return "it was written to while it was sent", False
    return "", False


def _send_content(file: io.FileIO, size: int, writer: _StreamWriter) -> tuple[int, str]:
    """Send up to ``size`` bytes of a file; return how many are missing, and why."""
    left = size
    while left:
        try:
            data = file.read(min(left, CHUNK))
        except OSError as exc:
            return left, error_text(exc)
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
