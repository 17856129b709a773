"""The outputs of a job on a node, and the stream in which they are sent to the login side.

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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any, NamedTuple

from ..format.manifest import BLOCK, padding
from ..protocol.counts import counted
from ..protocol.problem import NodeError, Problem
from .patterns import above, expand, split

VERSION = 1
LINE_LIMIT = 16 << 20
"""Bytes that a line of JSON may have."""
CHUNK = 1 << 20
"""Bytes of a file that are held in memory at a time."""
MOST_NAMES = 1000
"""Paths that are named with a reason; the others are only counted."""

_READ_ONLY = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class OutputEntry(NamedTuple):
    """One directory, file or link to send."""

    name: str
    """Its path below the run directory."""
    source: str
    """The path that it is read from."""
    size: int
    """Length in bytes; 0 for directories and links."""
    mode: int
    """Type and permissions, as ``st_mode``."""
    mtime_ns: int
    """Time of its last change, in nanoseconds since 1970."""
    link: str
    """The target of a link; empty for anything else."""


@dataclass(frozen=True)
class Selection:
    """The files, directories and links that the outputs of a job stand for."""

    roots: tuple[str, ...]
    """Their paths; none lies inside another."""
    entries: tuple[OutputEntry, ...]
    """Everything in them, directories before their content."""
    missing: tuple[str, ...]
    """Outputs that match nothing."""
    left_out: Mapping[str, str]
    """Paths that cannot be sent, each with the reason."""


@dataclass(frozen=True)
class Sizes:
    """The amount of data to send."""

    files: int
    """Regular files."""
    bytes: int
    """Bytes of their content."""
    entries: int
    """Files, directories and links: the inodes they take."""


def sizes(directory: str, outputs: Sequence[str]) -> Sizes:
    """Measure what :func:`pack` would send now.

    Raises:
        NodeError: the directory cannot be read.
    """
    return _measure(select(directory, outputs).entries)


def select(directory: str, outputs: Sequence[str]) -> Selection:
    """Find what the outputs stand for.

    An output is a path or a pattern below the directory; ``**`` stands for any directories, ``.``
    for everything. An output that is a link stands for its target, if that is in the directory;
    links inside an output are kept as long as they do not lead out of it.

    Raises:
        NodeError: the directory cannot be read.
    """
    base = _real_directory(directory)
    sources: dict[str, str] = {}
    missing: list[str] = []
    left_out: dict[str, str] = {}
    for output in outputs:
        pattern = split(output)
        if pattern is None:
            left_out[output] = "it does not lie in the run directory"
            continue
        names = sorted(expand(base, pattern))
        if not names:
            missing.append(output)
        for name in names:
            source = os.path.realpath(os.path.join(base, name))
            reason = _root_refusal(base, source)
            if reason:
                left_out[name] = reason
            else:
                sources[name] = source
    roots = [name for name in sorted(sources) if sources.keys().isdisjoint(above(name))]
    entries = [entry for root in roots for entry in _walk(root, sources[root], left_out)]
    return Selection(tuple(roots), tuple(entries), tuple(missing), left_out)


def leads_out(inner: str, target: str) -> bool:
    """Tell whether a link could lead out of the output that holds it.

    ``..`` is allowed only at the beginning: there it goes up real directories. Behind a name, which
    may be a link itself, the text does not tell where it leads.

    Args:
        inner: the link's path, relative to the output.
        target: the path that the link points to.
    """
    if not target or target.startswith("/") or os.path.normpath(target) != target:
        return True
    return target.split("/").count("..") > inner.count("/")


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
    total = _measure(selection.entries)
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


def _measure(entries: Sequence[OutputEntry]) -> Sizes:
    file_sizes = [entry.size for entry in entries if stat.S_ISREG(entry.mode)]
    return Sizes(files=len(file_sizes), bytes=sum(file_sizes), entries=len(entries))


def _real_directory(directory: str) -> str:
    """Return the real path of the run directory.

    Raises:
        NodeError: there is no such directory.
    """
    base = os.path.realpath(directory)
    if os.path.isdir(base):
        return base
    raise NodeError(
        Problem(
            what="the outputs cannot be looked for",
            where=directory,
            why="it is not a directory" if os.path.exists(base) else "it does not exist",
            fix="see whether the job, or a cleaner of temporary files, removed it",
        )
    )


def _root_refusal(base: str, source: str) -> str:
    """Return why an output cannot be sent, by its real path; empty if it can."""
    if not source.startswith(base + "/"):
        return f"it leads out of the run directory, to {source}"
    if not os.path.lexists(source):
        return f"it is a link to {source}, which does not exist"
    return ""


class _LeftOut(Exception):
    """A path cannot be sent; the text is the reason."""


def _walk(root: str, top: str, left_out: dict[str, str]) -> Iterator[OutputEntry]:
    """Yield the content of an output, following no link.

    Args:
        root: the output's path below the run directory.
        top: its real path.
        left_out: gets the paths that cannot be sent, each with the reason.
    """
    pending = [(root, top)]
    while pending:
        name, path = pending.pop()
        children: list[str] = []
        try:
            entry = _entry(name, path, root, top)
            if stat.S_ISDIR(entry.mode):
                children = sorted(os.listdir(path), reverse=True)
        except _LeftOut as exc:
            left_out[name] = str(exc)
            continue
        except OSError as exc:
            left_out[name] = exc.strerror or str(exc)
            continue
        pending += [(f"{name}/{child}", f"{path}/{child}") for child in children]
        yield entry


def _entry(name: str, path: str, root: str, top: str) -> OutputEntry:
    """Describe one path inside an output.

    Raises:
        _LeftOut: it cannot be sent.
        OSError: it cannot be read.
    """
    state = os.lstat(path)
    size, link = 0, ""
    if stat.S_ISREG(state.st_mode):
        if not os.access(path, os.R_OK):
            raise _LeftOut("this user may not read it")
        size = state.st_size
    elif stat.S_ISLNK(state.st_mode):
        link = _link_target(path, top)
        if not link:
            raise _LeftOut(f"it is a link out of {root}, to {os.readlink(path)}")
    elif not stat.S_ISDIR(state.st_mode):
        raise _LeftOut(f"it is a {_special_kind(state.st_mode)}")
    return OutputEntry(name, path, size, state.st_mode, state.st_mtime_ns, link)


def _link_target(path: str, top: str) -> str:
    """Return the target to send for a link: the same text, or an equivalent relative path.

    Empty if it leads out of ``top``.
    """
    text = os.readlink(path)
    if not leads_out(os.path.relpath(path, top), text):
        return text
    folder, last = os.path.dirname(path), os.path.basename(text)
    target = os.path.join(folder, text)
    if last in ("", ".", ".."):
        target = os.path.realpath(target)
    else:
        target = os.path.join(os.path.realpath(os.path.dirname(target)), last)
    if not f"{target}/".startswith(f"{top}/"):
        return ""
    return os.path.relpath(target, folder)


def _special_kind(mode: int) -> str:
    if stat.S_ISFIFO(mode):
        return "named pipe"
    return "socket" if stat.S_ISSOCK(mode) else "device"
