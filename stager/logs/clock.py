"""When the lines of a log were said: by the driver's order of pieces, or by their own stamps."""

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
"""Seconds since the epoch that no job has seen."""
_HEAD = 256
"""A stamp stands near the beginning of its line."""


def stamp(line: bytes, year: int) -> float | None:
    """The time that a line says it is from, in seconds since the epoch; None where it has none.

    Stamps have no time zone; this machine's is taken.

    Args:
        line: without its end.
        year: of those that do not say one.
    """
    for pattern in _STAMPS:
        found = pattern.search(line, 0, _HEAD)
        if found is None:
            continue
        groups = found.groupdict()
        hour, minute, second = (int(part) for part in groups["clock"].split(b":"))
        date = int(groups.get("year") or year), int(groups["month"]), int(groups["day"])
        part = float(b"0." + groups["part"]) if groups.get("part") else 0.0
        try:
            # A stamp is in its machine's own zone, which it does not say.
            return datetime(*date, hour, minute, second).timestamp() + part
        except (OverflowError, ValueError):
            return None
    return None


@dataclass(frozen=True)
class Pieces:
    """When a log grew: where each piece ends, and its time."""

    ends: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    def at(self, offset: int) -> float | None:
        """When the byte at an offset was written; None behind the last piece."""
        place = bisect.bisect_right(self.ends, offset)
        return self.times[place] if place < len(self.times) else None


class Clock:
    """Tells when a line of a job's logs was said."""

    def __init__(self, files: JobFiles) -> None:
        """Read the driver's order of pieces, if there is one."""
        self._pieces = _order(files.order) if files.job_id else {}

    def pieces(self, log: LogFile) -> Pieces | None:
        """The pieces of a log; None where nobody kept them."""
        return self._pieces.get((log.node, log.rank)) if log.own else None


def _order(path: Path) -> Mapping[tuple[str, int | None], Pieces]:
    found: dict[tuple[str, int | None], Pieces] = defaultdict(Pieces)
    try:
        with opened(path) as handle:
            for line in handle:
                if (piece := piece_of(line)) is None:
                    break  # an order that breaks off is good as far as it goes
                at, who, size = piece
                pieces = found[who]
                pieces.ends.append((pieces.ends[-1] if pieces.ends else 0) + size)
                pieces.times.append(at)
    except OSError:
        pass
    return found


def piece_of(line: bytes) -> tuple[float, tuple[str, int], int] | None:
    """A line of the order: time, node and task, bytes; None for one that cannot be true."""
    try:
        said, node, task, length = line.decode().split("\t")
        at, who, size = float(said), (node, int(task)), int(length)
    except ValueError:
        return None
    return (at, who, size) if 0 <= at < _LATEST and 0 <= size < 1 << 62 else None


def year_of(path: Path) -> int:
    """The year in which a file was written last."""
    try:
        return time.localtime(path.stat().st_mtime).tm_year
    except OSError:
        return time.localtime().tm_year
