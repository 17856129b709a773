"""The times of a log's lines: from the driver's order of pieces, or from their own stamps."""

from __future__ import annotations

import bisect
import re
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from ..core.regular_files import opened
from .files import JobFiles, LogFile

_STAMPS = (
    # torch and glog: E1122 05:21:32.123456 4711 ..., [W1122 05:21:32.123456789 file.cpp:1] ...
    re.compile(
        rb"\b[IWEF](?P<month>\d\d)(?P<day>\d\d) (?P<clock>\d\d:\d\d:\d\d)(?:\.(?P<part>\d+))?"
    ),
    # ISO 8601, logging's default, torchrun's report (with an underscore)
    re.compile(
        rb"(?P<year>20\d\d)[-/](?P<month>\d\d)[-/](?P<day>\d\d)[ T_](?P<clock>\d\d:\d\d:\d\d)"
        rb"(?:[.,](?P<part>\d+))?"
    ),
    # transformers: 11/22/2026 05:21:32
    re.compile(
        rb"\b(?P<month>\d\d)/(?P<day>\d\d)/(?P<year>20\d\d) (?P<clock>\d\d:\d\d:\d\d)"
    ),
)  # fmt: skip
_LATEST = 1e11
"""An upper limit for times, in seconds since the epoch."""
_HEAD = 256
"""A stamp stands near the beginning of its line."""


def stamp(line: bytes, year: int) -> float | None:
    """Return a line's time stamp, in seconds since the epoch; None where it has none.

    Stamps have no time zone; this machine's is taken.

    Args:
        line: without its end.
        year: the year of stamps that do not name one.
    """
    for pattern in _STAMPS:
        match = pattern.search(line, 0, _HEAD)
        if match is not None:
            return _seconds(match.groupdict(default=b""), year)
    return None


def _seconds(groups: Mapping[str, bytes], year: int) -> float | None:
    """Return the time of a stamp's parts; None for one that cannot be."""
    hour, minute, second = map(int, groups["clock"].split(b":"))
    date = int(groups.get("year", year)), int(groups["month"]), int(groups["day"])
    fraction = groups.get("part")
    try:
        # A stamp is in its machine's own zone, which it does not name.
        whole = datetime(*date, hour, minute, second).timestamp()
    except (OverflowError, ValueError):
        return None
    return whole + float(b"0." + fraction) if fraction else whole


@dataclass(frozen=True)
class Pieces:
    """The growth of a log: the end of each piece, and its time."""

    ends: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    def at(self, offset: int) -> float | None:
        """Return when the byte at an offset was written; None behind the last piece."""
        place = bisect.bisect_right(self.ends, offset)
        return self.times[place] if place < len(self.times) else None


class Clock:
    """The times of the lines of a job's logs."""

    def __init__(self, files: JobFiles) -> None:
        """Read the driver's order of pieces, if there is one."""
        self._pieces = _order(files.order) if files.job_id else {}

    def pieces(self, log: LogFile) -> Pieces | None:
        """Return the pieces of a log; None where nobody kept them."""
        return self._pieces.get((log.node, log.rank)) if log.own else None


def _order(path: Path) -> Mapping[tuple[str, int | None], Pieces]:
    by_author: dict[tuple[str, int | None], Pieces] = defaultdict(Pieces)
    try:
        with opened(path) as handle:
            for line in handle:
                piece = piece_of(line)
                if piece is None:
                    break  # an order that breaks off is good as far as it goes
                at, author, size = piece
                pieces = by_author[author]
                pieces.ends.append((pieces.ends[-1] if pieces.ends else 0) + size)
                pieces.times.append(at)
    except OSError:
        pass
    return by_author


def piece_of(line: bytes) -> tuple[float, tuple[str, int], int] | None:
    """Parse a line of the order: time, node and task, bytes; None for one that cannot be true."""
    try:
        time, node, task, length = line.decode().split("\t")
        at, author, size = float(time), (node, int(task)), int(length)
    except ValueError:
        return None
    if not 0 <= at < _LATEST or not 0 <= size < 1 << 62:
        return None
    return at, author, size


def year_of(path: Path) -> int:
    """Return the year in which a file was written last."""
    try:
        return time.localtime(path.stat().st_mtime).tm_year
    except OSError:
        return time.localtime().tm_year
