"""The report about a job: one file of HTML that needs no other, no network and no script."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from bundle.protocol.counts import counted, sized
from bundle.system import permissions

from ..core.errors import TURNING
from ..core.files import output_file
from ..diagnosis.failure import ranks_in_words, when
from ..logs.job_files import JobFiles, output_place
from .attempt import (
    FAILED,
    OPEN,
    PHASES,
    SILENT,
    STAGING,
    TRAIN,
    JobPhases,
    Node,
    NodePhases,
    PhaseSpan,
    apart,
)
from .charts import AxisLabel, axis_labels, curve_charts, decimal, duration, percent, time_ticks
from .collect import ReportData, collect

if TYPE_CHECKING:
    from jinja2 import Environment


# --- The phases of a job as bars, one row a node, and the same as a table ------------------------

_MOST = 40
"""Rows that are drawn; more cannot be looked over."""
_ROW, _BAR, _BELOW = 22, 14, 26
_NAME = 16
"""Characters of a node's name beside its row; the table has all of it."""
_SHORT = 0.25
"""The beginning is drawn again, larger, where it takes no more than this share of the job."""
_NAMES = {
    "preflight": "preflight",
    "place": "plan",
    "unpack": "unpack",
    "probe": "probe",
    "deep": "close look",
    "launch": "launch",
    "train": "train",
    "all_reduce": "all-reduce",
    "clean": "clean",
}
"""The title of each phase."""
_MEANINGS = {
    "preflight": "until the node had reported what it has and what it lacks",
    "place": "planning what to send",
    "unpack": "sending and unpacking, until the environment was there",
    "probe": "until it was checked",
    "deep": "until every file was read again",
    "launch": "until the ranks' launcher was started",
    "train": "until it had ended, its imports included",
    "all_reduce": "until all ranks had exchanged data",
    "clean": "until old environments were gone",
}
_STATES = {FAILED: "failed", SILENT: "no answer", OPEN: "not ended"}


@dataclass(frozen=True, kw_only=True)
class TimelineBar:
    """A node in a phase, as a bar."""

    phase: str
    """The phase."""
    state: str
    """Its state."""
    x: str
    """Where it begins, as a share of the width."""
    y: int
    """Its upper edge, in pixels."""
    width: str
    """Its length, as a share of the width."""
    title: str
    """The same in words."""


@dataclass(frozen=True, kw_only=True)
class TimelineRow:
    """A node, as a row of bars."""

    node: str
    """Its name."""
    short: str
    """The part of its name that there is room for."""
    sign: str
    """A sign where something failed, or has no end; else empty."""
    first: bool
    """True for the node that failed first."""
    bars: tuple[TimelineBar, ...]
    """Its bars."""


@dataclass(frozen=True, kw_only=True)
class TimelineDrawing:
    """The rows of a stretch of time."""

    title: str
    """The title."""
    rows: tuple[TimelineRow, ...]
    """The rows."""
    labels: tuple[AxisLabel, ...]
    """The times, where there is a vertical line each."""
    unit: str
    """The unit of the times."""
    words: str
    """The same in words, for screen readers."""
    row_height: int = _ROW
    """The height of a row, in pixels."""
    bar_height: int = _BAR
    """The height of a bar, in pixels."""
    below: int = _BELOW
    """The room for the times, in pixels."""


@dataclass(frozen=True, kw_only=True)
class LegendEntry:
    """The meaning of a bar."""

    phase: str
    """The phase; empty for the meaning of a state."""
    state: str
    """The state; empty for the meaning of a phase."""
    name: str
    """Its name."""
    meaning: str
    """Its meaning."""


@dataclass(frozen=True, kw_only=True)
class PhaseTime:
    """A node in a phase, as a cell of a table."""

    length: str
    """Its duration."""
    state: str
    """Its state where that is not a good end; else empty."""
    begin: str
    """Its beginning."""


@dataclass(frozen=True, kw_only=True)
class PhaseTable:
    """All nodes in all phases."""

    phases: tuple[str, ...]
    """The names of the phases in use."""
    rows: tuple[tuple[str, tuple[tuple[PhaseTime, ...], ...]], ...]
    """Each node with its times in each phase."""


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """The timeline of a job."""

    legend: tuple[LegendEntry, ...]
    """The meaning of the bars."""
    nodes: int
    """The number of nodes."""
    drawn: int
    """The number of those that are drawn."""
    drawings: tuple[TimelineDrawing, ...]
    """The whole job, and its beginning where that is short."""
    table: PhaseTable
    """The same as a table."""


@dataclass(frozen=True)
class _Window:
    """The time that a drawing shows, in seconds."""

    begin: float
    length: float

    def share(self, at: float) -> float:
        return (at - self.begin) / self.length


def timeline(job: JobPhases, first: str) -> Timeline | None:
    """Return the timeline; None without any phase; ``first`` is the first failed node, or empty."""
    if not any(row.spans for row in job.rows):
        return None
    rows = chosen(job.rows, first)
    return Timeline(
        legend=_legend(job),
        nodes=len(job.rows),
        drawn=len(rows),
        drawings=_drawings(job, rows, first),
        table=_table(job),
    )


def chosen(rows: Sequence[NodePhases], first: str) -> list[NodePhases]:
    """Return the rows to draw: those with a failure and the slowest, in the job's order."""
    ranked = sorted(rows, key=lambda row: (row.node != first, not row.failed, -row.staging))
    kept = {row.node for row in ranked[:_MOST]}
    return [row for row in rows if row.node in kept]


def _drawings(
    job: JobPhases, rows: Sequence[NodePhases], first: str
) -> tuple[TimelineDrawing, ...]:
    length = job.end - job.begin
    whole = _drawing("The whole job", rows, _Window(job.begin, max(length, 1e-3)), first)
    running = job.running
    staging = 0.0 if running is None else running - job.begin
    if not 0 < staging < length * _SHORT:
        return (whole,)
    part = _Window(job.begin, staging * 1.02)
    return whole, _drawing("Until the ranks ran, larger", rows, part, first)


def _legend(job: JobPhases) -> tuple[LegendEntry, ...]:
    spans = [span for row in job.rows for span in row.spans]
    phases, states = {span.phase for span in spans}, {span.state for span in spans}
    entries = [
        LegendEntry(phase=phase, state="", name=_NAMES[phase], meaning=_MEANINGS[phase])
        for phase in PHASES
        if phase in phases
    ]
    if states & {FAILED, SILENT}:
        meaning = "went wrong there, or gave no answer"
        entries.append(LegendEntry(phase="", state=FAILED, name="\u2717 framed", meaning=meaning))
    if OPEN in states:
        name, meaning = "\u2026 broken frame", "no end is known"
        entries.append(LegendEntry(phase="", state=OPEN, name=name, meaning=meaning))
    return tuple(entries)


def _table(job: JobPhases) -> PhaseTable:
    in_use = {span.phase for row in job.rows for span in row.spans}
    phases = [phase for phase in PHASES if phase in in_use]
    rows = []
    for row in job.rows:
        times = [tuple(_time(span, job) for span in _of(row, phase)) for phase in phases]
        rows.append((row.node, tuple(times)))
    return PhaseTable(phases=tuple(_NAMES[phase] for phase in phases), rows=tuple(rows))


def _time(span: PhaseSpan, job: JobPhases) -> PhaseTime:
    begin = duration(span.begin - job.begin)
    return PhaseTime(length=duration(span.seconds), state=_STATES.get(span.state, ""), begin=begin)


def _of(row: NodePhases, phase: str) -> list[PhaseSpan]:
    return [span for span in row.spans if span.phase == phase]


def shortened(name: str) -> str:
    """Return a short form of a node's name, with the end, which tells it from others."""
    return name if len(name) <= _NAME else f"{name[:5]}\u2026{name[6 - _NAME :]}"


def _drawing(
    title: str, rows: Sequence[NodePhases], window: _Window, first: str
) -> TimelineDrawing:
    places, unit = time_ticks(window.length)
    return TimelineDrawing(
        title=title,
        rows=tuple(_row(row, number * _ROW, window, first) for number, row in enumerate(rows)),
        labels=axis_labels([(value / window.length, text) for value, text in places]),
        unit=unit,
        words=_in_words(title, rows, window.length, first),
    )


def _row(row: NodePhases, top: int, window: _Window, first: str) -> TimelineRow:
    is_open = any(span.state == OPEN for span in row.spans)
    return TimelineRow(
        node=row.node,
        short=shortened(row.node),
        sign="\u2717 " if row.failed else "\u2026 " if is_open else "",
        first=row.node == first and row.failed,
        bars=tuple(
            _bar(row.node, span, top, window) for span in row.spans if window.share(span.begin) <= 1
        ),
    )


def _bar(node: str, span: PhaseSpan, top: int, window: _Window) -> TimelineBar:
    left, right = window.share(span.begin), min(window.share(span.end), 1.0)
    state = f" {_STATES[span.state]}" if span.state in _STATES else ""
    return TimelineBar(
        phase=span.phase,
        state=span.state,
        x=percent(left),
        y=top + (_ROW - _BAR) // 2,
        width=percent(right - left),
        title=f"{node}: {_NAMES[span.phase]} {duration(span.seconds)}{state}",
    )


def _in_words(title: str, rows: Sequence[NodePhases], length: float, first: str) -> str:
    sentences = [f"{title}: {counted(len(rows), 'node')} over {duration(length)}."]
    for phase in (*STAGING, TRAIN):
        spans = [span for row in rows for span in _of(row, phase)]
        longest = max(spans, key=lambda span: span.seconds, default=None)
        if longest is not None:
            sentences.append(f"{_NAMES[phase]} took up to {duration(longest.seconds)}.")
    bad = [row.node for row in rows if row.failed]
    if bad:
        named = f"{', '.join(bad[:8])}{' and others' if len(bad) > 8 else ''}"
        sentences.append(f"Something failed on {named}{f'; on {first} first' if first else ''}.")
    return " ".join(sentences)


# --- The page: one file of HTML that needs no other, no network and no script --------------------

# What a job has left may hold anything. The templates (``*.html.j2``) have all of the markup; a
# value becomes part of it in one way only, which shows what is invisible in it and escapes the
# rest.

_LONGEST = 600
"""Characters of a text that are shown; what ranks write may have no end."""
_SHOWN = {code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\t\n"}
_SHOWN |= {0x7F: "\u2421"}
_SHOWN |= dict.fromkeys(
    (
        *range(0x80, 0xA0),  # a terminal's, as escape is
        *range(0xD800, 0xE000),  # halves of characters, which no file can hold
    ),
    "\ufffd",
)
_SHOWN |= {code: f"\\u{code:04x}" for code in TURNING}
_COLUMNS = {
    "state": "state",
    "ending": "exit status",
    "problems": "problems",
    "python": "Python",
    "packages": "packages",
    "interface": "interface",
    "address": "address",
}
"""The columns about a node, by its fields."""


def page(data: ReportData) -> str:
    """Return the whole file."""
    style = _resource("style.css")
    template = environment().get_template("page.html.j2")
    return template.render(
        data=data,
        timeline=timeline(data.phases, data.first),
        training=[(curves, curve_charts(curves)) for curves in data.training.curves],
        columns=_columns(data.nodes),
        different=apart(data.nodes),
        style=style,
        style_digest=base64.b64encode(hashlib.sha256(style.encode()).digest()).decode(),
    )


def environment() -> Environment:
    """Return the environment of the templates: each value is escaped, and a wrong name fails."""
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    templates = Environment(
        loader=FunctionLoader(_resource),
        autoescape=True,
        finalize=shown,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    templates.filters.update(
        clipped=clipped,
        counted=counted,
        decimal=decimal,
        duration=duration,
        percent=percent,
        ranks=ranks_in_words,
        sized=sized,
        when=when,
    )
    return templates


def shown(value: object) -> object:
    """Return a value with characters shown that are invisible or change the display."""
    # What a macro gives is markup already, and knows it.
    if isinstance(value, int | float) or hasattr(value, "__html__"):
        return value
    return str(value).translate(_SHOWN)


def clipped(text: str, longest: int = _LONGEST) -> str:
    """Return a text, or its beginning where it is very long."""
    return text if len(text) <= longest else f"{text[:longest]}\N{HORIZONTAL ELLIPSIS}"


def _columns(nodes: Sequence[Node]) -> dict[str, str]:
    return {
        field: title
        for field, title in _COLUMNS.items()
        if any(getattr(node, field) for node in nodes)
    }


def _resource(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


# --- The report about a job: one page with its verdict, failure, times, nodes and bundle ---------


@dataclass(frozen=True, kw_only=True)
class Report:
    """A page that was written."""

    ok: bool = True
    """True: a page that cannot be written is an error."""
    path: Path = field(metadata={"json": "report"})
    """The file."""
    job_id: str
    """The job it is about; empty for somebody else's logs."""
    size: int = field(metadata={"json": "bytes"})
    """Its length in bytes."""


def report(files: JobFiles, output: Path | None = None) -> Report:
    """Write the page of a job.

    Raises:
        StagerError: it cannot be written.
    """
    name = files.folder / f"report.{files.job_id}.html" if files.job_id else Path("report.html")
    path = (name if output is None else output).absolute()
    place = output_place(path, files, "the report")
    data = collect(files)
    html = page(data).encode("utf-8", "replace")
    with output_file(place, permissions.opener(data.job.log_mode)) as file:
        file.write(html)
    return Report(path=path, job_id=files.job_id, size=len(html))
