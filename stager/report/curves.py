"""The course of a training, from the ``metrics.jsonl`` files among a job's outputs.

``python -m trainer`` writes one object a line: for each step ``step``, ``loss`` and
``samples_per_second``, for each epoch ``step``, ``epoch``, ``avg_loss`` and ``accuracy``. Any
program may do the same, and whatever else it writes is passed over.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bundle.protocol.enumerations import PhaseName
from bundle.protocol.events import OutputsCollected
from bundle.results import patterns

from ..logs.job_files import JobFiles
from ..logs.job_record import read_number
from .attempt import Attempt

NAME = "metrics.jsonl"
_LONGEST = 1 << 26
"""Bytes that are read of a file."""
_LINE = 1 << 16
_FILES = 8
_AFTER = 5.0
"""Seconds by which a file server's clock may be ahead of the driver's. Where it is behind, only a
training that took less than that is missed."""

Point = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """The figures at the end of an epoch."""

    step: float
    """The steps that were done."""
    epoch: float
    """Its number."""
    loss: float | None
    """The mean loss while training."""
    accuracy: float | None
    """The share of right answers."""


@dataclass(frozen=True, kw_only=True)
class Curves:
    """The curves of one training."""

    path: str
    """The file they come from."""
    loss: tuple[Point, ...] = ()
    """Loss by step."""
    rate: tuple[Point, ...] = ()
    """Samples a second by step, over all ranks."""
    epochs: tuple[Epoch, ...] = ()
    """The figures of each epoch."""

    @property
    def empty(self) -> bool:
        """Return whether there is nothing to show."""
        return not (self.loss or self.rate or self.epochs)


@dataclass(frozen=True, kw_only=True)
class Training:
    """Everything known about a job's training."""

    curves: tuple[Curves, ...] = ()
    """The curves of each file that has some."""
    others: tuple[str, ...] = ()
    """Files that this job has not written: they are older, or were changed after its end."""


def training(files: JobFiles, attempt: Attempt) -> Training:
    """Return the course of a job's training, as far as its outputs show it."""
    if not files.job_id:
        paths = [log.path for log in files.logs if log.path.name == NAME]
        return Training(curves=tuple(_read_all(paths[:_FILES])))
    mine: list[Path] = []
    others: list[Path] = []
    for path in _candidates(attempt):
        (mine if _written_by(path, attempt) else others).append(path)
    return Training(curves=tuple(_read_all(mine[:_FILES])), others=tuple(map(str, others)))


def read(path: Path) -> Curves:
    """Return the curves in a file; none where it is no such file.

    A step that was done twice, because a run went on from a checkpoint, counts as it was last.
    """
    loss: dict[float, float] = {}
    rate: dict[float, float] = {}
    epochs: dict[float, Epoch] = {}
    for raw in _records(path):
        step = read_number(raw, "step")
        if step is None:
            continue
        for name, curve in (("loss", loss), ("samples_per_second", rate)):
            value = read_number(raw, name)
            if value is not None:
                curve[step] = value
        if "avg_loss" in raw or "accuracy" in raw:
            figures = read_number(raw, "avg_loss"), read_number(raw, "accuracy")
            epoch = read_number(raw, "epoch") or 0.0
            epochs[epoch] = Epoch(step=step, epoch=epoch, loss=figures[0], accuracy=figures[1])
    return Curves(
        path=str(path),
        loss=tuple(sorted(loss.items())),
        rate=tuple(sorted(rate.items())),
        epochs=tuple(epochs[key] for key in sorted(epochs)),
    )


def _read_all(paths: Iterable[Path]) -> Iterator[Curves]:
    return (curves for curves in map(read, paths) if not curves.empty)


def _candidates(attempt: Attempt) -> list[Path]:
    """Return the outputs' files of this kind; those whose name was taken have been renamed."""
    run_dir = attempt.job.run_dir
    if not run_dir:
        return []
    outputs = list(attempt.job.outputs)
    for event in attempt.events:
        if isinstance(event, OutputsCollected):
            outputs += event.renamed.values()
    candidates: dict[Path, None] = {}
    for output in outputs:
        with suppress(ValueError, OSError):
            for path in _metrics_files(run_dir, output):
                candidates[path] = None
    return list(candidates)


def _metrics_files(run_dir: str, output: str) -> Iterator[Path]:
    pattern = patterns.split(output)
    if pattern is None:
        return
    places = patterns.expand(run_dir, pattern)
    if not pattern:
        places.add("")
    for place in sorted(places):
        path = Path(run_dir, place)
        path = path if path.name == NAME else path / NAME
        if path.is_file() and not path.is_symlink():
            yield path


def _written_by(path: Path, attempt: Attempt) -> bool:
    """Return whether a file was last written while the ranks ran, or that is not known."""
    launches = [record for record in attempt.records if record.phase == PhaseName.LAUNCH]
    if not launches:
        return False
    begun, ended = launches[0].time, attempt.ended
    try:
        changed = path.stat().st_mtime
    except OSError:
        return False
    early = begun is not None and changed < begun
    return not early and (ended is None or changed <= ended + _AFTER)


def _records(path: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the objects of a file, one a line; a pipe or a link is no such file."""
    with suppress(OSError, ValueError):
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        # As a descriptor first: nothing else can be opened under this name in the meantime.
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            os.close(handle)
            return
        with os.fdopen(handle, "rb") as file:
            left = _LONGEST
            while left > 0 and (line := file.readline(min(left, _LINE))):
                left -= len(line)
                raw = _object(line)
                if raw is not None:
                    yield raw


def _object(line: bytes) -> Mapping[str, Any] | None:
    try:
        raw = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return raw if isinstance(raw, dict) else None
