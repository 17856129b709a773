"""The lines of a job's logs, each with its time, node and rank."""

from __future__ import annotations

import collections
import json
import os
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from ..core.files import opened
from .clock import piece_of, stamp, year_of
from .files import JobFiles, LogFile
from .prefixes import parse_line, show_as_terminal
from .suspects import Open, Suspects

_MARK = re.compile(r"^(?:.{0,160}it/s.{0,60}?)?\[rank(\d{1,7})\]: ?")
"""Torch's mark of a rank's lines, which is shown in front anyway; a progress bar may precede it."""
_PARTS_OF_MARKS = (": ", "]:", ":[", "<std", "pid=", "[rank", "[pod/", "] ", '{"')
_LONGEST_PREFIX = 120
_EVENT = b'{"v": '
_OPEN = 200
"""Files that are kept open at a time: fewer than any limit of open files."""
_BLOCK = 1 << 16
_STAMP_LINES = 400
"""Lines among which a time is looked for, above one that has none."""


@dataclass(frozen=True, order=True)
class Line:
    """One line of a job's logs; they are in order by time, then by file and place in it."""

    time: float
    """The time, in seconds since the epoch; 0 if unknown."""
    path: Path
    """Its file."""
    number: int
    """Its number there, from 1."""
    text: str = field(compare=False)
    """The line, without its end."""
    node: str = field(compare=False)
    """The node; empty if unknown."""
    rank: int | None = field(compare=False)
    """The rank; None if unknown."""

    @property
    def who(self) -> str:
        """Node and rank, as far as they are known, else the file's name."""
        rank = "" if self.rank is None else str(self.rank)
        return " ".join(part for part in (self.node, rank) if part) or self.path.name


class LogReader:
    """One log, read further and further.

    Attributes:
        log: the file.
        time: the time of its last line, as far as it is known; it never goes back.
    """

    def __init__(self, log: LogFile, suspects: Suspects | None = None) -> None:
        """Start at the beginning; ``suspects`` selects lines, None all."""
        self.log = log
        self._suspects = suspects
        self._open: list[Open] = []
        self.time = 0.0
        self._number = 0
        self._offset = 0
        self._held = b""
        self._year = year_of(log.path)

    def take(self, raws: Sequence[bytes], time: float | None = None) -> Iterator[Line]:
        """Yield the file's next lines; all get the time, None uses their own stamps."""
        wanted = self._wanted(raws)
        skipped = 0
        for at, raw in enumerate(raws):
            self._number += 1
            if wanted is not None and at not in wanted:
                skipped += 1
                continue
            if raw.startswith(_EVENT):  # in a batch job's own log: the ranks' have what it tells
                self._advance(_time_of(raw))
                continue
            # Of lines that are skipped, the last one with a time tells it.
            behind = raws[at - min(skipped, _STAMP_LINES) : at + 1]
            skipped = 0
            self._advance(time if time is not None else self._stamp(behind))
            yield self._line(raw)

    def _advance(self, time: float | None) -> None:
        """Set the time, which never goes back."""
        if time is not None:
            self.time = max(self.time, time)

    def _line(self, raw: bytes) -> Line:
        text = show_as_terminal(_last_state(raw).decode(errors="replace"))
        rank, node = self.log.rank, self.log.node
        if not self.log.own:
            rank, node = _writer_of(text, self.log)
        if marked := _MARK.match(text):
            rank, text = int(marked[1]), text[marked.end() :]
        return Line(self.time, self.log.path, self._number, text, node, rank)

    def _wanted(self, raws: Sequence[bytes]) -> Collection[int] | None:
        if self._suspects is None:
            return None
        wanted, self._open = self._suspects.among(raws, self._open)
        return wanted

    def _stamp(self, raws: Sequence[bytes]) -> float | None:
        times = (stamp(raw, self._year) for raw in reversed(raws))
        return next((time for time in times if time is not None), None)

    def rest(self, *, whole: bool = False, time: float | None = None) -> Iterator[Line]:
        """Yield the remaining lines; ``whole`` keeps an unfinished last one for the next call."""
        while True:
            try:  # opened for each block: there may be more files than may be open
                with opened(self.log.path) as handle:
                    handle.seek(self._offset)
                    raws = handle.readlines(_BLOCK)
            except OSError:
                return
            if whole and raws and not raws[-1].endswith(b"\n"):
                raws.pop()
            if not raws:
                if self._held and not whole:
                    raws, self._held = [self._held], b""
                    yield from self.take(raws, time)
                return
            self._offset += sum(map(len, raws))
            raws[0], self._held = self._held + raws[0], b""
            yield from self.take(raws, time)

    def piece(self, handle: BinaryIO, size: int, time: float) -> Iterator[Line]:
        """Yield the lines that the next bytes end; these were all written at one time.

        A progress bar grows by many pieces and has no end of a line: its last state is kept.
        """
        handle.seek(self._offset)
        *whole, rest = handle.read(size).split(b"\n")
        self._offset += sum(map(len, whole)) + len(whole) + len(rest)
        if whole:
            whole[0], self._held = self._held + whole[0], b""
        self._held = _last_state(self._held + rest)
        yield from self.take([raw + b"\n" for raw in whole], time)


def _last_state(raw: bytes) -> bytes:
    """Return what a terminal shows last of a line that a progress bar overwrites."""
    return raw[raw.rstrip(b"\r\n").rfind(b"\r") + 1 :] if b"\r" in raw else raw


def _writer_of(text: str, log: LogFile) -> tuple[int | None, str]:
    """Return rank and node of a line, by its prefixes, else by its file's name."""
    head = text[:_LONGEST_PREFIX]
    if not any(part in head for part in _PARTS_OF_MARKS):  # most lines; parsing takes longer
        return log.rank, log.node
    line = parse_line(text)
    rank = log.rank if line.rank is None else line.rank
    if rank is None and line.local_rank is None:
        rank = line.task
    return rank, line.node or log.node


def in_order(
    files: JobFiles, logs: Iterable[LogFile], suspects: Suspects | None = None
) -> Iterator[Line]:
    """Yield the lines of the logs whose pieces the driver has put in order, piece after piece.

    The rest of each log, beyond its pieces, follows at the end.
    """
    readers = [LogReader(log, suspects) for log in logs if log.own]
    yield from piece_by_piece(files, readers)
    for reader in readers:
        yield from reader.rest()


def piece_by_piece(files: JobFiles, readers: Iterable[LogReader]) -> Iterator[Line]:
    """Yield the lines of all pieces of which the driver has kept the order so far."""
    known = {(reader.log.node, reader.log.rank): reader for reader in readers}
    with _Open() as handles:
        for time, who, size in _pieces(files.order):
            reader = known.get(who)
            if reader is not None and (handle := handles.get(reader.log.path)) is not None:
                yield from reader.piece(handle, size, time)


def _pieces(order: Path) -> Iterator[tuple[float, tuple[str, int], int]]:
    try:
        handle = opened(order)
    except OSError:
        return
    with handle:
        for line in handle:
            if (piece := piece_of(line)) is None:
                return  # of a driver that was killed
            yield piece


class _Open:
    def __init__(self) -> None:
        self._handles: collections.OrderedDict[Path, BinaryIO] = collections.OrderedDict()

    def __enter__(self) -> _Open:
        return self

    def __exit__(self, *exc: object) -> None:
        for handle in self._handles.values():
            handle.close()

    def get(self, path: Path) -> BinaryIO | None:
        if path in self._handles:
            self._handles.move_to_end(path)
            return self._handles[path]
        try:
            handle = opened(path)
        except OSError:
            return None
        self._handles[path] = handle
        if len(self._handles) > _OPEN:
            self._handles.popitem(last=False)[1].close()
        return handle


def _time_of(raw: bytes) -> float:
    try:
        return float(json.loads(raw)["time"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return 0.0


def last_lines(path: Path, count: int) -> tuple[str, ...]:
    """Return the last lines of a file, from no more than its last block; none if it is empty."""
    try:
        with opened(path) as handle:
            handle.seek(max(0, os.fstat(handle.fileno()).st_size - _BLOCK))
            lines = handle.read().decode(errors="replace").rstrip("\r\n").split("\n")
    except OSError:
        return ()
    return tuple(filter(None, map(show_as_terminal, lines[-count:])))


def numbered(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a file with their numbers, from 1; none of one that cannot be read."""
    try:
        with path.open(encoding="utf-8", errors="replace", newline="\n") as handle:
            for number, line in enumerate(handle, start=1):
                yield number, line.rstrip("\n")
    except OSError:
        return
