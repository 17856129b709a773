"""Results come home: the stream from a node, unpacked where the job was started.

The stream is described in :mod:`bundle.results.pack`, which also sends it. Nothing in it is
believed: only outputs that were asked for are taken, no path leaves them, no link leads out of
them, devices and the like are refused, and nothing may be longer than was announced.

All is written below a hidden directory next to its final place, and renamed once the stream has
arrived whole. What is there already is never touched: the new one gets a number (``out.1``). Of a
stream that was cut, what did arrive in full is kept as ``out.partial``.
"""

from __future__ import annotations

import hashlib
import json
import os
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import IO, Any

from ..format.manifest import BLOCK, padding
from ..protocol.counts import counted
from ..protocol.problem import NodeError, Problem
from ..system.files import facts_of, refusals
from .pack import CHUNK, LINE_LIMIT, VERSION, pack, sizes, some_of
from .patterns import above, wanted
from .publish import Hostile, Landing, sweep

__all__ = ["Received", "pack", "receive", "sizes"]

_NAME_LIMIT = 64 << 10
"""Bytes of a long name; Linux takes no path over 4096."""
_COUNT_LIMIT = 1 << 62
_HALF_BLOCK = 2048
"""Bytes that a file loses on average, where a file system hands out 4 KiB blocks."""
_SPARE_INODES = 16


@dataclass(frozen=True)
class Received:
    """What came home."""

    complete: bool
    """Whether all that was announced is there; if not, names end with ``.partial``."""
    files: int
    """Regular files that arrived in full."""
    bytes: int
    """Their content."""
    placed: tuple[str, ...]
    """The outputs as they are named now, relative to the target."""
    renamed: Mapping[str, str]
    """Those that got another name than on the node, with that name."""
    missing: tuple[str, ...]
    """Outputs that the node did not have."""
    left_out: Mapping[str, str]
    """Paths that did not come, with the reason."""
    changed: Mapping[str, str]
    """Files that changed while they were sent, with what happened."""
    problems: tuple[Problem, ...]
    """Why it is not complete, or where something had to be put instead."""


@dataclass(frozen=True)
class _Header:
    """The first line of the stream, checked."""

    roots: tuple[str, ...]
    entries: int
    files: int
    bytes: int
    missing: tuple[str, ...]
    left_out: Mapping[str, str]


def receive(
    stream: IO[bytes], target: str, outputs: Sequence[str], source: str = "the node"
) -> Received:
    """Unpack what :func:`pack` sends.

    Where the stream ends early, is damaged, or the disk fills up, what arrived in full is kept, and
    the result says so; the caller then closes the stream, which may hold more.

    Args:
        stream: blocking; read up to its end mark.
        target: an existing directory, where the job was started.
        outputs: those that were asked for; others are refused.
        source: where it comes from, for messages.

    Raises:
        NodeError: no stream of results begins there, or it does not fit. Nothing has been written.
    """
    reader = _Reader(stream)
    try:
        header = _parse_header(reader.line(), outputs)
    except (_Cut, Hostile) as exc:
        raise NodeError(
            Problem(
                what="no results came",
                where=source,
                why=str(exc),
                fix="see the node's log; the results are still there if the node is",
            )
        ) from exc
    sweep(target)
    _require_room(target, header, source)
    landing = Landing(target, header.roots)
    try:
        problem, changed = _unpack(reader, landing, header, target, source)
        landing.publish(complete=problem is None and not landing.left_out)
        return _summary(landing, header, problem, changed)
    finally:
        landing.discard()


def _summary(
    landing: Landing, header: _Header, problem: Problem | None, changed: Mapping[str, str]
) -> Received:
    return Received(
        complete=problem is None and not landing.left_out,
        files=landing.files,
        bytes=landing.bytes,
        placed=tuple(landing.placed),
        renamed=landing.renamed,
        missing=header.missing,
        left_out=some_of({**header.left_out, **landing.left_out}),
        changed=changed,
        problems=(*([problem] if problem else []), *landing.problems),
    )


class _Cut(Exception):
    """The stream ended before its end mark; the text says where."""


class _Reader:
    """The stream, as the one who receives sees it; never holds more than one chunk."""

    def __init__(self, stream: IO[bytes]) -> None:
        # What is there already, rather than waiting for a whole chunk.
        self._read = getattr(stream, "read1", stream.read)
        self._held = memoryview(b"")
        self.digest = hashlib.sha256()

    def line(self) -> bytes:
        """One line, without what ends it."""
        line = bytearray()
        while True:
            self._fill()
            piece = bytes(self._held)
            end = piece.find(b"\n")
            line += piece if end < 0 else piece[:end]
            if len(line) > LINE_LIMIT:
                raise Hostile(f"a line has more than {LINE_LIMIT} bytes")
            self._held = self._held[len(piece) if end < 0 else end + 1 :]
            if end >= 0:
                return bytes(line)

    def tar(self, most: int) -> memoryview:
        """Up to so many bytes of the tar, at least one."""
        self._fill()
        piece, self._held = self._held[:most], self._held[most:]
        self.digest.update(piece)
        return piece

    def exactly(self, count: int) -> bytes:
        """So many bytes of the tar, few enough to be held."""
        data = bytearray()
        while len(data) < count:
            data += self.tar(count - len(data))
        return bytes(data)

    def _fill(self) -> None:
        if self._held:
            return
        try:
            data = self._read(CHUNK)
        except OSError as exc:
            raise _Cut(f"it cannot be read: {exc.strerror or exc}") from exc
        if not data:
            raise _Cut("it ended before its end mark")
        self._held = memoryview(data)


def _unpack(
    reader: _Reader, landing: Landing, header: _Header, target: str, source: str
) -> tuple[Problem | None, Mapping[str, str]]:
    """Read the tar and the end mark; returns what went wrong, and which files changed."""
    why, where = "", source
    changed: Mapping[str, str] = {}
    fix = "what arrived in full is kept; the rest is still on the node, if that is there"
    try:
        for info in _members(reader, header):
            content = _Content(reader, info.size)
            landing.add(info, content.pieces)
            content.skip()
        digest = reader.digest.hexdigest()
        changed = _parse_end(reader.line(), digest)
    except _Cut as exc:
        why = f"the stream was cut: {exc}"
    except Hostile as exc:
        why = f"the stream is damaged: {exc}"
    except OSError as exc:
        why, where = exc.strerror or str(exc), target
        fix = f"make room there; {fix}"
    if not why and landing.left_out:
        name, reason = next(iter(landing.left_out.items()))
        why, where = f"{len(landing.left_out)} could not be written: {name}: {reason}", target
    return (Problem("the results are not complete", where, why, fix) if why else None), changed


class _Content:
    """The bytes of one member, and the padding behind them."""

    def __init__(self, reader: _Reader, size: int) -> None:
        self._reader, self._left, self._padding = reader, size, padding(size)

    def pieces(self) -> Iterator[memoryview]:
        """What is not read yet."""
        while self._left:
            piece = self._reader.tar(min(self._left, CHUNK))
            self._left -= len(piece)
            yield piece

    def skip(self) -> None:
        """Go on to the next member."""
        for _ in self.pieces():
            pass
        self._reader.exactly(self._padding)


def _members(reader: _Reader, header: _Header) -> Iterator[tarfile.TarInfo]:
    """The members of the tar, up to and with its end; long names put in.

    Raises:
        Hostile: there is more than was announced, or of another kind.
    """
    entries = files = size = 0
    long: dict[bytes, str] = {}
    while True:
        block = reader.exactly(BLOCK)
        if block == bytes(BLOCK):
            break
        try:
            info = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except (tarfile.HeaderError, ValueError) as exc:
            raise Hostile(f"the header of a member cannot be read: {exc}") from exc
        if info.size < 0:
            raise Hostile(f"{info.name!r} has a negative length")
        if info.type in (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK):
            if info.size > _NAME_LIMIT or info.type in long:
                raise Hostile("a name is too long")
            name = reader.exactly(info.size + padding(info.size))[: info.size]
            long[info.type] = name.rstrip(b"\0").decode("utf-8", "surrogateescape")
            continue
        info.name = long.pop(tarfile.GNUTYPE_LONGNAME, info.name)
        info.linkname = long.pop(tarfile.GNUTYPE_LONGLINK, info.linkname)
        if info.type not in (tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE):
            raise Hostile(f"{info.name!r} is neither a directory, a file nor a symbolic link")
        if info.type == tarfile.DIRTYPE:
            info.name = info.name.rstrip("/")
        if info.type != tarfile.REGTYPE and info.size:
            raise Hostile(f"{info.name!r} is not a file, but has content")
        entries, files, size = entries + 1, files + info.isreg(), size + info.size
        if entries > header.entries or files > header.files or size > header.bytes:
            raise Hostile(f"{info.name!r} is more than was announced")
        yield info
    if reader.exactly(BLOCK) != bytes(BLOCK):
        raise Hostile("the end mark of the tar is damaged")


def _parse_header(line: bytes, outputs: Sequence[str]) -> _Header:
    raw = _json_object(line)
    if raw is None or "results" not in raw:
        raise Hostile(f"it begins with {line[:80]!r}")
    if raw["results"] != VERSION:
        raise Hostile(f"it has version {raw['results']!r}, this program reads {VERSION}")
    entries, files, size = (_count(raw, key) for key in ("entries", "files", "bytes"))
    roots = _texts(raw.get("roots"))
    for root in roots:
        if "\0" in root or not {"", ".", ".."}.isdisjoint(root.split("/")):
            raise Hostile(f"{root!r} is not a plain path")
        if not wanted(root, outputs):
            raise Hostile(f"nobody asked for {root!r}")
    if len(set(roots)) != len(roots) or any(up in set(roots) for r in roots for up in above(r)):
        raise Hostile("its outputs lie in one another")
    missing, left_out = _texts(raw.get("missing")), _reasons(raw.get("left_out"))
    return _Header(roots, entries, files, size, missing, left_out)


def _parse_end(line: bytes, digest: str) -> Mapping[str, str]:
    """Check the last line; returns which files changed."""
    raw = _json_object(line)
    if raw is None or raw.get("end") != 1:
        raise Hostile(f"instead of its end mark, {line[:80]!r} follows")
    if raw.get("sha256") != digest:
        raise Hostile("it does not have the digest that its end mark names")
    return _reasons(raw.get("changed"))


def _json_object(line: bytes) -> dict[str, Any] | None:
    try:
        raw = json.loads(line.decode("ascii"))
    except (ValueError, RecursionError):
        return None
    return raw if isinstance(raw, dict) else None


def _count(raw: Mapping[str, Any], key: str) -> int:
    number = raw.get(key)
    if type(number) is not int or not 0 <= number < _COUNT_LIMIT:
        raise Hostile(f"it announces {str(number)[:80]} {key}")
    return number


def _texts(raw: object) -> tuple[str, ...]:
    if not isinstance(raw, list) or not all(isinstance(one, str) for one in raw):
        raise Hostile(f"a list of names was expected, not {str(raw)[:80]!r}")
    return tuple(raw)


def _reasons(raw: object) -> dict[str, str]:
    if not isinstance(raw, dict) or not all(isinstance(one, str) for one in raw.values()):
        raise Hostile(f"names with reasons were expected, not {str(raw)[:80]!r}")
    return raw


def _require_room(target: str, header: _Header, source: str) -> None:
    """Refuse before anything is written.

    Raises:
        NodeError: the target does not exist, cannot be written, or has too little room.
    """
    if not os.path.isdir(target):
        reasons = ["it is not a directory" if os.path.exists(target) else "it does not exist"]
    else:
        # Nothing is run from there.
        facts = replace(facts_of(target), noexec=False)
        needed = header.bytes + header.entries * _HALF_BLOCK
        reasons = refusals(facts, needed, header.entries + _SPARE_INODES if header.entries else 0)
        if not facts.read_only and not os.access(target, os.W_OK | os.X_OK):
            reasons.append("this user may not write to it")
    if reasons:
        raise NodeError(
            Problem(
                what="the results do not fit" if os.path.isdir(target) else "no place for results",
                where=target,
                why="; ".join(reasons),
                fix=f"make room there; {counted(header.files, 'file')} still at {source}",
            )
        )
