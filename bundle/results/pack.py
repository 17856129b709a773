"""What a job's outputs are on a node, and the stream in which they go home.

The stream, version 1, is made for a pipe (``srun``): one line of JSON, an uncompressed GNU tar, one
line of JSON. ``tail -n +2 | tar -t`` lists it by hand. The first line::

    {"results": 1, "roots": [path], "entries": n, "files": n, "bytes": n,
     "missing": [output], "left_out": {path: reason}}

``roots`` are the paths that the outputs stand for, none of them inside another; each member of the
tar is one of them or lies below one, directories before what they hold. ``entries`` (directories
and links too), ``files`` and ``bytes`` (of their content) are the most that follows. The tar holds
directories, files and symbolic links, and the GNU long names, nothing else. The last line says that
the stream is whole, and which files changed while they were sent::

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
"""Paths that are named with a reason; of further ones only the number."""


class Entry(NamedTuple):
    """One directory, file or link that goes home."""

    name: str
    """Its path below the run directory."""
    source: str
    """Where it is read."""
    size: int
    """Length in bytes; 0 for what is not a file."""
    mode: int
    """Type and permissions, as ``st_mode``."""
    mtime_ns: int
    """When it was last changed, in nanoseconds since 1970."""
    link: str
    """What it points to; empty for what is not a link."""


@dataclass(frozen=True)
class Selection:
    """What the outputs of a job stand for."""

    roots: tuple[str, ...]
    """Their paths; none lies inside another."""
    entries: tuple[Entry, ...]
    """All there is in them, directories before what they hold."""
    missing: tuple[str, ...]
    """Outputs that stand for nothing."""
    left_out: Mapping[str, str]
    """Paths that cannot be sent, each with the reason."""


@dataclass(frozen=True)
class Sizes:
    """How much would be sent."""

    files: int
    """Regular files."""
    bytes: int
    """Their content."""
    entries: int
    """Files, directories and links: the inodes they take."""


def sizes(directory: str, outputs: Sequence[str]) -> Sizes:
    """What :func:`pack` would send now.

    Raises:
        NodeError: the directory cannot be read.
    """
    return _measure(select(directory, outputs).entries)


def select(directory: str, outputs: Sequence[str]) -> Selection:
    """Find what the outputs stand for.

    An output is a path or a pattern below the directory; ``**`` stands for any directories, ``.``
    for everything. An output that is a link stands for what it leads to, if that is in the
    directory; links inside an output are kept as long as they do not lead out of it.

    Raises:
        NodeError: the directory cannot be read.
    """
    base = os.path.realpath(directory)
    if not os.path.isdir(base):
        problem = Problem(
            what="the outputs cannot be looked for",
            where=directory,
            why="it is not a directory" if os.path.exists(base) else "it does not exist",
            fix="see whether the job, or a cleaner of temporary files, removed it",
        )
        raise NodeError(problem)
    found: dict[str, str] = {}
    missing, left_out = [], {}
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
            if not source.startswith(base + "/"):
                left_out[name] = f"it leads out of the run directory, to {source}"
            elif not os.path.lexists(source):
                left_out[name] = f"it is a link to {source}, which does not exist"
            else:
                found[name] = source
    roots = [name for name in sorted(found) if not any(up in found for up in above(name))]
    entries = [entry for root in roots for entry in _walk(root, found[root], left_out)]
    return Selection(tuple(roots), tuple(entries), tuple(missing), left_out)


def leads_out(inner: str, target: str) -> bool:
    """Whether a link could lead out of the output that holds it.

    ``..`` counts only at the beginning: there it goes up real directories. Behind a name, which may
    be a link itself, nobody can tell from the text where it goes.

    Args:
        inner: the link's path, relative to the output.
        target: what it points to.
    """
    if not target or target.startswith("/") or os.path.normpath(target) != target:
        return True
    return target.split("/").count("..") > inner.count("/")


def pack(directory: str, outputs: Sequence[str], stream: IO[bytes]) -> None:
    """Send the outputs that are in a directory.

    A file that changes meanwhile is sent with the length that was announced, or the one it has when
    its turn comes if that is less; what is then missing is filled with zeros. It is named as
    changed, and so is one that has vanished.

    Args:
        directory: where the ranks ran.
        outputs: paths and patterns below it.
        stream: where to; it is flushed, not closed.

    Raises:
        NodeError: the directory cannot be read, or nobody reads the stream any more.
    """
    chosen = select(directory, outputs)
    size = _measure(chosen.entries)
    sink = _Sink(stream, directory)
    sink.line(
        {
            "results": VERSION,
            "roots": chosen.roots,
            "entries": size.entries,
            "files": size.files,
            "bytes": size.bytes,
            "missing": chosen.missing,
            "left_out": some_of(chosen.left_out),
        }
    )
    changed: dict[str, str] = {}
    for entry in chosen.entries:
        if not stat.S_ISREG(entry.mode):
            sink.tar(_header(entry, 0))
            continue
        what = _send(entry, sink)
        if what:
            changed[entry.name] = what
    sink.tar(bytes(2 * BLOCK))
    sink.line({"end": 1, "sha256": sink.digest.hexdigest(), "changed": some_of(changed)})
    sink.flush()


def some_of(named: Mapping[str, str]) -> dict[str, str]:
    """The first of many paths that have a reason each, and how many more there are."""
    some = dict(list(named.items())[:MOST_NAMES])
    if len(named) > len(some):
        some["..."] = f"and {len(named) - len(some)} more"
    return some


class _Sink:
    """The stream, as the one who sends sees it."""

    def __init__(self, stream: IO[bytes], directory: str) -> None:
        self._stream, self._directory = stream, directory
        self.digest = hashlib.sha256()

    def line(self, content: Mapping[str, Any]) -> None:
        """Write one line of JSON."""
        # Names that are not UTF-8 hold lone surrogates, which only ASCII escapes carry.
        data = json.dumps(content).encode("ascii") + b"\n"
        if len(data) > LINE_LIMIT:
            raise self._fault("there are too many of them", "name directories, not every file")
        self._write(data)

    def tar(self, data: bytes) -> None:
        """Write bytes of the tar."""
        self.digest.update(data)
        self._write(data)

    def flush(self) -> None:
        """Hand on what is still held."""
        try:
            self._stream.flush()
        except (OSError, ValueError) as exc:
            raise self._fault(str(exc), "see why the other end went away") from exc

    def _write(self, data: bytes) -> None:
        rest = memoryview(data)
        try:
            while rest:  # an unbuffered stream may take less than it is given
                rest = rest[self._stream.write(rest) :]
        except (OSError, ValueError) as exc:
            raise self._fault(str(exc), "see why the other end went away") from exc

    def _fault(self, why: str, fix: str) -> NodeError:
        return NodeError(Problem("the outputs could not be sent", self._directory, why, fix))


def _send(entry: Entry, sink: _Sink) -> str:
    """Send one file; returns what changed meanwhile, empty if nothing did."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        handle = os.open(entry.source, flags)
    except OSError as exc:
        return f"not sent: {exc.strerror or exc}"
    try:
        before = os.fstat(handle)
        if not stat.S_ISREG(before.st_mode):
            return "not sent: it is no longer a file"
        size = min(before.st_size, entry.size)
        sink.tar(_header(entry, size))
        left, why = size, ""
        while left and not why:
            try:
                data = os.read(handle, min(left, CHUNK))
                why = "" if data else "it became shorter"
            except OSError as exc:
                data, why = b"", exc.strerror or str(exc)
            sink.tar(data)
            left -= len(data)
        lost = left
        while left:
            sink.tar(bytes(min(left, CHUNK)))
            left -= min(left, CHUNK)
        sink.tar(bytes(padding(size)))
        after = os.fstat(handle)
    finally:
        os.close(handle)
    if lost:
        return f"zeros stand in for the last {counted(lost, 'byte')}: {why}"
    same = (after.st_size, after.st_mtime_ns) == (entry.size, entry.mtime_ns)
    return "" if same else "it was written to while it was sent"


def _header(entry: Entry, size: int) -> bytes:
    info = tarfile.TarInfo(entry.name)
    info.size, info.mode = size, stat.S_IMODE(entry.mode) & 0o777
    info.mtime = entry.mtime_ns // 10**9
    if stat.S_ISDIR(entry.mode):
        info.type = tarfile.DIRTYPE
    elif entry.link:
        info.type, info.linkname = tarfile.SYMTYPE, entry.link
    return info.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")


def _measure(entries: Sequence[Entry]) -> Sizes:
    files = [entry.size for entry in entries if stat.S_ISREG(entry.mode)]
    return Sizes(len(files), sum(files), len(entries))


def _walk(root: str, top: str, left_out: dict[str, str]) -> Iterator[Entry]:
    """What is in an output, no link followed; what cannot be sent is added to ``left_out``."""
    waiting = [(root, top)]
    while waiting:
        name, path = waiting.pop()
        link = ""
        try:
            state = os.lstat(path)
            if stat.S_ISDIR(state.st_mode):
                inside = sorted(os.listdir(path), reverse=True)
                waiting += [(f"{name}/{one}", f"{path}/{one}") for one in inside]
            elif stat.S_ISLNK(state.st_mode):
                link = _kept_link(path, top)
                if not link:
                    left_out[name] = f"it is a link out of {root}, to {os.readlink(path)}"
                    continue
            elif not stat.S_ISREG(state.st_mode):
                left_out[name] = f"it is a {_kind(state.st_mode)}"
                continue
            elif not os.access(path, os.R_OK):
                left_out[name] = "this user may not read it"
                continue
        except OSError as exc:
            left_out[name] = exc.strerror or str(exc)
            continue
        size = state.st_size if stat.S_ISREG(state.st_mode) else 0
        yield Entry(name, path, size, state.st_mode, state.st_mtime_ns, link)


def _kept_link(path: str, top: str) -> str:
    """What a link is to point to at home: as here, or the same place said differently.

    Empty if it leads out of ``top``.
    """
    text = os.readlink(path)
    if not leads_out(os.path.relpath(path, top), text):
        return text
    here, last = os.path.dirname(path), os.path.basename(text)
    goal = os.path.join(here, text)
    if last in ("", ".", ".."):
        goal = os.path.realpath(goal)
    else:
        goal = os.path.join(os.path.realpath(os.path.dirname(goal)), last)
    return os.path.relpath(goal, here) if f"{goal}/".startswith(f"{top}/") else ""


def _kind(mode: int) -> str:
    if stat.S_ISFIFO(mode):
        return "named pipe"
    return "socket" if stat.S_ISSOCK(mode) else "device"
