"""Lines and bars as inline SVG.

Places along the width are shares of it, so that a chart is as wide as its box while its text and
its strokes keep their size; no script has to watch the box. What stands beside a chart (names of
rows, numbers of the vertical axis) is in a column of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .markup import Html, element
from .numbers import decimal, percent, ticks

Point = tuple[float, float]
Tick = tuple[float, str]

_HEIGHT, _ABOVE, _BELOW = 190, 10, 24
"""Of a line chart: the plot's height, and the room above and below it, in pixels."""
_POINTS = 400
"""More cannot be told apart; of each stretch the lowest and the highest are kept."""
_UNITS = 1000
"""Of the coordinates in which a line is drawn, whatever size it then has."""
_EDGE = 0.04
"""A label nearer than this to an end of its axis would be cut off there."""


@dataclass(frozen=True, kw_only=True)
class LineChart:
    """A line chart."""

    title: str
    """The title."""
    unit: str
    """The unit of the vertical axis."""
    across: str
    """The unit of the horizontal axis."""
    points: Sequence[Point]
    """The line."""
    dots: Sequence[tuple[Point, str]] = ()
    """Single points on top of it, each with its text."""
    dots_are: str = ""
    """The meaning of the dots."""


def line_chart(chart: LineChart) -> Html:
    """Return a line and dots over axes, with a caption, and in words for screen readers."""
    across, up = _axes([*chart.points, *(point for point, _ in chart.dots)])
    frame = _Frame(across[0][0], across[-1][0], up[0][0], up[-1][0])
    rows = [(_ABOVE + (1 - frame.up(value)) * _HEIGHT, text) for value, text in up]
    total = _ABOVE + _HEIGHT + _BELOW
    numbers = element(
        "svg",
        [element("text", text, x=52, y=f"{y + 4:.4g}", text_anchor="end") for y, text in rows],
        class_="numbers",
        width=56,
        height=total,
        aria_hidden="true",
    )
    plot = element(
        "svg",
        [element("line", x1=0, x2="100%", y1=f"{y:.4g}", y2=f"{y:.4g}") for y, _ in rows],
        labels([(frame.along(value), text) for value, text in across], total - 6),
        _line(thinned(chart.points), frame),
        [_dot(point, text, frame) for point, text in chart.dots],
        class_="area",
        width="100%",
        height=total,
        role="img",
        aria_label=in_words(chart),
    )
    return element(
        "figure",
        element("figcaption", element("b", chart.title), f", {chart.unit}"),
        element("div", numbers, plot, class_="plot"),
        element("p", chart.across, class_="across"),
        _legend(chart),
        class_="chart",
    )


def _axes(points: Sequence[Point]) -> tuple[Sequence[Tick], Sequence[Tick]]:
    """Return the ticks of both axes; the vertical one begins at zero unless that is far away."""
    across = [x for x, _ in points]
    values = [y for _, y in points]
    low, high = min(values), max(values)
    bottom = 0.0 if 0 <= low < high * 0.7 else low
    return ticks(min(across), max(across), 6), ticks(bottom, high)


def _legend(chart: LineChart) -> Html | None:
    """Return the meaning of the line and the dots; nothing for a line alone."""
    if not chart.dots:
        return None
    dots = [element("span", class_="key dot"), chart.dots_are]
    if not chart.points:
        return element("p", dots, class_="keys")
    line = [element("span", class_="key line"), "each step"]
    return element("p", line, " ", dots, class_="keys")


def labels(places: Sequence[Tick], y: float) -> list[Html]:
    """Return the numbers below an axis, placed by their shares of its length."""
    texts = []
    for share, text in places:
        anchor = "start" if share < _EDGE else "end" if share > 1 - _EDGE else "middle"
        texts.append(element("text", text, x=percent(share), y=f"{y:.4g}", text_anchor=anchor))
    return texts


def in_words(chart: LineChart) -> str:
    """Return a line in words, for screen readers."""
    points = chart.points or [point for point, _ in chart.dots]
    (first, begin), (last, end) = points[0], points[-1]
    least, most = min(points, key=lambda point: point[1]), max(points, key=lambda point: point[1])
    ends = f"{decimal(begin)} at {chart.across} {decimal(first)}, "
    ends += f"{decimal(end)} at {chart.across} {decimal(last)}"
    extremes = f"lowest {decimal(least[1])} at {decimal(least[0])}, "
    extremes += f"highest {decimal(most[1])} at {decimal(most[0])}"
    return f"{chart.title}, {chart.unit}: {ends}; {extremes}"


def thinned(points: Sequence[Point], most: int = _POINTS) -> Sequence[Point]:
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


def bar(share: float) -> Html:
    """Return a horizontal bar, for a cell of a table that has the number too."""
    drawn = element("rect", width=percent(share), height="100%")
    return element("svg", drawn, class_="bar", width="100%", height=12, aria_hidden="true")


@dataclass(frozen=True)
class _Frame:
    """The ranges of the axes."""

    left: float
    right: float
    bottom: float
    top: float

    def along(self, x: float) -> float:
        return (x - self.left) / (self.right - self.left)

    def up(self, y: float) -> float:
        return (y - self.bottom) / (self.top - self.bottom)


def _line(points: Sequence[Point], frame: _Frame) -> Html | None:
    if not points:
        return None
    places = [f"{frame.along(x) * _UNITS:.5g} {(1 - frame.up(y)) * _UNITS:.5g}" for x, y in points]
    path = element("path", d=f"M{'L'.join(places)}" + ("h0" if len(places) == 1 else ""))
    return element(
        "svg",
        path,
        y=_ABOVE,
        width="100%",
        height=_HEIGHT,
        viewBox=f"0 0 {_UNITS} {_UNITS}",
        preserveAspectRatio="none",
        class_="line",
    )


def _dot(point: Point, text: str, frame: _Frame) -> Html:
    x, y = point
    place = _ABOVE + (1 - frame.up(y)) * _HEIGHT
    return element(
        "circle", element("title", text), cx=percent(frame.along(x)), cy=f"{place:.4g}", r=4
    )
