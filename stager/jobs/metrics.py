"""The figures of a training job, which its program wrote into its outputs.

The program may write anything there: only a regular file is read, and of its content only finite
numbers under ordinary names are taken.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bundle.results import patterns

NAME = "metrics.json"
"""The file that ``python -m trainer`` writes into its output folder, and any program may."""

_LARGEST = 1 << 16
"""Bytes; a longer file is a log and no summary."""
_NAME = re.compile(r"[\w.@/ -]{1,60}")

Times = Mapping[str, int]
"""The time each file was last written, in nanoseconds, by its path below the run directory."""


@dataclass(frozen=True, kw_only=True)
class Figures:
    """The figures in one output."""

    path: Path
    """The folder they were found in."""
    metrics: dict[str, float]
    """The numbers, by name."""


def times(run_dir: Path, outputs: Sequence[str]) -> Times:
    """Return the files that exist before a job, so that they are not taken for its own."""
    written = {}
    for path in _paths(run_dir, outputs):
        try:
            written[path] = (run_dir / path).lstat().st_mtime_ns
        except (OSError, ValueError):
            continue
    return written


def figures(run_dir: Path, outputs: Sequence[str], before: Times) -> tuple[Figures, ...]:
    """Return the figures in each output that this job has written."""
    now = times(run_dir, outputs)
    written = [path for path in sorted(now) if before.get(path) != now[path]]
    read = [(run_dir / path, _read(run_dir / path)) for path in written]
    return tuple(Figures(path=path.parent, metrics=metrics) for path, metrics in read if metrics)


def line(figures: Figures) -> str:
    """Return the figures in a line, the best known first."""
    metrics = figures.metrics
    words = [f"{name} {metrics[name]:.3g}" for name in ("accuracy", "loss") if name in metrics]
    if "samples_per_second" in metrics:
        words.append(f"{metrics['samples_per_second']:,.0f} samples/s")
    if not words:
        words = [f"{name} {value:g}" for name, value in list(metrics.items())[:4]]
    shown = "".join(char if char.isprintable() else "?" for char in str(figures.path))
    return f"{', '.join(words)}: {shown}"


def _paths(run_dir: Path, outputs: Sequence[str]) -> Iterator[str]:
    seen = set()
    for output in outputs:
        pattern = patterns.split(output)
        if pattern is None:
            continue
        places = patterns.expand(str(run_dir), pattern)
        if not pattern:
            places.add(NAME)
        for place in places:
            path = place if place.rpartition("/")[2] == NAME else f"{place}/{NAME}"
            if path not in seen:
                seen.add(path)
                yield path


def _read(path: Path) -> dict[str, float]:
    """Return the numbers in a file; empty if it is not a regular file of JSON."""
    try:
        # A pipe would block, and a link could lead anywhere.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        with os.fdopen(handle, "rb") as file:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                return {}
            data = file.read(_LARGEST + 1)
        raw = json.loads(data) if len(data) <= _LARGEST else None
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(raw, dict):
        return {}
    return {name: value for name, value in raw.items() if _NAME.fullmatch(name) and _finite(value)}


def _finite(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(float(value))
    except OverflowError:
        return False
