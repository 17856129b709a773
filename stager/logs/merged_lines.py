"""The result of ``stager logs``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from .lines import Line


@dataclass(frozen=True, kw_only=True)
class MergedLine:
    """A line of a job's logs."""

    time: float | None
    """The time, in seconds since the epoch; None if unknown."""
    node: str
    """The node; empty if unknown."""
    rank: int | None
    """The rank; None if unknown."""
    file: Path
    """The log."""
    line: int
    """The line's number there, from 1."""
    text: str
    """The line."""


@dataclass(frozen=True, kw_only=True)
class MergedLines:
    """The result of ``stager logs``."""

    job_id: str
    """The job; empty where files have no number."""
    lines: tuple[MergedLine, ...]
    """Its lines, by time."""


def merged_lines(job_id: str, lines: Iterable[Line]) -> MergedLines:
    """Return the result of ``stager logs``."""
    return MergedLines(job_id=job_id, lines=tuple(_merged_line(line) for line in lines))


def _merged_line(line: Line) -> MergedLine:
    return MergedLine(
        time=line.time or None,
        node=line.node,
        rank=line.rank,
        file=line.path,
        line=line.number,
        text=line.text,
    )
