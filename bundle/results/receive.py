"""Receiving results: the stream from a node, unpacked where the job was started.

Nothing in the stream (:mod:`bundle.results.stream`) is trusted: only outputs that were asked for
are accepted, no path or link leads out of them, devices are refused, and nothing may be
longer than was announced. :mod:`bundle.results.publish` puts what came in its place: where a file
would be lost, as ``out.1``; of a truncated stream, the whole files as ``out.partial``.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field, replace
from typing import IO, cast

from ..format.manifest import BLOCK
from ..node.node_root import hold_directory
from ..protocol.counts import format_count
from ..protocol.dataclass import dataclass
from ..protocol.problem import NodeError, Problem, ProblemCode
from ..system.files import error_text, examine_directory, list_refusals
from .patterns import is_wanted, list_parents
from .publish import ResultsWriter, SentEntries, remove_abandoned
from .stream import (
    CHUNK,
    LINE_LIMIT,
    InvalidStream,
    StreamEnd,
    StreamHead,
    limit_reasons,
    read_end,
    read_head,
)

_NAME_LIMIT = 64 << 10  # bytes of a long name; Linux accepts no path over 4096
_HALF_BLOCK = 2048  # bytes that a file wastes on average in blocks of 4 KiB
_SPARE_INODES = 16


@dataclass(frozen=True)
class Received:
    """The results that have been received."""

    complete: bool  # true if all that was announced has arrived; else names end with ``.partial``
    files: int = 0
    bytes: int = 0  # bytes of the regular files that arrived in full
    names: frozenset[str] = frozenset()  # files and links that arrived, by their paths on the node
    placed: tuple[str, ...] = ()  # the outputs as they are named now, relative to the target
    renamed: Mapping[str, str] = field(default_factory=dict)  # outputs with another name, that name
    missing: tuple[str, ...] = ()  # outputs that the node did not have
    left_out: Mapping[str, str] = field(default_factory=dict)  # paths, with the reason
    changed: Mapping[str, str] = field(default_factory=dict)  # paths, with what happened meanwhile
    gaps: int = 0  # files and directories that the node could not read, or not to their end
    removed: int = 0  # files that were removed, as the job has deleted them
    problems: tuple[Problem, ...] = ()  # the reasons why it is not complete, or was put elsewhere


def receive_outputs(
    stream: IO[bytes],
    target: str,
    outputs: Sequence[str],
    source: str = "the node",
    sent: SentEntries | None = None,
    joined: Mapping[str, str] | None = None,
) -> Received:
    """Unpack the stream that :func:`.stream.send_outputs` sends into a directory.

    Where it ends early, is damaged, or the disk fills up, the files that arrived in full are kept,
    and the result says so. Where no stream begins there, or it does not fit, NodeError comes before
    anything is written. ``source`` is the sender's name, for messages; ``sent`` what was sent to
    the nodes before the job; ``joined`` names that outputs of the same job have got already.
    """
    reader = _Reader(stream)
    try:
        header = read_head(reader.line())
        _check_roots(header.roots, outputs)
    except (_Truncated, InvalidStream) as exc:
        raise NodeError(Problem(ProblemCode.NO_RESULTS, source, {"why": str(exc)})) from exc
    remove_abandoned(target)
    _require_room(target, header, source)
    writer = ResultsWriter(target, header.roots, sent or {}, joined or {})
    try:
        problem, end = _unpack(reader, writer, header, target, source)
        complete = problem is None and not writer.left_out
        # Who puts earlier results on a node holds its directory already.
        with hold_directory(target) if sent is not None else contextlib.nullcontext():
            writer.publish(complete=complete)
            removed = 0
            if complete and not (end.gaps or writer.problems):
                removed = writer.remove_deleted(end.deleted, header.missing)
        return Received(
            complete=complete,
            files=writer.files,
            bytes=writer.bytes,
            names=frozenset(writer.names),
            placed=tuple(writer.placed),
            renamed=writer.renamed,
            missing=header.missing,
            left_out=limit_reasons({**header.left_out, **writer.left_out}),
            changed=end.changed,
            gaps=end.gaps,
            removed=removed,
            problems=(*([problem] if problem else []), *writer.problems),
        )
    finally:
        writer.discard()


class _Truncated(Exception):
    """The stream ended before its end mark; the text is the reason."""


class _Reader:
    """The stream: two lines and, between them, a file that ``tarfile`` reads from front to back."""

    def __init__(self, stream: IO[bytes]) -> None:
        # read1 returns the bytes that are available, rather than waiting for a whole chunk.
        self._read = getattr(stream, "read1", stream.read)
        self._buffer = memoryview(b"")
        self._place = 0
        self.digest = hashlib.sha256()  # of what has been read of the tar

    def line(self) -> bytes:
        line = bytearray()
        while True:
            self._fill()
            piece = bytes(self._buffer)
            end = piece.find(b"\n")
            line += piece if end < 0 else piece[:end]
            if len(line) > LINE_LIMIT:
                raise InvalidStream(f"a line has more than {LINE_LIMIT} bytes")
            self._buffer = self._buffer[len(piece) if end < 0 else end + 1 :]
            if end >= 0:
                return bytes(line)

    def pieces(self, count: int) -> Iterator[memoryview]:
        while count:
            self._fill()
            piece, self._buffer = self._buffer[:count], self._buffer[count:]
            self.digest.update(piece)
            self._place += len(piece)
            count -= len(piece)
            yield piece

    def read(self, count: int) -> bytes:
        return b"".join(self.pieces(count))

    def tell(self) -> int:
        return self._place

    def seek(self, place: int) -> None:
        for _ in self.pieces(place - self._place):
            pass

    def _fill(self) -> None:
        if self._buffer:
            return
        try:
            data = self._read(CHUNK)
        except OSError as exc:
            raise _Truncated(f"it cannot be read: {exc.strerror or exc}") from exc
        if not data:
            raise _Truncated("it ended before its end mark")
        self._buffer = memoryview(data)


def _unpack(
    reader: _Reader, writer: ResultsWriter, header: StreamHead, target: str, source: str
) -> tuple[Problem | None, StreamEnd]:
    """Unpack the tar; return why it is incomplete, and the end mark, an empty one if it is."""
    end = StreamEnd(end=1, sha256="", changed={}, gaps=0)
    code, where = ProblemCode.RESULTS_INCOMPLETE, source
    try:
        for info in _members(reader, header):
            writer.add(info, reader.pieces(info.size))
        digest = reader.digest.hexdigest()
        read = read_end(reader.line())
        if read.sha256 != digest:
            raise InvalidStream("it does not have the digest that its end mark names")
        end, why = read, ""
    except _Truncated as exc:
        why = f"the stream was cut: {exc}"
    except InvalidStream as exc:
        why = f"the stream is damaged: {exc}"
    except OSError as exc:
        code, where, why = ProblemCode.RESULTS_CUT_BY_DISK, target, error_text(exc)
    if not why and writer.left_out:
        name, reason = next(iter(writer.left_out.items()))
        where, why = target, f"{len(writer.left_out)} could not be written: {name}: {reason}"
    return Problem(code, where, {"why": why}) if why else None, end


class _Member(tarfile.TarInfo):
    """A header of the tar, refused before ``tarfile`` reads what it announces."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _Member:
        info = super().frombuf(buf, encoding, errors)
        if info.size < 0:
            raise InvalidStream(f"{info.name!r} has a negative length")
        if info.type in (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK):
            if info.size > _NAME_LIMIT:
                raise InvalidStream("a name is too long")
        elif info.type not in (tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE):
            raise InvalidStream(f"{info.name!r} is neither a directory, a file nor a symbolic link")
        elif info.type != tarfile.REGTYPE and info.size:
            raise InvalidStream(f"{info.name!r} is not a file, but has content")
        return info


def _members(reader: _Reader, header: StreamHead) -> Iterator[tarfile.TarInfo]:
    """Yield the tar's members, at most as many as announced; the caller may read their content."""
    entries = files = size = 0
    try:
        tar = tarfile.TarFile(fileobj=cast("IO[bytes]", reader), tarinfo=_Member, encoding="utf-8")
        for info in tar:
            tar.members.clear()  # type: ignore[attr-defined]  # else it keeps them all
            entries += 1
            files += info.isreg()
            size += info.size
            if entries > header.entries or files > header.files or size > header.bytes:
                raise InvalidStream(f"{info.name!r} is more than was announced")
            yield info
    except (tarfile.TarError, RecursionError) as exc:  # the latter: long names without end
        raise InvalidStream(f"the header of a member cannot be read: {exc}") from exc
    if reader.read(BLOCK) != bytes(BLOCK):
        raise InvalidStream("the end mark of the tar is damaged")


def _check_roots(roots: Sequence[str], outputs: Sequence[str]) -> None:
    for root in roots:
        if "\0" in root or not {"", ".", ".."}.isdisjoint(root.split("/")):
            raise InvalidStream(f"{root!r} is not a plain path")
        if not is_wanted(root, outputs):
            raise InvalidStream(f"nobody asked for {root!r}")
    distinct = set(roots)
    nested = any(not distinct.isdisjoint(list_parents(root)) for root in roots)
    if nested or len(distinct) != len(roots):
        raise InvalidStream("its outputs lie in one another")


def _require_room(target: str, header: StreamHead, source: str) -> None:
    code = ProblemCode.RESULTS_TOO_LARGE
    if os.path.isdir(target):
        facts = replace(examine_directory(target), noexec=False)  # nothing is run from there
        needed_bytes = header.bytes + header.entries * _HALF_BLOCK
        needed_inodes = header.entries + _SPARE_INODES if header.entries else 0
        reasons = list_refusals(facts, needed_bytes, needed_inodes)
        if not facts.read_only and not os.access(target, os.R_OK | os.W_OK | os.X_OK):
            reasons.append("this user may not write to it")
    else:
        code = ProblemCode.NO_PLACE_FOR_RESULTS
        reasons = ["it is not a directory" if os.path.exists(target) else "it does not exist"]
    if reasons:
        files = format_count(header.files, "file")
        values = {"why": "; ".join(reasons), "files": files, "source": source}
        raise NodeError(Problem(code, target, values))
