"""The logs of a job as one stream: by time, each line with its node and rank."""

from __future__ import annotations

import heapq
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ..core.errors import StagerError
from . import events
from .error_lines import errors_of
from .files import JobFiles, LogFile
from .lines import Line, Reader, in_order, piece_by_piece
from .suspects import Suspects

_POLL_SECONDS = 0.5
_NAMED = 8


@dataclass(frozen=True, kw_only=True)
class LineFilter:
    """Which lines are asked for."""

    ranks: tuple[int, ...] = ()
    """Only these ranks' lines; empty for all."""
    nodes: tuple[str, ...] = ()
    """Only these nodes' lines; empty for all."""
    pattern: re.Pattern[str] | None = None
    """Only lines in which this is found."""
    errors: bool = False
    """Only what belongs to errors, each once."""

    def logs(self, files: JobFiles) -> list[LogFile]:
        """The files that may have such lines."""
        return [
            log
            for log in files.logs
            if (not self.ranks or log.rank is None or log.rank in self.ranks)
            and (not self.nodes or not log.node or log.node in self.nodes)
        ]

    def of(self, lines: Iterator[Line]) -> Iterator[Line]:
        """The lines among these that are asked for."""
        fitting = (line for line in lines if self._fits(line))
        chosen = errors_of(fitting) if self.errors else fitting
        pattern = self.pattern
        return chosen if pattern is None else (one for one in chosen if pattern.search(one.text))

    def _fits(self, line: Line) -> bool:
        rank = not self.ranks or line.rank in self.ranks
        return rank and (not self.nodes or line.node in self.nodes)


def merged(files: JobFiles, wanted: LineFilter) -> Iterator[Line]:
    """All lines that are asked for, by time.

    Raises:
        StagerError: no log is of such a rank or node.
    """
    logs = wanted.logs(files)
    if not any(_named(log, wanted) for log in logs):
        raise _nobody(files)
    pick = Suspects() if wanted.errors else None
    ordered = files.order.exists()
    apart = [log for log in logs if not (log.own and ordered)]
    streams = [in_order(files, [log for log in logs if log.own and ordered], pick)]
    return wanted.of(heapq.merge(*streams, *(Reader(log, pick).rest() for log in apart)))


def follow(
    files: Callable[[], JobFiles], wanted: LineFilter, sleep: Callable[[float], None] = time.sleep
) -> Iterator[Line]:
    """What is there, then what comes, until the job has ended.

    What comes at about the same time may be out of order by half a second. Somebody else's logs
    have no end that could be seen: they are followed for as long as somebody reads.

    Args:
        files: the job's files as they are now: ranks' logs appear one after the other.
        wanted: which lines.
        sleep: waits so many seconds.
    """
    readers: dict[Path, Reader] = {}
    pick = Suspects() if wanted.errors else None

    def come() -> Iterator[Line]:
        begun = False
        while True:
            now = files()
            ended = bool(now.job_id and events.summarize(now.events).result)
            for log in wanted.logs(now):
                readers.setdefault(log.path, Reader(log, pick))
            if not begun:  # what is there already has its times
                yield from piece_by_piece(now, [one for one in readers.values() if one.log.own])
            live = time.time() if begun else None
            parts = (
                one.rest(whole=not ended, time=live if one.log.own else None)
                for one in readers.values()
            )
            yield from heapq.merge(*parts)
            begun = True
            if ended:
                return
            sleep(_POLL_SECONDS)

    return wanted.of(come())


def _named(log: LogFile, wanted: LineFilter) -> bool:
    """Whether a file is of a wanted rank, or may have lines of ranks it does not name."""
    return log.rank is not None or not wanted.ranks or not log.own


def _nobody(files: JobFiles) -> StagerError:
    ranks = sorted({log.rank for log in files.logs if log.rank is not None})
    nodes = sorted({log.node for log in files.logs if log.node})
    if not files.logs:
        return StagerError(
            f"job {files.job_id} has left no logs of ranks in {files.folder}",
            hint="it ended before any rank was started: `stager diagnose` says why",
        )
    named = ", ".join(nodes[:_NAMED]) + (", ..." if len(nodes) > _NAMED else "")
    there = f"ranks {ranks[0]} to {ranks[-1]}" if ranks else "files without ranks"
    there += f" on {named}" if named else ""
    return StagerError("no log is of that rank and node", hint=f"the logs are of {there}")
