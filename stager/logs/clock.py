"""The times of a log's lines: from the driver's order of pieces, or from their own stamps."""

from __future__ import annotations

import bisect
import re
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from pathlib import Path

from ..core.files import opened
from .files import JobFiles, LogFile
from .prefixes import show_block_as_terminal

_CLOCK = re.compile(
    rb"(?<!\d)(?P<hour>\d\d?):(?P<minute>\d\d):(?P<second>\d\d)(?:[.,](?P<part>\d+))?"
    rb"(?:(?P<zone>Z|[+-]\d\d:?\d\d)(?![\d:])|(?: (?P<utc>UTC))?(?: (?P<late_year>20\d\d))?)"
)
_MONTHS = b"Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec"
_DATES = (
    # ISO 8601, logging's default, torchrun's report (with an underscore)
    re.compile(rb"(?P<year>20\d\d)[-/.](?P<month>\d\d)[-/.](?P<day>\d\d)[ T_]$"),
    # torch and glog: E1122 05:21:32.123456 4711 ...; in C++ [W304 05:21:32.1 file.cpp:1] is March
    re.compile(rb"\b[IWEFVC](?P<month>\d\d?)(?P<day>\d\d) $"),
    # transformers: 11/22/2026 05:21:32; rich: 11/22/26; detectron2 and vLLM: 11/22, 11-22
    re.compile(rb"\b(?P<month>\d\d?)/(?P<day>\d\d?)/(?:20)?(?P<short_year>\d\d),? $"),
    re.compile(rb"(?<![\d/-])(?P<month>\d\d)[-/](?P<day>\d\d) $"),
    # syslog, date, Open MPI: Nov 22 05:21:32, Sun Nov 22 05:21:32 UTC 2026
    re.compile(rb"\b(?P<name>" + _MONTHS + rb") {1,2}(?P<day>\d\d?) $"),
)  # fmt: skip
_LONGEST_DATE = 16
_EPOCH = re.compile(rb"\W{0,2}(?P<whole>1[5-9]\d{8})(?P<part>\.\d{1,9})?(?=[\s\]:,|]|$)")
_EPOCH_IN_JSON = re.compile(rb'"(?:ts|time|timestamp)": ?(?P<whole>1[5-9]\d{8})(?P<part>\.\d+)?')
_LATEST = 1e11
"""An upper limit for times, in seconds since the epoch."""
_HEAD = 256
"""A stamp stands near the beginning of its line; of a JSON object, near its end, too."""


def stamp(line: bytes, year: int) -> float | None:
    """Return a line's time stamp, in seconds since the epoch; None where it has none.

    A stamp without a time zone is in this machine's.
    """
    if b"\x1b" in line:
        line = show_block_as_terminal(line)
    if line.startswith(b"{"):
        line = line[:_HEAD] + b" " + line[-_HEAD:]
    for clock in _CLOCK.finditer(line, 0, 2 * _HEAD if line.startswith(b"{") else _HEAD):
        head = line[max(0, clock.start() - _LONGEST_DATE) : clock.start()]
        date = next(filter(None, (pattern.search(head) for pattern in _DATES)), None)
        if date is not None:
            return _seconds(date.groupdict(), clock.groupdict(), year)
    epoch = _EPOCH_IN_JSON.search(line) if line.startswith(b"{") else _EPOCH.match(line)
    return float(epoch["whole"] + (epoch["part"] or b"")) if epoch else None


def _seconds(
    date: Mapping[str, bytes | None], clock: Mapping[str, bytes | None], year: int
) -> float | None:
    """Return the time of a stamp's parts; None for an impossible date."""
    day, month = int(date["day"] or 0), _month(date)
    try:
        whole = datetime(
            _year(date, clock) or year,
            month,
            day,
            int(clock["hour"] or 0),
            int(clock["minute"] or 0),
            int(clock["second"] or 0),
            tzinfo=_zone(clock),
        ).timestamp()
    except (OverflowError, ValueError):
        return None
    return whole + float(b"0." + (clock["part"] or b"0"))


def _month(date: Mapping[str, bytes | None]) -> int:
    if name := date.get("name"):
        return _MONTHS.split(b"|").index(name) + 1
    return int(date["month"] or 0)


def _year(date: Mapping[str, bytes | None], clock: Mapping[str, bytes | None]) -> int:
    """Return the year of a stamp; 0 if it has none."""
    if short := date.get("short_year"):
        return 2000 + int(short)
    return int(date.get("year") or clock["late_year"] or 0)


def _zone(clock: Mapping[str, bytes | None]) -> timezone | None:
    zone = clock["zone"]
    if clock["utc"] or zone == b"Z":
        return timezone.utc
    if zone is None:
        return None
    minutes = int(zone[1:3]) * 60 + int(zone[-2:])
    return timezone(timedelta(minutes=-minutes if zone.startswith(b"-") else minutes))


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
