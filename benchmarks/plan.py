"""A whole run: what was asked for, in which order it is measured, and what comes of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import building, cluster, curve, reference, starting, unpacking
from .curve import Point
from .errors import BenchError
from .place import GIB, Place, Room, scratch
from .process import adopt_orphans
from .reference import Reference
from .report import Results
from .rows import ROWS, Row, chosen, judge
from .session import Session
from .tools import Tools, need_programs, versions

MEASURES: dict[str, Callable[[Session], None]] = {
    "build": building.measure,
    "size": building.sizes,
    "unpack": unpacking.measure,
    "restage": unpacking.restage,
    "import": starting.imports,
    "calls": starting.calls,
    "start": starting.start,
    "slurm": cluster.measure,
}
"""What measures each group of rows, in the order in which it is done."""
QUICK = ("build", "size", "unpack", "restage", "import")
"""The groups of ``--quick``."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a run."""

    scratch: Path
    """Where the scratch directory is made."""
    rounds: int = 3
    """How often everything is measured."""
    quick: bool = False
    """Whether the small environment is measured, once."""
    only: tuple[str, ...] = ()
    """Rows and groups; none for all."""
    slurm: bool = False
    """Whether the rows on a real Slurm are measured, too."""
    curve: bool = False
    """Whether ours is measured over the size of the environment, too."""
    cpus: int = 2
    """How many CPUs everything is held to: ours, the peers and the nodes."""
    cache: Path | None = None
    """Keeps wheels and locks from run to run; None: they are made anew and removed."""

    @property
    def reference(self) -> Reference:
        """The environment that is measured."""
        return reference.QUICK if self.quick else reference.FULL

    @property
    def room(self) -> Room:
        """The room that it takes."""
        if self.quick:
            return Room(disk=4 * GIB, memory=GIB)
        return Room(disk=(20 if self.curve else 14) * GIB, memory=int(3.5 * GIB))

    def rows(self) -> tuple[Row, ...]:
        """The rows that are wanted.

        Raises:
            BenchError: one is not known.
        """
        if self.only:
            return self._named_rows()
        if self.quick:
            return tuple(row for row in ROWS if row.group in QUICK and row.key != "build-pex")
        return ROWS if self.slurm else tuple(row for row in ROWS if row.group != "slurm")

    def _named_rows(self) -> tuple[Row, ...]:
        """The rows that ``only`` names.

        Raises:
            BenchError: one is not known, or needs what the reduced environment has not.
        """
        try:
            rows = chosen(self.only)
        except KeyError as exc:
            raise BenchError(
                f"there is no row {exc}", where="--only", fix=f"groups: {', '.join(MEASURES)}"
            ) from exc
        lacking = {row.group for row in rows} - set(QUICK)
        if self.quick and lacking:
            raise BenchError(
                "the reduced environment has no torch",
                where=f"--quick --only {' '.join(self.only)}",
                why=f"needed by {', '.join(sorted(lacking))}",
                fix="leave --quick out",
            )
        return rows


def hold_to(cpus: int) -> int:
    """Keep this process and all that it starts on so many CPUs; how many there are of them."""
    usable = sorted(os.sched_getaffinity(0))[:cpus]
    os.sched_setaffinity(0, usable)
    return len(usable)


def carry_out(options: Options, tools: Tools, say: Callable[[str], None]) -> Results:
    """Measure what is asked for; nothing stays behind but the cache, where one is named.

    Raises:
        BenchError: something is missing or fails.
    """
    rows = options.rows()
    groups = [group for group in MEASURES if any(row.group == group for row in rows)]
    need_programs(_programs(groups), os.environ, say)
    cpus = hold_to(options.cpus)
    adopt_orphans()
    with scratch(options.scratch, options.room, say) as place:
        session = _session(options, tools, place, say)
        session.pex = any(row.key == "build-pex" for row in rows)
        for group in groups:
            say(f"measuring: {group}")
            MEASURES[group](session)
        points: list[Point] = curve.measure(session) if options.curve else []
        return Results(
            reference=options.reference.name,
            rounds=session.rounds,
            cpus=cpus,
            verdicts=judge(rows, session.samples, judged=not options.reference.reduced),
            samples=session.samples,
            versions=versions(tools),
            curve=points,
        )


def _session(options: Options, tools: Tools, place: Place, say: Callable[[str], None]) -> Session:
    """Everything ready, with wheels and scratch on one file system, so that links can be made."""
    cache = options.cache / ("quick" if options.quick else "full") if options.cache else None
    prepared = reference.prepare(options.reference, cache or place.disk / "cache", tools, say)
    if prepared.wheels.stat().st_dev != place.disk.stat().st_dev:
        raise BenchError(
            "the cache is on another file system than the scratch directory",
            where=f"{cache}, {place.disk}",
            why="wheels are linked, not copied, for every build",
            fix="name both --cache and --scratch on one disk",
        )
    rounds = 1 if options.quick else options.rounds
    return Session(place=place, tools=tools, prepared=prepared, rounds=rounds, say=say)


def _programs(groups: Sequence[str]) -> list[str]:
    found = ["tar", "gzip", "zstd"]
    found += ["mksquashfs", "unsquashfs"] if "unpack" in groups else []
    return found + (["strace"] if "calls" in groups else [])
