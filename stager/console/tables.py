"""Tables of results, as lines and for a terminal: failed nodes, forecasts, traces, the network."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING

from bundle.protocol.counts import counted, sized

from ..core.errors import in_one_line, visible
from ..core.toml import dumps

if TYPE_CHECKING:
    from rich.table import Table

    from bundle.protocol.events import AllReduceMeasured, NodePair

    from ..forecast import Estimate
    from ..incidents.node_history import NodesResult
    from ..tracing import TraceResult, UnreadFiles


# --- The nodes that failed lately, as lines and as a table ---------------------------------------

TITLES = ("node", "times", "last", "job", "failure")
_FAILED_NODE_WIDTHS = (14, 5, 10, 9)
_LINE = 80


def format_failed_nodes(result: NodesResult) -> list[str]:
    """Return the rows for a file or a pipe; they fit 80 columns unless names are very long."""
    return [
        _align_failed_node(TITLES),
        *(_align_failed_node(cells) for cells in _list_failed_nodes(result)),
    ]


def _align_failed_node(cells: tuple[str, ...]) -> str:
    node, times, last, job, failure = cells
    widths = iter(_FAILED_NODE_WIDTHS)
    begin = (
        f"{node:{next(widths)}} {times:>{next(widths)}}  {last:{next(widths)}}  "
        f"{job:{next(widths)}} "
    )
    room = max(_LINE - len(begin), 20)
    return begin + (failure if len(failure) <= room else f"{failure[: room - 3]}...")


def make_failed_node_table(result: NodesResult) -> Table:
    """Return the same rows for a terminal, with causes as a whole."""
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=None, pad_edge=False, header_style="bold")
    drawn.add_column(TITLES[0], overflow="fold")  # a name is never shortened
    for title in TITLES[1:-1]:
        drawn.add_column(title, no_wrap=True, justify="right" if title == "times" else "left")
    drawn.add_column(TITLES[-1], ratio=1)
    before = ""
    for node, *cells in _list_failed_nodes(result):
        drawn.add_row(*map(Text, ("" if node == before else node, *cells)))
        before = node
    return drawn


def _list_failed_nodes(result: NodesResult) -> Iterator[tuple[str, ...]]:
    several = len({node.cluster for node in result.nodes}) > 1
    for node in result.nodes:
        name = f"{node.node} ({node.cluster})" if several and node.cluster else node.node
        for fault in node.faults:
            last = datetime.fromtimestamp(fault.last).strftime("%Y-%m-%d")
            failure = in_one_line(f"{fault.fault.words}: {fault.cause}")
            yield name, str(fault.times), last, fault.job_id, failure


# --- An estimate of the time that staging takes, as lines and as a table -------------------------

PHASES = ("preflight", "send", "unpack", "stage", "probe", "launch", "total")
"""Sending and unpacking overlap: both are in ``stage``."""
_FORECAST_WIDTHS = (10, 7, 7, 7, 7, 7, 8)
_CASE = 18
_COLD = "nothing there yet"
_FILE_SYSTEMS = {"lustre": "Lustre", "nfs": "NFS"}


def format_phases(seconds: Mapping[str, float]) -> str:
    """Return the seconds of each phase in a line."""
    return ", ".join(f"{name} {seconds[name]:.1f} s" for name in PHASES)


def format_forecast(estimate: Estimate) -> list[str]:
    """Return the rows for a file or a pipe; they fit 80 columns."""
    rows = [f"{'nodes':>6} {'case':{_CASE}}{_align_forecast(PHASES)}"]
    for nodes, case, cells in _list_forecasts(estimate):
        rows.append(f"{nodes:>6} {case:{_CASE}.{_CASE}}{_align_forecast(cells)}")
    return rows


def _align_forecast(cells: Sequence[str]) -> str:
    return "".join(f"{cell:>{width}}" for cell, width in zip(cells, _FORECAST_WIDTHS, strict=True))


def forecast_table(estimate: Estimate) -> Table:
    """Return the same rows for a terminal; the alternatives to staging stand out."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("nodes", justify="right", no_wrap=True)
    table.add_column("case", no_wrap=True)
    for name in PHASES:
        table.add_column(name, justify="right", no_wrap=True)
    before = None
    for nodes, case, cells in _list_forecasts(estimate):
        style = _style(case)
        count = "" if nodes == before else str(nodes)
        table.add_row(count, Text(visible(case)), *(Text(cell, style=style) for cell in cells))
        before = nodes
    return table


def _style(case: str) -> str:
    if case == _COLD:
        return "bold"
    return "yellow" if case.startswith("run") else ""


def _list_forecasts(estimate: Estimate) -> Iterator[tuple[int, str, list[str]]]:
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
                yield forecast.nodes, case, [_seconds(seconds[name]) for name in PHASES]
        for name, total in forecast.shared.items():
            blank = [""] * (len(PHASES) - 1)
            yield forecast.nodes, f"run from {_FILE_SYSTEMS[name]}", [*blank, _seconds(total)]


def _seconds(value: float) -> str:
    return f"{value:.1f}" if value < 1000 else f"{value:,.0f}"


# --- Files that a smoke test did not read: a table, a summary, the setting that leaves them out

MOST_ROWS = 20
"""Rows of the table; what is left is summed in one more."""
_HEAD = ("package", "not read", "files", "bytes")
_TRACE_WIDTHS = (20, 38, 8, 9)
_MOST_NAMES = 6
"""Packages that are named in a line."""


def format_trace(trace: TraceResult) -> list[str]:
    """Return the table for a file or a pipe; it fits 80 columns."""
    if not trace.unread:
        return []
    return [_align_trace(row) for row in (_HEAD, *_list_unread(trace))]


def make_trace_table(trace: TraceResult) -> Table:
    """Return the same rows for a terminal."""
    from rich.table import Table
    from rich.text import Text

    made = Table(box=None, pad_edge=False, header_style="bold")
    for name in _HEAD:
        right = name in ("files", "bytes")
        made.add_column(name, justify="right" if right else "left", no_wrap=right)
    for row in _list_unread(trace):
        made.add_row(*(Text(cell) for cell in row))
    return made


def _align_trace(row: Sequence[str]) -> str:
    name, what, files, size = row
    wide, wider, narrow, last = _TRACE_WIDTHS
    return f"{_cut(name, wide):{wide}} {_cut(what, wider):{wider}} {files:>{narrow}} {size:>{last}}"


def _cut(text: str, width: int) -> str:
    """Return a text that fits, its middle left out: the end of a path says most."""
    if len(text) <= width:
        return text
    begin = (width - 3) // 3
    return f"{text[:begin]}...{text[begin + 3 - width :]}"


def _list_unread(trace: TraceResult) -> Iterator[tuple[str, str, str, str]]:
    for part in trace.unread[:MOST_ROWS]:
        what = visible(part.path) or f"({part.reason})"
        yield visible(part.package), what, f"{part.files:,}", sized(part.bytes)
    rest = trace.unread[MOST_ROWS:]
    if rest:
        yield ("", f"{len(rest)} more", *_sum(rest))


def _sum(parts: Sequence[UnreadFiles]) -> tuple[str, str]:
    return f"{sum(part.files for part in parts):,}", sized(sum(part.bytes for part in parts))


def summarize_trace(trace: TraceResult) -> Iterator[str]:
    """Yield what the test read in all, and what to think of before a proposal is accepted."""
    files, size = counted(trace.files_read, "file"), sized(trace.bytes_read)
    yield f"the smoke test read {files} of {trace.files:,}, {size} of {sized(trace.bytes)}"
    if trace.prune:
        yield "it passed without what environment.prune leaves out"
    idle = [row.name for row in trace.packages if not row.used]
    if idle:
        named = ", ".join(map(visible, idle[:_MOST_NAMES]))
        more = f" and {len(idle) - _MOST_NAMES} more" if len(idle) > _MOST_NAMES else ""
        yield f"nothing was read of {named}{more}, metadata aside"
    if any(part.reason and not part.path and "GPU" in part.reason for part in trace.unread):
        yield (
            "files for a GPU are not proposed: run this where there is one, to see what it reads"
        )
    if not trace.proposed:
        yield "nothing is proposed to be left out"


def propose_pruning(trace: TraceResult) -> Iterator[str]:
    """Yield the lines to paste into ``stager.toml``: what is there already, then the proposals."""
    if not trace.proposed:
        return
    files, size = counted(trace.proposed_files, "file"), sized(trace.proposed_bytes)
    yield f"# [environment] in stager.toml: without {files}, {size}, that the test did not read"
    yield "prune = ["
    for entry in (*trace.prune, *trace.proposed):
        yield f"    {dumps({'v': entry}).strip()[len('v = ') :]},"
    yield "]"


# --- The network between the nodes, as ``verify --deep`` measured it: lines and a table ----------

SHOWN = 20
"""Pairs that are shown; of more, the slowest. ``--json`` has all."""


def choose_pairs(measured: AllReduceMeasured) -> list[NodePair]:
    """Return the pairs to show: all in their order, or the slowest, the very slowest first."""
    pairs = list(measured.pairs)
    return pairs if len(pairs) <= SHOWN else sorted(pairs, key=_rate)[:SHOWN]


def format_pairs(measured: AllReduceMeasured) -> list[str]:
    """Return a line for each pair, for a file or a pipe."""
    return [
        f"PAIR {pair.a} {pair.b} -> {pair.gb_per_s:.2f} GB/s {pair.latency_us:.0f} us"
        for pair in choose_pairs(measured)
    ]


def summarize_network(measured: AllReduceMeasured) -> list[str]:
    """Return a line about all ranks together, and one about the slowest pair."""
    summary = [
        f"all-reduce of {sized(measured.bytes)} over {counted(measured.world_size, 'rank')} "
        f"({measured.backend}): {measured.seconds:.3f} s, {measured.gb_per_s:.2f} GB/s"
    ]
    pairs = measured.pairs
    if pairs:
        worst = min(pairs, key=_rate)
        count = counted(len(pairs), "pair")
        of = f", shown are {SHOWN}" if len(pairs) > SHOWN else ""
        summary.append(
            f"{count} of nodes{of}; slowest: {worst.a} and {worst.b}, {worst.gb_per_s:.2f} GB/s"
        )
    return summary


def pair_table(measured: AllReduceMeasured) -> Table:
    """Return the same pairs for a terminal; the slowest stands out."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("node", overflow="fold")  # a name is never shortened
    table.add_column("node", overflow="fold")
    table.add_column("GB/s", justify="right", no_wrap=True)
    table.add_column("latency/us", justify="right", no_wrap=True)
    pairs = choose_pairs(measured)
    slowest = min(map(_rate, pairs), default=0.0) if len(pairs) > 1 else -1.0
    for pair in pairs:
        style = "yellow" if _rate(pair) == slowest else ""
        cells = (pair.a, pair.b, f"{pair.gb_per_s:.2f}", f"{pair.latency_us:.0f}")
        table.add_row(*(Text(visible(cell), style=style) for cell in cells))
    return table


def _rate(pair: NodePair) -> float:
    return pair.gb_per_s
