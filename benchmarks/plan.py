"""A whole run: what was asked for, in which order it is measured, and what comes of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import building, cluster, curve, large, reference, relays, starting, unpacking
from .curve import Point
from .errors import BenchError
from .place import GIB, Place, Room, scratch
from .process import adopt_orphans
from .reference import Reference
from .report import Results
from .rows import ROWS, Row, chosen
from .session import Session
from .tools import Tools, need_programs, versions
from .verdicts import judge

MEASURES: dict[str, Callable[[Session], None]] = {
    "build": building.measure,
    "size": building.sizes,
    "unpack": unpacking.measure,
    "restage": unpacking.restage,
    "import": starting.imports,
    "calls": starting.calls,
    "start": starting.start,
    "slurm": cluster.measure,
    "relay": relays.measure,
    "cuda": large.measure,
}
"""What measures each group of rows, in the order in which it is done."""
QUICK = ("build", "size", "unpack", "restage", "import")
"""The groups of ``--quick``."""
_ALONE = {"relay": "the relay", "cuda": "the CUDA environment"}
"""The groups that have a run of their own."""
QUICK_NODES = (2, 4)
"""The numbers of nodes of ``--relay --quick``."""


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
    relay: bool = False
    """Whether the relay is measured, and nothing else."""
    cuda: bool = False
    """Whether the CUDA environment is measured, and nothing else."""
    curve: bool = False
    """Whether ours is measured over the size of the environment, too."""
    cpus: int = 2
    """How many CPUs everything is held to: ours, the peers and the nodes."""
    cache: Path | None = None
    """Keeps wheels and locks from run to run; None: they are made anew and removed."""

    @property
    def reference(self) -> Reference:
        """The environment that is measured."""
        if self.cuda:
            return reference.CUDA
        return reference.QUICK if self.quick else reference.FULL

    @property
    def room(self) -> Room:
        """The room that it takes."""
        if self.relay:
            return Room(disk=2 * GIB, memory=0)  # the nodes' memory is looked at when they are
        if self.cuda:
            return Room(disk=32 * GIB, memory=8 * GIB)
        if self.quick:
            return Room(disk=4 * GIB, memory=GIB)
        return Room(disk=(20 if self.curve else 14) * GIB, memory=int(3.5 * GIB))

    def rows(self) -> tuple[Row, ...]:
        """The rows that are wanted.

        Raises:
            BenchError: one is not known.
        """
        if self.relay:
            return self._relay_rows()
        if self.cuda:
            return self._cuda_rows()
        if self.only:
            return self._named_rows()
        if self.quick:
            return tuple(row for row in ROWS if row.group in QUICK and row.key != "build-pex")
        left_out = {"relay", "cuda"} if self.slurm else {"relay", "cuda", "slurm"}
        return tuple(row for row in ROWS if row.group not in left_out)

    def _relay_rows(self) -> tuple[Row, ...]:
        """The rows about the relay that are wanted.

        Raises:
            BenchError: one is not known.
        """
        rows = tuple(row for row in self._chosen(self.only or ("relay",)) if row.group == "relay")
        few = tuple(f"relay-{nodes}-" for nodes in QUICK_NODES)
        rows = tuple(row for row in rows if not self.quick or row.key.startswith(few))
        if not rows:
            raise BenchError(
                "nothing is left to measure",
                where=f"--only {' '.join(self.only)}",
                why="--relay measures the rows of the relay, with --quick only on 2 and 4 nodes",
                fix="see scripts/bench.py --list",
            )
        return rows

    def _cuda_rows(self) -> tuple[Row, ...]:
        """The rows of the CUDA environment that are wanted.

        Raises:
            BenchError: one is not known, or none is left.
        """
        rows = tuple(row for row in self._chosen(self.only or ("cuda",)) if row.group == "cuda")
        if self.quick or self.slurm or self.curve or not rows:
            raise BenchError(
                "the CUDA environment is measured by itself, and as a whole",
                where="--cuda",
                fix="leave --quick, --slurm, --curve and rows of other groups out; see --list",
            )
        return rows

    def _named_rows(self) -> tuple[Row, ...]:
        """The rows that ``only`` names.

        Raises:
            BenchError: one is not known, or needs what the reduced environment has not.
        """
        rows = self._chosen(self.only)
        for group, what in _ALONE.items():
            if any(row.group == group for row in rows):
                raise BenchError(
                    f"{what} is measured by itself",
                    where=f"--only {' '.join(self.only)}",
                    fix=f"scripts/bench.py --{group}",
                )
        lacking = {row.group for row in rows} - set(QUICK)
        if self.quick and lacking:
            raise BenchError(
                "the reduced environment has no torch",
                where=f"--quick --only {' '.join(self.only)}",
                why=f"needed by {', '.join(sorted(lacking))}",
                fix="leave --quick out",
            )
        return rows

    @staticmethod
    def _chosen(names: Sequence[str]) -> tuple[Row, ...]:
        """The rows of these keys and groups.

        Raises:
            BenchError: one is not known.
        """
        try:
            return chosen(names)
        except KeyError as exc:
            raise BenchError(
                f"there is no row {exc}", where="--only", fix=f"groups: {', '.join(MEASURES)}"
            ) from exc


def hold_to(cpus: int) -> int:
    """Keep this process and all that it starts on so many CPUs; how many there are of them."""
    usable = sorted(os.sched_getaffinity(0))[:cpus]
    os.sched_setaffinity(0, usable)
    return len(usable)


def carry_out(
    options: Options, tools: Tools, say: Callable[[str], None], keep: Callable[[Results], None]
) -> Results:
    """Measure what is asked for; nothing stays behind but the cache, where one is named.

    Args:
        options: what is asked for.
        tools: what is measured.
        say: called with each line about the progress.
        keep: called with the results so far after each group of rows: a later one may fail.

    Raises:
        BenchError: something is missing or fails.
    """
    rows = options.rows()
    groups = [group for group in MEASURES if any(row.group == group for row in rows)]
    need_programs(_programs(groups), os.environ, say)
    _need_root(groups)
    cpus = hold_to(options.cpus)
    adopt_orphans()
    with scratch(options.scratch, options.room, say) as place:
        session = _session(options, tools, place, say)
        session.pex = any(row.key == "build-pex" for row in rows)
        session.names = frozenset(name for row in rows for name in (row.ours, row.peer))
        exact = versions(tools)

        def results(points: list[Point]) -> Results:
            judged = not session.prepared.reference.reduced
            return Results(
                reference=session.prepared.reference.name,
                rounds=session.rounds,
                cpus=cpus,
                verdicts=judge(rows, session.samples, judged=judged),
                samples=session.samples,
                versions=exact,
                curve=points,
            )

        for group in groups:
            say(f"measuring: {group}")
            MEASURES[group](session)
            keep(results([]))
        return results(curve.measure(session) if options.curve else [])


def _session(options: Options, tools: Tools, place: Place, say: Callable[[str], None]) -> Session:
    """Everything ready, with wheels and scratch on one file system, so that links can be made."""
    rounds = 1 if options.quick else options.rounds
    if options.relay:
        prepared = relays.prepare(place, tools)
        return Session(place=place, tools=tools, prepared=prepared, rounds=rounds, say=say)
    kept = "quick" if options.quick else "cuda" if options.cuda else "full"
    cache = options.cache / kept if options.cache else None
    prepared = reference.prepare(options.reference, cache or place.disk / "cache", tools, say)
    if prepared.wheels.stat().st_dev != place.disk.stat().st_dev:
        raise BenchError(
            "the cache is on another file system than the scratch directory",
            where=f"{cache}, {place.disk}",
            why="wheels are linked, not copied, for every build",
            fix="name both --cache and --scratch on one disk",
        )
    return Session(place=place, tools=tools, prepared=prepared, rounds=rounds, say=say)


def _programs(groups: Sequence[str]) -> list[str]:
    cluster = ["slurmctld", "slurmd", "srun", "munged", "ip"]
    if groups == ["relay"]:
        return [*cluster, "tc"]
    found = ["tar", "gzip", "zstd"]
    found += ["mksquashfs", "unsquashfs"] if "unpack" in groups else []
    found += cluster if "slurm" in groups else []
    return found + (["strace"] if "calls" in groups else [])


def _need_root(groups: Sequence[str]) -> None:
    """Make sure that a local cluster can be made, where one is measured.

    Raises:
        BenchError: only root can.
    """
    wanted = [group for group in ("slurm", "relay") if group in groups]
    if wanted and os.geteuid() != 0:
        raise BenchError(
            "a local cluster can be made by root alone",
            where=f"--{wanted[0]}",
            fix=f"run it as root, or leave --{wanted[0]} out",
        )
