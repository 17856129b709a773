"""The logs of a job as one stream, or only the lines of its errors."""

from __future__ import annotations

import collections
import functools
import heapq
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from bundle.protocol.enumerations import Action

from ..catalogue.catalogue import CatalogueEntry, LineRole, catalogue, match_line
from ..core.errors import StagerError
from . import job_record
from .job_files import JobFiles, LogFile
from .lines import Line, LogReader, Suspects, read_order
from .prefixes import TRACEBACK, TracebackPrefix, parse_line

# --- The lines of a job that belong to errors: each once, without noise --------------------------

_LAUNCHERS = "ChildFailedError"
"""Torchrun's own exception, which says no more than the table after it."""
_CLOSING_ENTRIES = ("closing-signal", "child-failed")
"""Entries of the catalogue for torchrun's lines about ending the other ranks."""
_ERROR = re.compile(
    r"\b(?:error|fatal|critical|exception|panic)\b|(?:Error|Exception)\b|^slurmstepd:|^srun: ", re.I
)
_WARNING = re.compile(r"Warning: |^\s*warnings\.warn\(|\bWARN(?:ING)?\b|\[W\d{4} ")
_CLOSING = re.compile(r"^[A-Za-z_][\w.]*(?::|$)")
_BEGINNING = re.compile(r"(?<![\[\\])\^")
_DIGITS = re.compile(r"0x[0-9a-f]+|\d+")
_LONGEST_TRACE = 200


def select_errors(lines: Iterable[Line]) -> Iterator[Line]:
    """Yield the lines that belong to errors.

    A traceback is one thing: it comes whole, at its last line's time. Lines that are equal but for
    numbers are shown for the first rank that has them, and counted for the others.
    """
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
    """Return the entries whose pattern starts at the beginning of a line, after its prefixes."""
    return tuple(entry for entry in catalogue() if _BEGINNING.search(entry.expression))


def _skip_repeated(group: list[Line], seen: collections.Counter[str]) -> Iterator[Line]:
    shape = "\n".join(_DIGITS.sub("#", line.text) for line in group)
    seen[shape] += 1
    if seen[shape] == 1:
        yield from group
    elif seen[shape] == 2 and len(group) > 1:
        last = group[-1]
        yield last._replace(text=f"{last.text}  (the same traceback as above, here as well)")


# --- The logs of a job as one stream: by time, each line with its node and rank ------------------

_POLL_SECONDS = 0.5
_NAMED = 8


@dataclass(frozen=True, kw_only=True)
class LineFilter:
    """The choice of lines; empty or None for all."""

    ranks: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()
    pattern: re.Pattern[str] | None = None
    errors: bool = False
    """Only lines that belong to errors, each once."""

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

    def _has(self, node: str) -> bool:
        """Return whether a node is wanted, with or without its domain."""
        return not self.nodes or node in self.nodes or node.partition(".")[0] in self.nodes


def merge_logs(files: JobFiles, wanted: LineFilter) -> Iterator[Line]:
    """Return all chosen lines, by time.

    Raises:
        StagerError: no log is of such a rank or node.
    """
    logs = wanted.select_logs(files)
    # A file of no rank may contain lines of several.
    if not any(log.rank is not None or not wanted.ranks or not log.own for log in logs):
        raise _explain_missing_log(files)
    readers = _make_readers(files, logs, wanted)
    return wanted.select(heapq.merge(*map(LogReader.read_rest, readers)))


def _make_readers(
    files: JobFiles, logs: Iterable[LogFile], wanted: LineFilter
) -> Iterator[LogReader]:
    pick = Suspects() if wanted.errors else None
    order = read_order(files)
    return (
        LogReader(log, pick, order.get((log.node, log.rank)) if log.own else None) for log in logs
    )


def follow_logs(
    files: Callable[[], JobFiles], wanted: LineFilter, sleep: Callable[[float], None] = time.sleep
) -> Iterator[Line]:
    """Return the chosen lines that exist, then those that are added, until the job has ended.

    Lines that are added at about the same time may be out of order by half a second. Somebody
    else's logs have no visible end: they are followed for as long as somebody reads.
    """
    return wanted.select(_read_growing_logs(files, wanted, sleep))


def _read_growing_logs(
    files: Callable[[], JobFiles], wanted: LineFilter, sleep: Callable[[float], None]
) -> Iterator[Line]:
    readers: dict[Path, LogReader] = {}
    added_at: float | None = None  # lines that exist already have their times
    while True:
        now = files()
        ended = bool(now.job_id) and job_record.read_events(now.events).result is not None
        if new := [log for log in wanted.select_logs(now) if log.path not in readers]:
            readers |= {reader.log.path: reader for reader in _make_readers(now, new, wanted)}
        # New lines of ranks count as just written.
        yield from heapq.merge(
            *(
                reader.read_rest(whole=not ended, time=added_at if reader.log.own else None)
                for reader in readers.values()
            )
        )
        if ended:
            return
        sleep(_POLL_SECONDS)
        added_at = time.time()


def _explain_missing_log(files: JobFiles) -> StagerError:
    number, diagnose = files.job_id, f"`stager diagnose {files.job_id}`"
    if files.logs:
        ranks = {log.rank for log in files.logs if log.rank is not None}
        nodes = sorted({log.node for log in files.logs if log.node})
        of_ranks = f"ranks {min(ranks)} to {max(ranks)}" if ranks else "files without ranks"
        named = ", ".join([*nodes[:_NAMED], *(["..."] * (len(nodes) > _NAMED))])
        on_nodes = f" on {named}" if nodes else ""
        return StagerError(
            "there is no log of that rank and node", hint=f"the logs are of {of_ranks}{on_nodes}"
        )
    job = files.read_job()
    if job.is_plan or job.action is Action.VERIFY:
        return StagerError(
            f"job {number} was a {job.kind}: it started no ranks",
            hint=f"only `stager run` starts ranks; {diagnose} says how this job ended",
        )
    return StagerError(
        f"job {number} has left no logs of ranks in {files.folder}",
        hint=f"it ended before any rank was started: {diagnose} says why",
    )


# --- The result of ``stager logs`` ---------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class MergedLines:
    """The result of ``stager logs``."""

    job_id: str
    """The job; empty where files have no number."""
    lines: tuple[Mapping[str, object], ...]
    """Each with ``time``, ``node``, ``rank``, ``file``, ``line`` and ``text``; null: unknown."""


def make_merged_lines(job_id: str, lines: Iterable[Line]) -> MergedLines:
    """Return the result of ``stager logs``."""
    return MergedLines(
        job_id=job_id,
        lines=tuple(
            {
                "time": line.time or None,
                "node": line.node,
                "rank": line.rank,
                "file": line.path,
                "line": line.number,
                "text": line.text,
            }
            for line in lines
        ),
    )
