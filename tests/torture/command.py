"""The command line: which rounds, and what is said of them at the end."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .registry import MODULES, Area, areas
from .rounds import BROKEN, OUTCOMES, SAME, repeat
from .workers import Played, Task, Workers
from .world import fetch_zstandard

WORKERS = 2
_EVERY_SECONDS = 15  # between two lines of progress
_CACHE = Path(sys.prefix, ".cache", "torture")


@dataclass
class Tally:
    rounds: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    absent: str = ""
    broken: list[Played] = field(default_factory=list)

    def add(self, played: Played) -> None:
        if played.outcome == "absent":
            self.absent = played.promise
            return
        self.rounds += 1
        self.seconds += played.seconds
        self.faults.update(played.counts)
        if not played.counts or played.outcome == BROKEN:
            self.faults[played.outcome] += 1
        if played.outcome == BROKEN:
            self.broken.append(played)


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    seed = options.seed if options.seed is not None else int.from_bytes(os.urandom(4), "big")
    chosen = areas(tuple(options.area))
    if not options.area:
        chosen = [area for area in chosen if not area.apart or options.all]
    print(f"seed {seed}", file=sys.stderr)
    tallies = {area.name: Tally() for area in chosen}
    started = time.monotonic()
    progress = _Progress(0 if options.seconds is not None else len(_tasks(chosen, options)))

    def on_played(played: Played) -> None:
        tallies[played.area].add(played)
        progress.add(played)
        if played.outcome == BROKEN:
            _show(played, seed)
        elif options.verbose:
            said = f"{played.outcome} in {played.seconds:.2f} s: {'; '.join(played.steps)}"
            print(f"{played.area} {played.number}: {said}", file=sys.stderr, flush=True)

    play(chosen, options, seed, on_played)
    seconds = time.monotonic() - started
    if options.json:
        print(json.dumps(_report(tallies, seed, seconds), indent=2))
    else:
        _table(tallies, seed, seconds)
    return int(any(tally.broken for tally in tallies.values()))


def play(chosen: Sequence[Area], options: argparse.Namespace, seed: int, on_played: object) -> None:
    """Play rounds of some areas, in two processes; those that share something, in one, after."""
    _CACHE.mkdir(parents=True, exist_ok=True)
    decompressor = fetch_zstandard(_CACHE)
    # Not below /tmp: the nodes of a cluster on this machine have one of their own.
    place = Path(tempfile.mkdtemp(prefix=f"stager-torture-{os.getpid()}-", dir="/var/tmp"))
    named = {area.name: area for area in chosen}
    try:
        for apart in (False, True):
            some = [area for area in chosen if area.apart == apart]
            if not some:
                continue
            with Workers(place, decompressor, seed, named) as workers:
                workers.start(1 if apart else options.workers, apart=apart)
                endless = options.seconds is not None
                tasks = _endless(some, options.seconds) if endless else iter(_tasks(some, options))
                workers.play(tasks, on_played)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _tasks(chosen: Sequence[Area], options: argparse.Namespace) -> list[Task]:
    """Return the rounds in an order in which every area has had its share at any time."""
    if options.round is not None:
        return [(area.name, options.round) for area in chosen]
    waiting = []
    for area in chosen:
        count = options.count or (area.sample if options.sample else area.rounds)
        waiting += [((number + 1) / (count + 1), area.name, number) for number in range(count)]
    return [(name, number) for _, name, number in sorted(waiting)]


def _endless(chosen: Sequence[Area], seconds: float) -> Iterator[Task]:
    """Return rounds until the time is over, each area in proportion to its share."""
    done, end = Counter[str](), time.monotonic() + seconds
    while time.monotonic() < end:
        area = min(chosen, key=lambda one: (done[one.name] + 1) / one.rounds)
        yield area.name, done[area.name]
        done[area.name] += 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/torture",
        description="Inject faults into the real product, and hold it to its promises.",
        epilog="Areas: " + " ".join(MODULES) + ". See docs/reliability.md.",
    )
    add = parser.add_argument
    add("area", nargs="*", choices=[*MODULES, []], help="default: all that need no cluster")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--seconds", type=float, help="go on for so long")
    how.add_argument("--count", type=int, help="so many rounds an area; default: its own number")
    how.add_argument("--round", type=int, help="play this round alone")
    text = "the few rounds that the test suite plays"
    how.add_argument("--sample", action="store_true", help=text)
    add("--seed", type=int, help="default: a random one, which is printed")
    add("--all", action="store_true", help="with the areas that need a cluster")
    add("--workers", type=int, default=WORKERS, help="processes; default: %(default)s")
    add("--json", action="store_true", help="one JSON object on standard output")
    add("-v", "--verbose", action="store_true", help="say how each round ended")
    return parser


class _Progress:
    def __init__(self, total: int) -> None:
        self._total = f" of {total}" if total else ""
        self._started = self._shown = time.monotonic()
        self._rounds = self._broken = 0

    def add(self, played: Played) -> None:
        self._rounds += 1
        self._broken += played.outcome == BROKEN
        now = time.monotonic()
        if now - self._shown >= _EVERY_SECONDS:
            self._shown = now
            minutes, seconds = divmod(int(now - self._started), 60)
            said = f"{self._rounds}{self._total} rounds, {self._broken} broken; {played.area}"
            print(f"{minutes}:{seconds:02d} {said}", file=sys.stderr, flush=True)


def _show(played: Played, seed: int) -> None:
    lines = [f"BROKEN {played.area}, round {played.number}: {played.promise}"]
    lines += [f"  did: {step}" for step in played.steps]
    lines += [f"  | {line}" for line in played.evidence.splitlines()[-40:]]
    lines.append(f"  again: {repeat(played.area, seed, played.number)}")
    print("\n".join(lines), file=sys.stderr, flush=True)


def _rows(tallies: dict[str, Tally]) -> list[dict[str, object]]:
    rows, total = [], Counter[str]()
    for name, tally in tallies.items():
        counts = {outcome: tally.faults[outcome] for outcome in OUTCOMES}
        numbers = {"rounds": tally.rounds, "faults": sum(counts.values()), **counts}
        total.update({**numbers, "seconds": tally.seconds})
        rows.append({"area": name, **numbers, "seconds": round(tally.seconds, 1)})
    return [*rows, {"area": "all", **total, "seconds": round(total["seconds"], 1)}]


def _table(tallies: dict[str, Tally], seed: int, seconds: float) -> None:
    rows = _rows(tallies)
    head = ["same bytes" if name == SAME else name for name in rows[0]]
    for row in [head, *(list(row.values()) for row in rows)]:
        print(f"{row[0]:<14}" + "".join(f"{cell!s:>11}" for cell in row[1:]))
    for name, tally in tallies.items():
        if tally.absent:
            print(f"{name}: not played: {tally.absent}")
    print(f"seed {seed}, {seconds:.0f} seconds")


def _report(tallies: dict[str, Tally], seed: int, seconds: float) -> dict[str, object]:
    broken = [
        {
            "area": one.area, "round": one.number, "promise": one.promise, "did": one.steps,
            "evidence": one.evidence, "again": repeat(one.area, seed, one.number),
        }
        for tally in tallies.values()
        for one in tally.broken
    ]  # fmt: skip
    absent = {name: tally.absent for name, tally in tallies.items() if tally.absent}
    return {
        "schema": 1, "ok": not broken, "seed": seed, "seconds": round(seconds, 1),
        "areas": _rows(tallies), "absent": absent, "broken": broken,
    }  # fmt: skip
