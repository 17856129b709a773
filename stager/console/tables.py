"""Tables of results, as lines and for a terminal: nodes, failed nodes, forecasts, traces, pairs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Any

from bundle.protocol.counts import format_count, format_size

from ..core.errors import escape_invisible, escape_line_feeds
from ..core.toml import dumps

if TYPE_CHECKING:
    from rich.table import Table

    from bundle.protocol.events import AllReduceMeasured, NodePair

    from ..forecast import Estimate
    from ..incidents.node_history import NodesResult
    from ..jobs.outcome import NodeCheck
    from ..tracing import TraceResult


Cell = str | tuple[str, str]  # a text, or a text and its style
_LAYOUTS: Mapping[str, dict[str, Any]] = {
    "text": {},
    "whole": {"no_wrap": True},
    "number": {"no_wrap": True, "justify": "right"},
    "right": {"justify": "right"},
    "folded": {"overflow": "fold"},
    "rest": {"ratio": 1},
}
"""The layouts of a column; ``rest`` takes the width that the others leave."""


def draw_table(columns: Iterable[tuple[str, str]], rows: Iterable[Sequence[Cell]]) -> Table:
    """Return a table for a terminal; a column is a title and a layout."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for title, layout in columns:
        table.add_column(Text(title), **_LAYOUTS[layout])
    for row in rows:
        table.add_row(*(Text(cell) if isinstance(cell, str) else Text(*cell) for cell in row))
    return table


# --- The nodes of a verification -----------------------------------------------------------------

SHORT = {"transformers": "tfm"}  # names of packages that the one-line form shortens as well
REPORTED = ("torch", "transformers", "datasets", "numpy")
"""Packages that come first; a project without them has its own."""
MAX_PACKAGES = 5  # columns for packages: more do not fit on a screen
_KEPT_COLUMNS = 2  # columns that are shown whole on any terminal: node and state
_PROBLEM_WIDTH = 40  # characters that are left for a column of problems


def make_node_table(nodes: Sequence[NodeCheck], width: int) -> Table:
    """Return a row for each node of a result of ``verify``.

    Node and state are never shortened: where the columns do not fit, the last facts are left out.
    """
    has_problems = any(node.problems for node in nodes)
    titles, rows = _fit(nodes, width - _PROBLEM_WIDTH if has_problems else width)
    columns = [(title, "number" if title == "seconds" else "whole") for title in titles]
    if has_problems:
        columns.append(("problem", "rest"))
    drawn: list[list[Cell]] = []
    for node, (name, state, *facts) in zip(nodes, rows, strict=True):
        problem = [escape_invisible("; ".join(node.problems))] if has_problems else []
        drawn.append([name, (state, "green" if node.ok else "bold red"), *facts, *problem])
    return draw_table(columns, drawn)


def _fit(nodes: Sequence[NodeCheck], width: int) -> tuple[list[str], list[list[str]]]:
    packages = _packages(nodes)
    names = [SHORT.get(name, escape_invisible(name)) for name in packages]
    titles = ["node", "state", "python", *names, "interface", "address", "seconds"]
    rows = [_cells(node, packages) for node in nodes]
    count = len(titles)
    widths = [max(map(len, column)) + 2 for column in zip(titles, *rows, strict=True)]
    while count > _KEPT_COLUMNS and sum(widths[:count]) > width:
        count -= 1
    return titles[:count], [row[:count] for row in rows]


def _cells(node: NodeCheck, packages: Sequence[str]) -> list[str]:
    versions = [node.packages.get(name) or "" for name in packages]
    seconds = "" if node.seconds is None else f"{node.seconds:.1f}"
    state = "OK" if node.ok else "FAILED"
    cells = [node.node, state, node.python, *versions, node.interface, node.address, seconds]
    return list(map(escape_invisible, cells))


def _packages(nodes: Sequence[NodeCheck]) -> list[str]:
    present = dict.fromkeys(name for node in nodes for name in node.packages)
    first = [name for name in REPORTED if name in present]
    others = [name for name in present if name not in REPORTED]
    return [*first, *others][:MAX_PACKAGES]


# --- The nodes that failed lately, as lines and as a table ---------------------------------------

TITLES = ("node", "times", "last", "job", "failure")
_LINE = 80


def format_failed_nodes(result: NodesResult) -> Iterator[str]:
    """Yield the rows for a file or a pipe; they fit 80 columns unless names are very long."""
    for node, times, last, job, failure in (TITLES, *_list_failed_nodes(result)):
        begin = f"{node:14} {times:>5}  {last:10}  {job:9} "
        room = max(_LINE - len(begin), 20)
        yield begin + (failure if len(failure) <= room else f"{failure[: room - 3]}...")


def make_failed_node_table(result: NodesResult) -> Table:
    """Return the same rows for a terminal, with causes as a whole."""
    # A node's name is never shortened.
    layouts = ("folded", "number", "whole", "whole", "rest")
    rows, before = [], ""
    for node, *cells in _list_failed_nodes(result):
        rows.append(("" if node == before else node, *cells))
        before = node
    return draw_table(zip(TITLES, layouts, strict=True), rows)


def _list_failed_nodes(result: NodesResult) -> Iterator[tuple[str, ...]]:
    several = len({node.cluster for node in result.nodes}) > 1
    for node in result.nodes:
        name = f"{node.node} ({node.cluster})" if several and node.cluster else node.node
        for fault in node.faults:
            last = datetime.fromtimestamp(fault.last).strftime("%Y-%m-%d")
            failure = escape_line_feeds(f"{fault.fault.words}: {fault.cause}")
            yield name, str(fault.times), last, fault.job_id, failure


# --- An estimate of the time that staging takes, as lines and as a table -------------------------

PHASES = ("preflight", "send", "unpack", "stage", "probe", "launch", "total")
"""Sending and unpacking overlap: both are in ``stage``."""
_CASE = 18
_COLD = "nothing there yet"
_FILE_SYSTEMS = {"lustre": "Lustre", "nfs": "NFS"}


def format_phases(seconds: Mapping[str, float]) -> str:
    """Return the seconds of each phase in a line."""
    return ", ".join(f"{name} {seconds[name]:.1f} s" for name in PHASES)


def format_forecast(estimate: Estimate) -> Iterator[str]:
    """Yield the rows for a file or a pipe; they fit 80 columns."""
    for nodes, case, cells in (("nodes", "case", PHASES), *_list_forecasts(estimate)):
        first, *middle, last = cells
        aligned = "".join(f"{cell:>7}" for cell in middle)
        yield f"{nodes:>6} {case:{_CASE}.{_CASE}}{first:>10}{aligned}{last:>8}"


def make_forecast_table(estimate: Estimate) -> Table:
    """Return the same rows for a terminal; the alternatives to staging stand out."""
    columns = [("nodes", "number"), ("case", "whole"), *((name, "number") for name in PHASES)]
    rows: list[list[Cell]] = []
    before = None
    for nodes, case, cells in _list_forecasts(estimate):
        style = "bold" if case == _COLD else "yellow" if case.startswith("run") else ""
        count = "" if nodes == before else str(nodes)
        rows.append([count, escape_invisible(case), *((cell, style) for cell in cells)])
        before = nodes
    return draw_table(columns, rows)


def _list_forecasts(estimate: Estimate) -> Iterator[tuple[int, str, Sequence[str]]]:
    """Yield the number of nodes, the case and the cells of each row."""
    for forecast in estimate.forecasts:
        cases = {
            _COLD: forecast.cold,
            "nothing changed": forecast.unchanged,
            f"{estimate.changed} changed": forecast.one_changed,
        }
        for case, phases in cases.items():
            if phases is not None:
                seconds = asdict(phases)
                yield forecast.nodes, case, [_format_seconds(seconds[name]) for name in PHASES]
        blank = [""] * (len(PHASES) - 1)
        for name, total in forecast.shared.items():
            case = f"run from {_FILE_SYSTEMS[name]}"
            yield forecast.nodes, case, [*blank, _format_seconds(total)]


def _format_seconds(value: float) -> str:
    return f"{value:.1f}" if value < 1000 else f"{value:,.0f}"


# --- Files that a smoke test did not read: a table, a summary, the setting that leaves them out

MOST_ROWS = 20  # rows of the table; what is left is summed in one more
_HEAD = ("package", "not read", "files", "bytes")
_MOST_NAMES = 6  # packages that are named in a line


def format_trace(trace: TraceResult) -> list[str]:
    """Return the table for a file or a pipe; it fits 80 columns."""
    rows = (_HEAD, *_list_unread(trace)) if trace.unread else ()
    return [
        f"{_shorten(name, 20):20} {_shorten(what, 38):38} {files:>8} {size:>9}"
        for name, what, files, size in rows
    ]


def make_trace_table(trace: TraceResult) -> Table:
    """Return the same rows for a terminal."""
    layouts = ("text", "text", "number", "number")
    return draw_table(zip(_HEAD, layouts, strict=True), _list_unread(trace))


def _shorten(text: str, width: int) -> str:
    """Return a text that fits, its middle left out: the end of a path says most."""
    if len(text) <= width:
        return text
    begin = (width - 3) // 3
    return f"{text[:begin]}...{text[begin + 3 - width :]}"


def _list_unread(trace: TraceResult) -> Iterator[tuple[str, str, str, str]]:
    for part in trace.unread[:MOST_ROWS]:
        what = escape_invisible(part.path) or f"({part.reason})"
        yield escape_invisible(part.package), what, f"{part.files:,}", format_size(part.bytes)
    rest = trace.unread[MOST_ROWS:]
    if rest:
        files, size = sum(part.files for part in rest), sum(part.bytes for part in rest)
        yield "", f"{len(rest)} more", f"{files:,}", format_size(size)


def summarize_trace(trace: TraceResult) -> Iterator[str]:
    """Yield what the test read in all, and what to think of before a proposal is accepted."""
    files, size = format_count(trace.files_read, "file"), format_size(trace.bytes_read)
    yield f"the smoke test read {files} of {trace.files:,}, {size} of {format_size(trace.bytes)}"
    if trace.prune:
        yield "it passed without what environment.prune leaves out"
    idle = [escape_invisible(row.name) for row in trace.packages if not row.used]
    if idle:
        more = f" and {len(idle) - _MOST_NAMES} more" if len(idle) > _MOST_NAMES else ""
        yield f"nothing was read of {', '.join(idle[:_MOST_NAMES])}{more}, metadata aside"
    if any("GPU" in part.reason for part in trace.unread if not part.path):
        yield "files for a GPU are not proposed: run this where there is one, to see what it reads"
    if not trace.proposed:
        yield "nothing is proposed to be left out"


def propose_pruning(trace: TraceResult) -> Iterator[str]:
    """Yield the lines to paste into ``stager.toml``: what is there already, then the proposals."""
    if not trace.proposed:
        return
    files, size = format_count(trace.proposed_files, "file"), format_size(trace.proposed_bytes)
    yield f"# [environment] in stager.toml: without {files}, {size}, that the test did not read"
    yield "prune = ["
    for entry in (*trace.prune, *trace.proposed):
        yield f"    {dumps({'v': entry}).strip()[len('v = ') :]},"
    yield "]"


# --- The network between the nodes, as ``verify --deep`` measured it: lines and a table ----------

SHOWN = 20
"""Pairs that are shown; of more, the slowest. ``--json`` has all."""


def _choose_pairs(measured: AllReduceMeasured) -> list[NodePair]:
    """Return the pairs to show: all in their order, or the slowest, the very slowest first."""
    pairs = list(measured.pairs)
    return pairs if len(pairs) <= SHOWN else sorted(pairs, key=_rate)[:SHOWN]


def format_pairs(measured: AllReduceMeasured) -> list[str]:
    """Return a line for each pair, for a file or a pipe."""
    return [
        f"PAIR {pair.a} {pair.b} -> {pair.gb_per_s:.2f} GB/s {pair.latency_us:.0f} us"
        for pair in _choose_pairs(measured)
    ]


def summarize_network(measured: AllReduceMeasured) -> list[str]:
    """Return a line about all ranks together, and one about the slowest pair."""
    size, ranks = format_size(measured.bytes), format_count(measured.world_size, "rank")
    speed = f"{measured.seconds:.3f} s, {measured.gb_per_s:.2f} GB/s"
    summary = [f"all-reduce of {size} over {ranks} ({measured.backend}): {speed}"]
    pairs = measured.pairs
    if pairs:
        worst = min(pairs, key=_rate)
        of = f", shown are {SHOWN}" if len(pairs) > SHOWN else ""
        slowest = f"{worst.a} and {worst.b}, {worst.gb_per_s:.2f} GB/s"
        summary.append(f"{format_count(len(pairs), 'pair')} of nodes{of}; slowest: {slowest}")
    return summary


def make_pair_table(measured: AllReduceMeasured) -> Table:
    """Return the same pairs for a terminal; the slowest stands out."""
    # A node's name is never shortened.
    columns = [("node", "folded"), ("node", "folded"), ("GB/s", "number"), ("latency/us", "number")]
    pairs = _choose_pairs(measured)
    slowest = min(map(_rate, pairs), default=0.0) if len(pairs) > 1 else -1.0
    rows: list[list[Cell]] = []
    for pair in pairs:
        style = "yellow" if _rate(pair) == slowest else ""
        cells = (pair.a, pair.b, f"{pair.gb_per_s:.2f}", f"{pair.latency_us:.0f}")
        rows.append([(escape_invisible(cell), style) for cell in cells])
    return draw_table(columns, rows)


def _rate(pair: NodePair) -> float:
    return pair.gb_per_s
