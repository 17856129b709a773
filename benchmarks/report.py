"""The results of a run, as tables for people and as JSON for programs."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bundle.protocol.counts import format_count

from .curve import Point
from .rounds import Samples
from .rows import ROWS, Kind
from .verdicts import Verdict

if TYPE_CHECKING:
    from rich.table import Table

WIDTH = 80
"""Columns of a table that goes into a file or a pipe."""
CACHE = "warm: every input is read once before its first round; nothing is dropped"


@dataclass(frozen=True, kw_only=True)
class Results:
    """A whole run."""

    reference: str
    """Which environment was measured."""
    rounds: int
    """How often."""
    cpus: int
    """How many CPUs everything was held to."""
    verdicts: Sequence[Verdict]
    """What became of each row."""
    samples: Samples
    """All values."""
    versions: Mapping[str, str]
    """Of what was measured."""
    curve: Sequence[Point] = ()
    """What was measured over the size of the environment."""

    @property
    def missed(self) -> list[str]:
        """The keys of the rows that make the exit status 1."""
        return [
            verdict.row.key
            for verdict in self.verdicts
            if verdict.state == "missed"
            or (verdict.state == "not measured" and verdict.row.target is not None)
        ]

    def to_json(self) -> dict[str, Any]:
        """The JSON object."""
        return {
            "schema": 1,
            "reference": self.reference,
            "rounds": self.rounds,
            "page_cache": CACHE,
            "machine": machine(self.cpus),
            "versions": dict(self.versions),
            "missed": self.missed,
            "rows": [_row_json(verdict) for verdict in self.verdicts],
            "samples": self.samples.to_json(),
            "curve": [_point_json(point) for point in self.curve],
        }


def machine(cpus: int) -> dict[str, Any]:
    """Describe the machine of the run; no name of the machine or of a user."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpus": os.cpu_count(),
        "cpus_used": cpus,
        "memory_gib": round(memory / (1 << 30), 1),
        "architecture": platform.machine(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load": round(os.getloadavg()[0], 1),
    }


def _row_json(verdict: Verdict) -> dict[str, Any]:
    row = verdict.row
    return {
        "key": row.key,
        "what": row.what,
        "versus": row.versus,
        "kind": row.kind,
        "ours": verdict.ours,
        "peer": verdict.peer,
        "figure": verdict.figure,
        "target": row.target,
        "state": verdict.state,
    }


def _point_json(point: Point) -> dict[str, Any]:
    shape = point.shape
    return {
        "packages": shape.packages,
        "files_a_package": shape.files,
        "bytes": shape.size,
        "seconds": point.seconds,
    }


def write_json(results: Results, path: Path) -> None:
    """Write the JSON object to a file, whose folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results.to_json(), indent=1) + "\n", encoding="utf-8")


def shown(value: float | None, kind: Kind) -> str:
    """A value with its unit, short."""
    if value is None:
        return "-"
    if kind == "count":
        return f"{value:,.0f}"
    if kind == "bytes":
        return f"{value:,.0f} B" if value < 1e5 else f"{value / 1e6:,.1f} MB"
    return f"{value:.2f} s" if value < 100 else f"{value:.0f} s"


def verdict_cells(verdict: Verdict) -> tuple[str, ...]:
    """A row of the first table."""
    row = verdict.row
    target = "" if row.target is None else f"{row.target:g}"
    figure = "" if verdict.figure is None or not row.peer else f"{verdict.figure:.3f}"
    state = {"information": "", "not judged": "n/j", "not measured": "-"}
    return (
        row.what,
        row.versus,
        shown(verdict.ours, row.kind),
        shown(verdict.peer, row.kind) if row.peer else "",
        figure,
        target,
        "MISSED" if verdict.state == "missed" else state.get(verdict.state, verdict.state),
    )


def show(results: Results) -> None:
    """Print both tables on standard output: verdicts, then every measured name."""
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)
    facts = machine(results.cpus)
    console.print(
        f"{results.reference}; {format_count(results.rounds, 'round')}, A B A B", markup=False
    )
    console.print(
        f"{facts['cpus_used']} of {facts['cpus']} CPUs, {facts['memory_gib']} GiB, "
        f"load {facts['load']}; page cache {CACHE}",
        markup=False,
    )
    console.print(" ".join(f"{name} {number}" for name, number in results.versions.items()))
    console.print(_verdict_table(results.verdicts))
    if any(verdict.state == "not judged" for verdict in results.verdicts):
        console.print("n/j: not judged, for the targets are meant for another environment")
    console.print(_sample_table(results.samples))
    if results.curve:
        console.print(_curve_table(results.curve))
    if results.missed:
        console.print(f"missed or not measured: {', '.join(results.missed)}", markup=False)


def _table(*columns: tuple[str, bool]) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for title, number in columns:
        table.add_column(title, justify="right" if number else "left", no_wrap=True)
    return table


def _verdict_table(verdicts: Sequence[Verdict]) -> Table:
    names = ("what", "against", "ours", "peer", "ratio", "target", "")
    table = _table(*((name, name in names[2:6]) for name in names))
    styles = {"met": "green", "missed": "bold red"}
    for verdict in verdicts:
        table.add_row(*verdict_cells(verdict), style=styles.get(verdict.state, ""))
    return table


def _sample_table(samples: Samples) -> Table:
    names = ("measured", "median", "min", "max", "CPU", "n")
    table = _table(*((name, name != "measured") for name in names))
    for name, facts in samples.to_json().items():
        kind = kind_of(name)
        values = samples.values[name]
        cpu = sorted(value.cpu for value in values if value.cpu is not None)
        used = shown(cpu[len(cpu) // 2], "seconds") if cpu else ""
        cells = [shown(float(str(facts[key])), kind) for key in ("median", "min", "max")]
        table.add_row(name, *cells, used, str(len(values)))
    return table


def kind_of(name: str) -> Kind:
    """Return the kind of a measured name's values."""
    for row in ROWS:
        if name in (row.ours, row.peer):
            return row.kind
    part = name.split("/")
    if "bytes" in part or "size" in part or name == "slurm/changed":
        return "bytes"
    return "count" if part[0] == "calls" else "seconds"


def _curve_table(points: Sequence[Point]) -> Table:
    table = _table(
        ("environment", False),
        ("build", True),
        ("uv+zstd", True),
        ("ratio", True),
        ("unpack", True),
        ("tar zstd", True),
        ("ratio", True),
    )
    for point in points:
        build, uv, unpack, tar = point.seconds.values()
        table.add_row(
            point.shape.name,
            *(shown(build, "seconds"), shown(uv, "seconds"), f"{build / uv:.2f}"),
            *(shown(unpack, "seconds"), shown(tar, "seconds"), f"{unpack / tar:.2f}"),
        )
    return table
