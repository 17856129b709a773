"""The phases of a job as bars, one row a node, and the same as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bundle.protocol.counts import counted

from .chart import labels
from .markup import Html, element
from .numbers import duration, percent, time_ticks
from .phases import FAILED, OPEN, PHASES, SILENT, STAGING, TRAIN, NodePhases, Passage, PhaseSpan

MOST = 40
"""Rows that are drawn; more cannot be looked over."""
_ROW, _BAR, _BELOW = 22, 14, 26
_NAME = 16
"""Characters of a node's name beside its row; the table has all of it."""
_SHORT = 0.25
"""The beginning is drawn again, larger, where it takes no more than this share of the job."""
NAMES = {
    "preflight": "preflight",
    "place": "place and broadcast",
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
    "preflight": "until the node had answered what it has, and lacks",
    "place": "the decision, and the sending of the bundle",
    "unpack": "until the environment was there",
    "probe": "until it was checked",
    "deep": "until every file was read again",
    "launch": "until the ranks' launcher was started",
    "train": "until it had ended, its imports included",
    "all_reduce": "until all ranks had talked",
    "clean": "until old environments were gone",
}
_STATES = {FAILED: "failed", SILENT: "no answer", OPEN: "not ended"}
_STRIPES = {
    "place": "M0 8L8 0M-2 2L2-2M6 10L10 6",
    "probe": "M2 2h.01M6 6h.01",
    "deep": "M0 8L8 0M0 0L8 8",
    "launch": "M2 0V8M6 0V8",
    "all_reduce": "M0 4H8",
    "clean": "M0 0L8 8",
}
"""The pattern on a phase's colour, so that colour is not the only sign."""


@dataclass(frozen=True)
class _Window:
    """The time that a drawing shows, in seconds."""

    begin: float
    length: float

    def share(self, at: float) -> float:
        return (at - self.begin) / self.length


def chosen(rows: Sequence[NodePhases], first: str) -> list[NodePhases]:
    """Return the rows to draw: those with a failure and the slowest, in the job's order."""
    ranked = sorted(rows, key=lambda row: (row.node != first, not row.failed, -row.staging))
    kept = {row.node for row in ranked[:MOST]}
    return [row for row in rows if row.node in kept]


def patterns() -> Html:
    """Return the fillings of the bars, for once in a page that has timelines."""
    made = [
        element(
            "pattern",
            element("rect", width=8, height=8),
            element("path", d=lines),
            id=f"fill-{phase}",
            class_=f"phase-{phase}",
            width=8,
            height=8,
            patternUnits="userSpaceOnUse",
        )
        for phase, lines in _STRIPES.items()
    ]
    drawn = element("defs", made)
    return element("svg", drawn, class_="patterns", width=0, height=0, aria_hidden="true")


def timelines(passage: Passage, first: str) -> list[Html]:
    """Return the drawing of a whole job, and of its beginning where that is short.

    Args:
        passage: the nodes' ways.
        first: the node that failed first; empty for none.
    """
    rows, length = chosen(passage.rows, first), passage.end - passage.begin
    whole = _drawing("The whole job", rows, _Window(passage.begin, max(length, 1e-3)), first)
    running = passage.running
    staging = 0.0 if running is None else running - passage.begin
    if not 0 < staging < length * _SHORT:
        return [whole]
    part = _Window(passage.begin, staging * 1.02)
    return [whole, _drawing("Until the ranks ran, larger", rows, part, first)]


def legend(passage: Passage) -> Html:
    """Return the meaning of the bars: the phases in use, and the signs of trouble."""
    spans = [span for row in passage.rows for span in row.spans]
    present = [phase for phase in PHASES if any(span.phase == phase for span in spans)]
    entries = [
        element("li", _swatch(phase), element("b", NAMES[phase]), f": {_MEANINGS[phase]}")
        for phase in present
    ]
    states = {span.state for span in spans}
    if states & {FAILED, SILENT}:
        bad = "went wrong there, or gave no answer"
        entries.append(
            element("li", _swatch("", FAILED), element("b", "\u2717 framed"), f": {bad}")
        )
    if OPEN in states:
        more = "no end is known"
        entries.append(
            element("li", _swatch("", OPEN), element("b", "\u2026 broken frame"), f": {more}")
        )
    return element("ul", entries, class_="legend")


def as_table(passage: Passage) -> Html:
    """Return the same as a table: the seconds of each node in each phase."""
    in_use = {span.phase for row in passage.rows for span in row.spans}
    phases = [phase for phase in PHASES if phase in in_use]
    head = [element("th", NAMES[phase], scope="col") for phase in phases]
    body = [
        element(
            "tr",
            element("th", row.node, scope="row"),
            [element("td", [_cell(s, passage) for s in _of(row, phase)]) for phase in phases],
        )
        for row in passage.rows
    ]
    return element(
        "table",
        element("caption", "How long each phase took on each node, and when it began"),
        element("thead", element("tr", element("th", "node", scope="col"), head)),
        element("tbody", body),
    )


def _of(row: NodePhases, phase: str) -> list[PhaseSpan]:
    return [span for span in row.spans if span.phase == phase]


def _cell(span: PhaseSpan, passage: Passage) -> Html:
    length = duration(span.seconds)
    state = f" ({_STATES[span.state]})" if span.state in _STATES else ""
    begin = element("small", f"at {duration(span.begin - passage.begin)}")
    return element("div", length, element("b", state) if state else None, " ", begin, class_="span")


def _drawing(title: str, rows: Sequence[NodePhases], window: _Window, first: str) -> Html:
    height = len(rows) * _ROW
    places, unit = time_ticks(window.length)
    at = [(value / window.length, text) for value, text in places]
    plot = element(
        "svg",
        [element("line", x1=percent(share), x2=percent(share), y1=0, y2=height) for share, _ in at],
        [_row(row, number * _ROW, window) for number, row in enumerate(rows)],
        labels(at, height + _BELOW - 8),
        class_="area",
        width="100%",
        height=height + _BELOW,
        role="img",
        aria_label=_in_words(title, rows, window.length, first),
    )
    names = [_name(row, first) for row in rows]
    return element(
        "figure",
        element("figcaption", element("b", title)),
        element(
            "div", element("div", names, class_="names", aria_hidden="true"), plot, class_="plot"
        ),
        element("p", f"{unit} since the job began", class_="across"),
        class_="chart timeline",
    )


def _name(row: NodePhases, first: str) -> Html:
    sign = "\u2717 " if row.failed else "\u2026 " if _is_open(row) else ""
    kind = "first" if row.node == first and row.failed else None
    return element("div", sign, shortened(row.node), class_=kind, title=row.node)


def shortened(name: str) -> str:
    """Return a short form of a node's name, with the end, which tells it from others."""
    return name if len(name) <= _NAME else f"{name[:5]}\u2026{name[6 - _NAME :]}"


def _is_open(row: NodePhases) -> bool:
    return any(span.state == OPEN for span in row.spans)


def _row(row: NodePhases, top: int, window: _Window) -> Html:
    bars = []
    for span in row.spans:
        left, right = window.share(span.begin), min(window.share(span.end), 1.0)
        if left > 1:
            continue
        state = f" {_STATES[span.state]}" if span.state in _STATES else ""
        title = f"{row.node}: {NAMES[span.phase]} {duration(span.seconds)}{state}"
        bars.append(
            element(
                "rect",
                element("title", title),
                x=percent(left),
                y=top + (_ROW - _BAR) // 2,
                width=percent(right - left),
                height=_BAR,
                class_=f"span phase-{span.phase} {span.state}",
                fill=_fill(span.phase),
            )
        )
    return element("g", bars)


def _fill(phase: str) -> str | None:
    return f"url(#fill-{phase})" if phase in _STRIPES else None


def _swatch(phase: str, state: str = "") -> Html:
    drawn = element(
        "rect",
        x=1,
        y=1,
        width=20,
        height=12,
        class_=f"span {f'phase-{phase}' if phase else 'bare'} {state}".strip(),
        fill=_fill(phase),
    )
    return element("svg", drawn, width=22, height=14, class_="swatch", aria_hidden="true")


def _in_words(title: str, rows: Sequence[NodePhases], length: float, first: str) -> str:
    sentences = [f"{title}: {counted(len(rows), 'node')} over {duration(length)}."]
    for phase in (*STAGING, TRAIN):
        spans = [span for row in rows for span in _of(row, phase)]
        longest = max(spans, key=lambda span: span.seconds, default=None)
        if longest is not None:
            sentences.append(f"{NAMES[phase]} took up to {duration(longest.seconds)}.")
    bad = [row.node for row in rows if row.failed]
    if bad:
        named = f"{', '.join(bad[:8])}{' and others' if len(bad) > 8 else ''}"
        sentences.append(f"Something failed on {named}{f'; on {first} first' if first else ''}.")
    return " ".join(sentences)
