"""What a training job has left behind: the figures that its program wrote into its outputs.

The program may be anybody's, and so is what lies there: nothing but a plain file of ours to read,
and of its content only finite numbers under ordinary names, is taken.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bundle.results import patterns

NAME = "metrics.json"
"""The file that ``python -m trainer`` writes into its output folder, and any program may."""

_LARGEST = 1 << 16
"""Bytes; a longer file is a log and no summary."""
_NAME = re.compile(r"[\w.@/ -]{1,60}")

Times = Mapping[str, int]
"""When each file was last written, in nanoseconds, by its path below the run directory."""


def times(run_dir: Path, outputs: Sequence[str]) -> Times:
    """The files that are there before a job, so that they are not taken for its own."""
    found = {}
    for path in _paths(run_dir, outputs):
        try:
            found[path] = (run_dir / path).lstat().st_mtime_ns
        except (OSError, ValueError):
            continue
    return found


def figures(run_dir: Path, outputs: Sequence[str], before: Times) -> list[dict[str, Any]]:
    """The figures in each output, where this job has written some.

    Args:
        run_dir: where the job ran, or where its outputs came home to.
        outputs: paths and patterns below it.
        before: what :func:`times` said before the job.

    Returns:
        For each such file ``path``, its folder, and ``metrics``, its numbers by name.
    """
    now = times(run_dir, outputs)
    found = []
    for path in sorted(now):
        metrics = _read(run_dir / path) if before.get(path) != now[path] else {}
        if metrics:
            found.append({"path": str((run_dir / path).parent), "metrics": metrics})
    return found


def line(path: str, metrics: Mapping[str, float]) -> str:
    """The figures in a few words, the best known first."""
    words = [f"{name} {metrics[name]:.3g}" for name in ("accuracy", "loss") if name in metrics]
    if "samples_per_second" in metrics:
        words.append(f"{metrics['samples_per_second']:,.0f} samples/s")
    if not words:
        words = [f"{name} {value:g}" for name, value in list(metrics.items())[:4]]
    shown = "".join(char if char.isprintable() else "?" for char in path)
    return f"{', '.join(words)}: {shown}"


def _paths(run_dir: Path, outputs: Sequence[str]) -> Iterator[str]:
    """Where figures may lie."""
    seen = set()
    for output in outputs:
        pattern = patterns.split(output)
        if pattern is None:
            continue
        found = patterns.expand(str(run_dir), pattern)
        if not pattern:
            found.add(NAME)
        for path in found:
            whole = path if path.rpartition("/")[2] == NAME else f"{path}/{NAME}"
            if whole not in seen:
                seen.add(whole)
                yield whole


def _read(path: Path) -> dict[str, float]:
    """The numbers in a file; none where it is no such file."""
    try:
        # A pipe would keep us waiting, and a link could lead anywhere.
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
    """Whether it is a number that any reader of JSON can take."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(float(value))
    except OverflowError:
        return False
