"""Curves of a training, and the charts that show them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from bundle.protocol.dataclass import dataclass
from bundle.protocol.enumerations import PhaseName
from bundle.protocol.events import OutputsCollected

from ..core.files import open_regular
from ..jobs.outcome import find_output_files, is_number
from ..logs.job_files import JobFiles, KeptJob
from ..logs.job_record import JobRecord

# One object a line, by ``python -m trainer`` or any program: for each step ``step``, ``loss`` and
# ``samples_per_second``, for each epoch ``step``, ``epoch``, ``avg_loss`` and ``accuracy``.

NAME = "metrics.jsonl"
_FIGURES = ("step", "loss", "samples_per_second", "epoch", "avg_loss", "accuracy")
_LONGEST = 1 << 26
_LINE = 1 << 16
_FILES = 8
_LARGEST = 1e15  # beyond this a number is an accident, and no axis can show it beside others
_AFTER = 5.0  # seconds by which a file server's clock may be ahead of the driver's

Point = tuple[float, float]


class Epoch(NamedTuple):
    """The figures at the end of an epoch."""

    step: float
    epoch: float
    loss: float | None
    accuracy: float | None


class Curves(NamedTuple):
    """The curves of one training, by step, and the file they come from."""

    path: str
    loss: tuple[Point, ...] = ()
    rate: tuple[Point, ...] = ()  # samples a second, over all ranks
    epochs: tuple[Epoch, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Return whether there is nothing to show."""
        return not (self.loss or self.rate or self.epochs)


def find_curves(files: JobFiles, job: KeptJob, record: JobRecord) -> list[Curves]:
    """Return the curves of a job's training, not those of another job in the same place."""
    mine = [log.path for log in files.logs if log.path.name == NAME]
    if files.job_id:
        mine = [path for path in _list_files(job, record) if _is_written_by(path, record)]
    return [found for found in map(read_curves, mine[:_FILES]) if not found.is_empty]


def read_curves(path: Path) -> Curves:
    """Return the curves in a file, if it is such; a step that was done twice counts as the last."""
    loss: dict[float, float] = {}
    rate: dict[float, float] = {}
    epochs: dict[float, Epoch] = {}
    for raw in _read_objects(path):
        figures = _read_figures(raw)
        step = figures.get("step")
        if step is None:
            continue
        for name, curve in (("loss", loss), ("samples_per_second", rate)):
            if name in figures:
                curve[step] = figures[name]
        if "avg_loss" in raw or "accuracy" in raw:
            epoch = figures.get("epoch", 0.0)
            epochs[epoch] = Epoch(step, epoch, figures.get("avg_loss"), figures.get("accuracy"))
    in_order = tuple(epochs[key] for key in sorted(epochs))
    return Curves(str(path), tuple(sorted(loss.items())), tuple(sorted(rate.items())), in_order)


def _list_files(job: KeptJob, record: JobRecord) -> list[Path]:
    if not job.run_dir:
        return []
    outputs = list(job.outputs)
    for event in record.find_events(OutputsCollected):  # a name that was taken
        outputs += event.renamed.values()
    paths = [Path(job.run_dir, path) for path in find_output_files(job.run_dir, outputs, NAME)]
    return [path for path in paths if path.is_file() and not path.is_symlink()]


def _is_written_by(path: Path, record: JobRecord) -> bool:
    launches = (kept.time for kept in record.records if kept.phase == PhaseName.LAUNCH)
    begun, ended = next(launches, None), record.end_time
    try:
        changed = path.stat().st_mtime
    except OSError:
        return False
    return begun is not None and begun <= changed <= (ended or math.inf) + _AFTER


def _read_objects(path: Path) -> Iterator[Mapping[str, object]]:
    if path.is_symlink():
        return
    with suppress(OSError, ValueError), open_regular(path) as file:
        left = _LONGEST
        while left > 0 and (line := file.readline(min(left, _LINE))):
            left -= len(line)
            with suppress(ValueError, RecursionError):
                raw = json.loads(line)
                if isinstance(raw, dict):
                    yield raw


def _read_figures(raw: Mapping[str, object]) -> dict[str, float]:
    values = ((name, raw.get(name)) for name in _FIGURES)
    return {name: float(value) for name, value in values if is_number(value, _LARGEST)}


# --- Lines over axes: the places of all that is drawn, and the numbers beside it -----------------

# Places along the width are shares of it: a chart is as wide as its box, its text keeps its size.

Tick = tuple[float, str]

_HEIGHT, _ABOVE = 190, 10  # of a line chart: the plot and the room above it, in pixels
_POINTS = 400  # more cannot be told apart; of each stretch the lowest and the highest are kept
_UNITS = 1000  # of the coordinates in which a line is drawn, whatever size it then has
_EDGE = 0.04  # a label nearer than this to an end of its axis would be cut off there
_STEPS = (1.0, 2.0, 5.0, 10.0)
_ALIKE = 1e-9  # numbers that differ by less than this part of them are one to an axis


@dataclass(frozen=True)
class LineChart:
    """A line over axes, by step, and dots on top of it."""

    title: str
    unit: str
    points: Sequence[Point]
    dots: Sequence[tuple[Point, str]] = ()

    @cached_property
    def _axes(self) -> tuple[Sequence[Tick], Sequence[Tick]]:
        """The ticks of both axes; the vertical one begins at zero unless that is far away."""
        steps, values = zip(*self.points, *(point for point, _ in self.dots), strict=True)
        low, high = min(values), max(values)
        bottom = 0.0 if 0 <= low < high * 0.7 else low
        return ticks(min(steps), max(steps), 6), ticks(bottom, high)

    def find_share(self, x: float) -> float:
        """Return a place along the width, as a share of it."""
        return _find_share(self._axes[0], x)

    def find_pixels(self, y: float) -> float:
        """Return a place from the top down, in pixels."""
        return _ABOVE + (1 - _find_share(self._axes[1], y)) * _HEIGHT

    @property
    def grid(self) -> list[Tick]:
        """The numbers of the vertical axis with their places, in pixels."""
        return [(self.find_pixels(value), text) for value, text in self._axes[1]]

    @property
    def labels(self) -> list[Tick]:
        """The numbers of the horizontal axis with their places, as shares of the width."""
        return [(self.find_share(value), text) for value, text in self._axes[0]]

    @property
    def path(self) -> str:
        """The line as SVG's path data, in a square of 1000 units; empty for dots alone."""
        places = [
            f"{self.find_share(x) * _UNITS:.5g} {(1 - _find_share(self._axes[1], y)) * _UNITS:.5g}"
            for x, y in thin_out(self.points)
        ]
        if not places:
            return ""
        return f"M{'L'.join(places)}" + ("h0" if len(places) == 1 else "")

    @property
    def words(self) -> str:
        """The same in words, for screen readers."""
        points = self.points or [point for point, _ in self.dots]
        ends = [f"{decimal(y)} at step {decimal(x)}" for x, y in (points[0], points[-1])]
        return f"{self.title}, {self.unit}: {', '.join(ends)}"


def _find_share(axis: Sequence[Tick], value: float) -> float:
    return (value - axis[0][0]) / (axis[-1][0] - axis[0][0])


def curve_charts(curves: Curves) -> list[LineChart]:
    """Return a chart of the loss and one of the speed, as far as a training tells them."""
    dots = [
        ((epoch.step, epoch.loss), f"epoch {epoch.epoch:g}: mean loss {decimal(epoch.loss)}")
        for epoch in curves.epochs
        if epoch.loss is not None
    ]
    loss = LineChart("Loss", "mean of a step\u2019s rows", curves.loss, dots)
    rate = LineChart("Samples a second", "all ranks, mean since the start", curves.rate)
    return [chart for chart in (loss, rate) if chart.points or chart.dots]


def thin_out(points: Sequence[Point], most: int = _POINTS) -> Sequence[Point]:
    """Return a line with fewer points that looks the same: peaks and valleys stay."""
    if len(points) <= most:
        return points
    stretch = -(-len(points) * 2 // most)
    kept: list[Point] = []
    for begin in range(0, len(points), stretch):
        part = range(begin, min(begin + stretch, len(points)))
        ends = {min(part, key=lambda at: points[at][1]), max(part, key=lambda at: points[at][1])}
        kept += [points[at] for at in sorted(ends)]
    return [points[0], *kept, points[-1]]


# --- Numbers, and round ones for axes ------------------------------------------------------------


def duration(seconds: float) -> str:
    """Return seconds in words: ``0.08 s``, ``12.3 s``, ``3 min 5 s``, ``2 h 10 min``."""
    if seconds < 59.95:
        places = 2 if seconds < 1 else 1
        return f"{seconds:.{places}f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min"


def decimal(value: float) -> str:
    """Return a number with four significant digits."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def percent(share: float) -> str:
    """Return a share of one, as a length in SVG."""
    return f"{min(max(share, 0.0), 1.0) * 100:.4g}%"


def anchor(share: float) -> str:
    """Return the end of a label that is at its place: ``start``, ``middle`` or ``end``."""
    return "start" if share < _EDGE else "end" if share > 1 - _EDGE else "middle"


def ticks(low: float, high: float, most: int = 5) -> list[Tick]:
    """Return round numbers that reach from below ``low`` to above ``high``, each with its text."""
    if high - low <= _ALIKE * max(abs(low), abs(high)):
        spare = abs(low) / 10 or 1.0
        low, high = low - spare, high + spare
    step = _round_step(high - low, most)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [(number * step, _text(number * step, step)) for number in range(first, last + 1)]


def time_ticks(seconds: float, most: int = 6) -> tuple[list[Tick], str]:
    """Return round times from 0 up to a length in seconds, each with its text, and their unit."""
    unit, length = "seconds", 1.0
    if seconds >= 90:
        unit, length = ("minutes", 60.0) if seconds < 90 * 60 else ("hours", 3600.0)
    step = _round_step(max(seconds / length, 1e-3), most)
    steps = [number * step for number in range(math.floor(seconds / length / step + 1e-9) + 1)]
    return [(value * length, _text(value, step)) for value in steps], unit


def _round_step(width: float, most: int) -> float:
    rough = width / most
    power = 10.0 ** math.floor(math.log10(rough))
    return next(step * power for step in _STEPS if step * power >= rough * (1 - 1e-9))


def _text(value: float, step: float) -> str:
    if abs(value) >= 1e7 or 0 < step < 1e-6:
        return f"{value:.4g}"
    places = max(0, -math.floor(math.log10(step) + 1e-9))
    return f"{value:,.{places}f}" if value else "0"
