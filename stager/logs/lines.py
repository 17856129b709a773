"""The lines of a job's logs, each with its time, node and rank: as one stream, or only errors."""

from __future__ import annotations

import bisect
import collections
import functools
import heapq
import json
import os
import re
import time
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, tzinfo
from pathlib import Path
from typing import NamedTuple

from bundle.protocol.dataclass import dataclass
from bundle.protocol.enumerations import Action
from bundle.regex import compile_lazily

from ..catalogue.catalogue import CatalogueEntry, LineRole, Prefilter, catalogue, match_line
from ..core.errors import StagerError
from ..core.files import open_regular
from .job_files import JobFiles, LogFile
from .job_record import read_events
from .prefixes import (
    TRACEBACK,
    TracebackPrefix,
    parse_line,
    show_block_as_terminal,
    show_line,
)

_CLOCK = compile_lazily(
    rb"(?<!\d)(?P<hour>\d\d?):(?P<minute>\d\d):(?P<second>\d\d)(?:[.,](?P<part>\d+))?"
    rb"(?:(?P<zone>Z|[+-]\d\d:?\d\d)(?![\d:])|(?: (?P<utc>UTC))?(?: (?P<late_year>20\d\d))?)"
)
_MONTHS = b"Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec"
_DATES = (
    # ISO 8601, logging's default, torchrun's report (with an underscore)
    compile_lazily(rb"(?P<year>20\d\d)[-/.](?P<month>\d\d)[-/.](?P<day>\d\d)[ T_]$"),
    # torch and glog: E1122 05:21:32.123456 4711 ...; in C++ [W304 05:21:32.1 file.cpp:1] is March
    compile_lazily(rb"\b[IWEFVC](?P<month>\d\d?)(?P<day>\d\d) $"),
    # transformers: 11/22/2026 05:21:32; rich: 11/22/26; detectron2 and vLLM: 11/22, 11-22
    compile_lazily(rb"\b(?P<month>\d\d?)/(?P<day>\d\d?)/(?:20)?(?P<year>\d\d),? $"),
    compile_lazily(rb"(?<![\d/-])(?P<month>\d\d)[-/](?P<day>\d\d) $"),
    # syslog, date, Open MPI: Nov 22 05:21:32, Sun Nov 22 05:21:32 UTC 2026
    compile_lazily(rb"\b(?P<month>" + _MONTHS + rb") {1,2}(?P<day>\d\d?) $"),
)  # fmt: skip
_LONGEST_DATE = 16
_STAMP_LINES = 400  # lines among which a time is looked for, above one that has none
_EPOCH = compile_lazily(rb"\W{0,2}(?P<whole>1[5-9]\d{8})(?P<part>\.\d{1,9})?(?=[\s\]:,|]|$)")
_EPOCH_IN_JSON = compile_lazily(
    rb'"(?:ts|time|timestamp)": ?(?P<whole>1[5-9]\d{8})(?P<part>\.\d+)?'
)
_LATEST = 1e11  # an upper limit for times, in seconds since the epoch
_HEAD = 256  # a stamp stands near the beginning of its line; of a JSON object, near its end, too


def read_stamp(line: bytes, year: int) -> float | None:
    """Return a line's time, in seconds since the epoch, by default in this machine's zone."""
    if b"\x1b" in line:
        line = show_block_as_terminal(line)
    if line.startswith(b"{"):
        line = line[:_HEAD] + b" " + line[-_HEAD:]
    for clock in _CLOCK.finditer(line, 0, 2 * _HEAD if line.startswith(b"{") else _HEAD):
        head = line[max(0, clock.start() - _LONGEST_DATE) : clock.start()]
        date = next(filter(None, (pattern.search(head) for pattern in _DATES)), None)
        if date is not None:
            return _to_seconds(date, clock, year)
    epoch = _EPOCH_IN_JSON.search(line) if line.startswith(b"{") else _EPOCH.match(line)
    return float(b"".join(filter(None, epoch.groups()))) if epoch else None


def find_stamp(lines: Sequence[bytes], year: int) -> float | None:
    """Return the time stamp of the last of these lines that has one, if it is not far up."""
    times = (read_stamp(line, year) for line in reversed(lines[-_STAMP_LINES:]))
    return next((time for time in times if time is not None), None)


def _to_seconds(date: re.Match[bytes], clock: re.Match[bytes], year: int) -> float | None:
    hour, minute, second, part, zone, utc, late_year = clock.groups()
    month, day = date.group("month", "day")
    told_year = int(date.groupdict().get("year") or late_year or year)
    try:
        whole = datetime(
            told_year if told_year > 99 else 2000 + told_year,
            int(month) if month.isdigit() else _MONTHS.split(b"|").index(month) + 1,
            int(day),
            int(hour),
            int(minute),
            int(second),
            tzinfo=_read_zone(b"Z" if utc else zone),
        ).timestamp()
    except (OverflowError, ValueError):  # an impossible date
        return None
    return whole + float(b"0." + (part or b"0"))


@functools.cache
def _read_zone(zone: bytes | None) -> tzinfo | None:
    return datetime.strptime(zone.decode(), "%z").tzinfo if zone else None


class Pieces(NamedTuple):
    """The growth of a log: the end of each piece, and its time."""

    ends: array[int]
    times: array[float]

    def find_time(self, offset: int) -> float | None:
        """Return when the byte at an offset was written; None behind the last piece."""
        place = bisect.bisect_right(self.ends, offset)
        return self.times[place] if place < len(self.times) else None


def read_order(files: JobFiles) -> Mapping[tuple[str, int | None], Pieces]:
    """Return the pieces of ranks' logs, by node and rank, up to a line that cannot be true."""
    by_author: dict[tuple[str, int | None], Pieces] = collections.defaultdict(
        lambda: Pieces(array("q"), array("d"))
    )
    if not files.job_id:
        return by_author
    with suppress(OSError, ValueError, OverflowError), open_regular(files.order) as handle:
        for line in handle:
            time, node, task, length = line.decode().split("\t")
            at, size = float(time), int(length)
            if not 0 <= at < _LATEST or not 0 <= size < 1 << 62:
                break
            pieces = by_author[node, int(task)]
            pieces.ends.append((pieces.ends[-1] if pieces.ends else 0) + size)
            pieces.times.append(at)
    return by_author


def read_year(path: Path) -> int:
    """Return the year in which a file was written last."""
    with suppress(OSError):
        return time.localtime(path.stat().st_mtime).tm_year
    return time.localtime().tm_year


# --- The lines that may belong to errors, so that no others of long logs need be read ------------

WORDS = ("error", "fatal", "critical", "exception", "panic", "slurmstepd:", "srun:")
_DIGITS = b"0123456789"
_CLOSING = compile_lazily(r"[A-Za-z_][\w.]*(?::|\s*$)")
"""The beginning of the line that ends a traceback: the exception, which is not indented."""
_LINE_BYTES = 2_000
_WINDOW = 1_000
"""Lines that may follow the one that begins a traceback; other ranks' may be among them."""

OpenTrace = tuple[TracebackPrefix, int]
"""A traceback that has not ended: the prefix of its lines, and how many lines may follow."""


class Suspects:
    """Picks lines; one for all logs of a job, as it remembers words."""

    def __init__(self) -> None:
        needles = (entry.needle for entry in catalogue())
        self._prefilter = Prefilter(text.lower() for text in (*WORDS, TRACEBACK, *needles))

    def pick(
        self, raws: Sequence[bytes], before: Sequence[OpenTrace]
    ) -> tuple[Collection[int], list[OpenTrace]]:
        """Return the places of the lines to look at, and the tracebacks that they leave open."""
        lines = _show_as_terminal(raws)
        shapes = b"\n".join(lines).lower().translate(None, _DIGITS).split(b"\n") if lines else []
        _, suspected = self._prefilter.find(shapes)
        places, still_open = set(suspected), []
        ends: dict[object, int] = {}
        traces = [(0, prefix, left) for prefix, left in before]
        for at in suspected:
            if TRACEBACK.encode() in lines[at]:
                first, below = map(_decode, (*lines[at : at + 2], b"")[:2])
                traces.append((at + 1, TracebackPrefix(first, below), _WINDOW))
        for start, prefix, left in traces:
            if start < ends.get(prefix.writer_key, 0):
                continue  # it belongs to the one that is open
            stop = min(start + left, len(lines))
            end = _find_end(lines, start, stop, prefix)
            if end is None and left > stop - start:
                still_open.append((prefix, left - (stop - start)))
            ends[prefix.writer_key] = stop if end is None else end
            places.update(range(start, ends[prefix.writer_key]))
        return places, still_open


def _find_end(lines: Sequence[bytes], start: int, stop: int, prefix: TracebackPrefix) -> int | None:
    for at in range(start, stop):
        text = prefix.strip(_decode(lines[at]))
        if text and _CLOSING.match(text):
            return at + 1
    return None


def _decode(line: bytes) -> str:
    return line[:_LINE_BYTES].decode(errors="replace")


def _show_as_terminal(raws: Sequence[bytes]) -> list[bytes]:
    shown = show_block_as_terminal(b"".join(raws)).split(b"\n")
    if raws and len(shown) == len(raws) + raws[-1].endswith(b"\n"):
        return shown[: len(raws)]
    return [show_block_as_terminal(raw) for raw in raws]  # some end otherwise


# --- The lines of a job's logs, each with its time, node and rank --------------------------------

_MARK = compile_lazily(r"^(?:.{0,160}it/s.{0,60}?)?\[rank(\d{1,7})\]: ?")
"""Torch's mark of a rank's lines, which is shown in front anyway; a progress bar may precede it."""
_PARTS_OF_MARKS = (": ", "]:", ":[", "<std", "pid=", "[rank", "[pod/", "] ", '{"')
_LONGEST_PREFIX = 120
_EVENT = b'{"v": '
_BLOCK = 1 << 16


class Line(NamedTuple):
    """One line of a job's logs, in order by time, then by file; 0, empty or None: unknown."""

    time: float
    path: Path
    number: int  # its number there, from 1
    text: str
    node: str
    rank: int | None

    @property
    def writer(self) -> str:
        """Node and rank, as far as they are known, else the file's name."""
        rank = "" if self.rank is None else str(self.rank)
        return " ".join(part for part in (self.node, rank) if part) or self.path.name


class LogReader:
    """One log, read further and further; ``suspects`` selects lines, None all."""

    def __init__(
        self,
        log: LogFile,
        suspects: Suspects | None = None,
        pieces: Pieces | None = None,
        block: int = _BLOCK,
        end: float = 0.0,
    ) -> None:
        self.log = log
        self._time = 0.0  # of its last line, as far as it is known; it never goes back
        self._suspects, self._pieces, self._block = suspects, pieces, block
        self._end = end  # the time of what has neither a piece nor a stamp
        self._open: list[OpenTrace] = []
        self._number = self._offset = 0
        self._year = read_year(log.path)

    def read_rest(self, *, whole: bool = False, time: float | None = None) -> Iterator[Line]:
        """Yield the remaining lines, with a time of None by their pieces, else their own stamps.

        ``whole`` keeps an unfinished last one for the next call.
        """
        while raws := self._read_block(whole):
            sizes = [*map(len, raws)]
            if self._pieces:  # no stamp is looked for: of hours of a progress bar the last will do
                raws = [
                    raw if len(raw) < _BLOCK else raw[raw.rstrip(b"\r\n").rfind(b"\r") + 1 :]
                    for raw in raws
                ]
            wanted: Collection[int] = range(len(raws))
            if self._suspects is not None:
                wanted, self._open = self._suspects.pick(raws, self._open)
            skipped = 0
            for at, raw in enumerate(raws):
                self._number += 1
                self._offset += sizes[at]
                if at not in wanted:
                    skipped += 1
                elif raw.startswith(_EVENT):  # in a batch job's own log: the ranks' have it, too
                    self._time = max(self._time, _read_event_time(raw))
                else:
                    above, skipped = raws[at - skipped : at + 1], 0
                    self._time = max(self._time, self._find_time(above) if time is None else time)
                    yield self._make_line(raw)

    def _read_block(self, whole: bool) -> list[bytes]:
        try:  # opened for each block: there may be more files than may be open
            with open_regular(self.log.path) as handle:
                handle.seek(self._offset)
                raws = handle.readlines(self._block)
        except OSError:
            return []
        return raws[:-1] if whole and raws and not raws[-1].endswith(b"\n") else raws

    def _find_time(self, raws: Sequence[bytes]) -> float:
        if self._pieces and (time := self._pieces.find_time(self._offset - 1)) is not None:
            return time
        return find_stamp(raws, self._year) or self._end

    def _make_line(self, raw: bytes) -> Line:
        text = show_line(raw)
        rank, node = self.log.rank, self.log.node
        if not self.log.own:
            rank, node = _find_writer(text, self.log)
        if marked := _MARK.match(text):
            rank, text = int(marked[1]), text[marked.end() :]
        return Line(self._time, self.log.path, self._number, text, node, rank)


def _find_writer(text: str, log: LogFile) -> tuple[int | None, str]:
    head = text[:_LONGEST_PREFIX]
    if not any(part in head for part in _PARTS_OF_MARKS):  # most lines; parsing takes longer
        return log.rank, log.node
    line = parse_line(text)
    rank = log.rank if line.rank is None else line.rank
    if rank is None and line.local_rank is None:
        rank = line.task
    return rank, line.node or log.node


def _read_event_time(raw: bytes) -> float:
    try:
        time = float(json.loads(raw)["time"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return 0.0
    return time if 0 <= time < _LATEST else 0.0


def read_tail(path: Path, size: int) -> bytes:
    """Return the last bytes of a file; none of one that cannot be read."""
    with suppress(OSError), open_regular(path) as handle:
        handle.seek(max(0, os.fstat(handle.fileno()).st_size - size))
        return handle.read(size)
    return b""


def read_last_lines(path: Path, count: int) -> tuple[str, ...]:
    """Return the last lines of a file, from no more than its last block; none if it is empty."""
    lines = read_tail(path, _BLOCK).rstrip(b"\r\n").split(b"\n")
    return tuple(filter(None, map(show_line, lines[-count:])))


def number_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a file with their numbers, from 1; none of one that cannot be read."""
    with suppress(OSError), path.open(encoding="utf-8", errors="replace", newline="\n") as handle:
        for number, line in enumerate(handle, start=1):
            yield number, line.rstrip("\n")


# --- The lines of a job that belong to errors: each once, without noise --------------------------

_LAUNCHERS = "ChildFailedError"
"""Torchrun's own exception, which says no more than the table after it."""
_CLOSING_ENTRIES = ("closing-signal", "child-failed")
"""Entries of the catalogue for torchrun's lines about ending the other ranks."""
_ERROR = compile_lazily(
    r"\b(?:error|fatal|critical|exception|panic)\b|(?:Error|Exception)\b|^slurmstepd:|^srun: ", re.I
)
_WARNING = compile_lazily(r"Warning: |^\s*warnings\.warn\(|\bWARN(?:ING)?\b|\[W\d{4} ")
_BEGINNING = compile_lazily(r"(?<![\[\\])\^")
_NUMBERS = compile_lazily(r"0x[0-9a-f]+|\d+")
_LONGEST_TRACE = 200


def select_errors(lines: Iterable[Line]) -> Iterator[Line]:
    """Yield the lines that belong to errors: a traceback as a whole, equal ones once."""
    open_traces: dict[tuple[object, ...], _Trace] = {}
    seen: collections.Counter[str] = collections.Counter()
    for line in lines:
        key = (line.path, line.rank)
        trace = open_traces.get(key)
        if trace is not None and trace.take(line):
            if trace.ended:
                del open_traces[key]
                if _LAUNCHERS not in line.text:
                    yield from _skip_repeated(trace.lines, seen)
        elif trace is None and TRACEBACK in line.text:
            open_traces[key] = _Trace(line)
        elif _is_error(line.text):
            yield from _skip_repeated([line], seen)
    for trace in open_traces.values():
        yield from _skip_repeated(trace.lines, seen)


class _Trace:
    def __init__(self, first: Line) -> None:
        self.lines = [first]
        self.ended = False
        self._prefix: TracebackPrefix | None = None

    def take(self, line: Line) -> bool:
        """Add a line; return False if another process wrote it."""
        self._prefix = self._prefix or TracebackPrefix(self.lines[0].text, line.text)
        text = self._prefix.strip(line.text)
        if text is None:
            return False
        self.lines.append(line)
        self.ended = bool(_CLOSING.match(text)) or len(self.lines) > _LONGEST_TRACE
        return True


def _is_error(text: str) -> bool:
    known = match_line(text)
    if known is None and any(entry.needle in text for entry in _list_anchored_entries()):
        known = match_line(parse_line(text).text, _list_anchored_entries())
    if known is not None:
        return known.entry.role != LineRole.NOISE and known.entry.name not in _CLOSING_ENTRIES
    return bool(_ERROR.search(text)) and not _WARNING.search(text)


@functools.cache
def _list_anchored_entries() -> tuple[CatalogueEntry, ...]:
    return tuple(entry for entry in catalogue() if _BEGINNING.search(entry.expression))


def _skip_repeated(group: list[Line], seen: collections.Counter[str]) -> Iterator[Line]:
    shape = "\n".join(_NUMBERS.sub("#", line.text) for line in group)
    seen[shape] += 1
    if seen[shape] == 1:
        yield from group
    elif seen[shape] == 2 and len(group) > 1:
        last = group[-1]
        yield last._replace(text=f"{last.text}  (the same traceback as above, here as well)")


# --- The logs of a job as one stream: by time, each line with its node and rank ------------------

_POLL_SECONDS = 0.5
_MANY = 500  # logs of which smaller blocks are held at a time
_NAMED = 8


class LineFilter(NamedTuple):
    """The choice of lines; empty or None for all."""

    ranks: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()
    pattern: re.Pattern[str] | None = None
    errors: bool = False  # only lines that belong to errors, each once

    def select_logs(self, files: JobFiles) -> list[LogFile]:
        """Return the files that may have such lines."""
        return [
            log
            for log in files.logs
            if (not log.own or self._has_rank(log.rank)) and (not log.node or self._has(log.node))
        ]

    def select(self, lines: Iterator[Line]) -> Iterator[Line]:
        """Return the lines among these that are chosen."""
        lines = (line for line in lines if self._has_rank(line.rank) and self._has(line.node))
        if self.errors:
            lines = select_errors(lines)
        pattern = self.pattern
        return lines if pattern is None else (line for line in lines if pattern.search(line.text))

    def _has_rank(self, rank: int | None) -> bool:
        return not self.ranks or rank in self.ranks

    def _has(self, node: str) -> bool:  # with or without its domain
        return not self.nodes or node in self.nodes or node.partition(".")[0] in self.nodes


def merge_logs(files: JobFiles, wanted: LineFilter) -> Iterator[Line]:
    """Return all chosen lines, by time; refuse a rank or node that no log is of."""
    logs = wanted.select_logs(files)
    # A file of no rank may contain lines of several.
    if not any(log.rank is not None or not wanted.ranks or not log.own for log in logs):
        raise _explain_missing_log(files)
    readers = _make_readers(files, logs, wanted)
    return wanted.select(heapq.merge(*map(LogReader.read_rest, readers)))


def _make_readers(
    files: JobFiles, logs: Sequence[LogFile], wanted: LineFilter
) -> Iterator[LogReader]:
    pick = Suspects() if wanted.errors else None
    order = read_order(files)
    block = _BLOCK if len(logs) < _MANY else _BLOCK // 16
    last = max((pieces.times[-1] for pieces in order.values()), default=0.0)
    for log in logs:
        pieces = order.get((log.node, log.rank)) if log.own else None
        yield LogReader(log, pick, pieces, block, last if log.own else 0.0)


def follow_logs(
    files: Callable[[], JobFiles], wanted: LineFilter, sleep: Callable[[float], None] = time.sleep
) -> Iterator[Line]:
    """Return the chosen lines, then those that are added, in order to within half a second."""

    def read() -> Iterator[Line]:
        readers: dict[Path, LogReader] = {}
        added_at: float | None = None  # lines that exist already have their times
        while True:
            now = files()
            has_ended = bool(now.job_id) and read_events(now.events).result is not None
            if new := [log for log in wanted.select_logs(now) if log.path not in readers]:
                readers.update((each.log.path, each) for each in _make_readers(now, new, wanted))
            rests = []
            for each in readers.values():  # new lines of ranks count as just written
                at = added_at if each.log.own else None
                rests.append(each.read_rest(whole=not has_ended, time=at))
            yield from heapq.merge(*rests)
            if has_ended:
                return
            sleep(_POLL_SECONDS)
            added_at = time.time()

    return wanted.select(read())


def _explain_missing_log(files: JobFiles) -> StagerError:
    if files.logs:
        ranks = {log.rank for log in files.logs if log.rank is not None}
        nodes = sorted({log.node for log in files.logs if log.node})
        hint = f"ranks {min(ranks)} to {max(ranks)}" if ranks else "files without ranks"
        if nodes:
            hint += f" on {', '.join([*nodes[:_NAMED], *['...'] * (len(nodes) > _NAMED)])}"
        return StagerError("there is no log of that rank and node", hint=f"the logs are of {hint}")
    job = files.read_job()
    what = f"job {files.job_id} has left no logs of ranks in {files.folder}"
    if job.is_plan or job.action is Action.VERIFY:
        what = f"job {files.job_id} was a {job.kind}: it started no ranks"
    return StagerError(what, hint=f"`stager diagnose {files.job_id}` says how it ended")


@dataclass(frozen=True, kw_only=True)
class MergedLines:
    """The result of ``stager logs``."""

    job_id: str
    lines: tuple[Mapping[str, object], ...]
    """Each with ``time``, ``node``, ``rank``, ``file``, ``line`` and ``text``; null: unknown."""


def make_merged_lines(job_id: str, lines: Iterable[Line]) -> MergedLines:
    """Return the result of ``stager logs``."""
    shown = (
        {"time": time or None, "node": node, "rank": rank, "file": path, "line": at, "text": text}
        for time, path, at, text, node, rank in lines
    )
    return MergedLines(job_id=job_id, lines=tuple(shown))
