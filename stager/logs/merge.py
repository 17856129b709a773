"""The logs of a job as one stream: by time, each line with its node and rank."""

from __future__ import annotations

import heapq
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bundle.protocol.enumerations import Action

from ..core.errors import StagerError
from . import events
from .error_lines import errors_of
from .files import JobFiles, LogFile
from .lines import Line, LogReader, in_order, piece_by_piece
from .suspects import Suspects

_POLL_SECONDS = 0.5
_NAMED = 8
"""Nodes that a message names."""


@dataclass(frozen=True, kw_only=True)
class LineFilter:
    """The choice of lines."""

    ranks: tuple[int, ...] = ()
    """Only these ranks' lines; empty for all."""
    nodes: tuple[str, ...] = ()
    """Only these nodes' lines; empty for all."""
    pattern: re.Pattern[str] | None = None
    """Only lines in which this is found."""
    errors: bool = False
    """Only lines that belong to errors, each once."""

    def logs(self, files: JobFiles) -> list[LogFile]:
        """Return the files that may have such lines."""
        return [log for log in files.logs if self._may_have(log)]

    def of(self, lines: Iterator[Line]) -> Iterator[Line]:
        """Return the lines among these that are chosen."""
        fitting = (line for line in lines if self._fits(line))
        chosen = errors_of(fitting) if self.errors else fitting
        pattern = self.pattern
        if pattern is None:
            return chosen
        return (line for line in chosen if pattern.search(line.text))

    def _may_have(self, log: LogFile) -> bool:
        if self.ranks and log.own and log.rank not in self.ranks:
            return False
        return not log.node or self._is_on_wanted(log.node)

    def _fits(self, line: Line) -> bool:
        if self.ranks and line.rank not in self.ranks:
            return False
        return self._is_on_wanted(line.node)

    def _is_on_wanted(self, node: str) -> bool:
        """Return whether a node is wanted, with or without its domain."""
        return not self.nodes or node in self.nodes or node.partition(".")[0] in self.nodes


def merged(files: JobFiles, wanted: LineFilter) -> Iterator[Line]:
    """Return all chosen lines, by time.

    Raises:
        StagerError: no log is of such a rank or node.
    """
    logs = wanted.logs(files)
    if not any(_is_of_wanted(log, wanted) for log in logs):
        raise _no_such_log(files)
    pick = Suspects() if wanted.errors else None
    ordered, others = _by_order(files, logs)
    streams = [in_order(files, ordered, pick), *(LogReader(log, pick).rest() for log in others)]
    return wanted.of(heapq.merge(*streams))


def _by_order(
    files: JobFiles, logs: Sequence[LogFile]
) -> tuple[Sequence[LogFile], Sequence[LogFile]]:
    if not files.order.exists():
        return (), logs
    return [log for log in logs if log.own], [log for log in logs if not log.own]


def follow(
    files: Callable[[], JobFiles], wanted: LineFilter, sleep: Callable[[float], None] = time.sleep
) -> Iterator[Line]:
    """Return the chosen lines that exist, then those that are added, until the job has ended.

    Lines that are added at about the same time may be out of order by half a second. Somebody
    else's logs have no visible end: they are followed for as long as somebody reads.
    """
    return wanted.of(_grow(files, wanted, sleep))


def _grow(
    files: Callable[[], JobFiles], wanted: LineFilter, sleep: Callable[[float], None]
) -> Iterator[Line]:
    readers: dict[Path, LogReader] = {}
    pick = Suspects() if wanted.errors else None
    added_at: float | None = None
    while True:
        now = files()
        ended = _has_ended(now)
        for log in wanted.logs(now):
            readers.setdefault(log.path, LogReader(log, pick))
        if added_at is None:  # lines that exist already have their times
            own = [reader for reader in readers.values() if reader.log.own]
            yield from piece_by_piece(now, own)
        yield from heapq.merge(*(_added(reader, added_at, ended) for reader in readers.values()))
        if ended:
            return
        sleep(_POLL_SECONDS)
        added_at = time.time()


def _has_ended(files: JobFiles) -> bool:
    """Return whether a job has its result; logs of other tools have no visible end."""
    return bool(files.job_id) and events.summarize(files.events).result is not None


def _added(reader: LogReader, added_at: float | None, ended: bool) -> Iterator[Line]:
    """Yield a log's new lines; those of ranks count as just written."""
    return reader.rest(whole=not ended, time=added_at if reader.log.own else None)


def _is_of_wanted(log: LogFile, wanted: LineFilter) -> bool:
    """Return whether a file is of a wanted rank, or may contain lines of several ranks."""
    return log.rank is not None or not wanted.ranks or not log.own


def _no_such_log(files: JobFiles) -> StagerError:
    if not files.logs:
        return _without_logs(files)
    hint = f"the logs are of {_ranks_of(files)}{_nodes_of(files)}"
    return StagerError("there is no log of that rank and node", hint=hint)


def _without_logs(files: JobFiles) -> StagerError:
    job, diagnose = files.job_id, f"`stager diagnose {files.job_id}`"
    summary = files.summary
    if summary.planned_only or summary.action is Action.VERIFY:
        return StagerError(
            f"job {job} was a {summary.kind}: it started no ranks",
            hint=f"only `stager run` starts ranks; {diagnose} says how this job ended",
        )
    return StagerError(
        f"job {job} has left no logs of ranks in {files.folder}",
        hint=f"it ended before any rank was started: {diagnose} says why",
    )


def _ranks_of(files: JobFiles) -> str:
    ranks = {log.rank for log in files.logs if log.rank is not None}
    return f"ranks {min(ranks)} to {max(ranks)}" if ranks else "files without ranks"


def _nodes_of(files: JobFiles) -> str:
    nodes = sorted({log.node for log in files.logs if log.node})
    if not nodes:
        return ""
    more = ", ..." if len(nodes) > _NAMED else ""
    return f" on {', '.join(nodes[:_NAMED])}{more}"
