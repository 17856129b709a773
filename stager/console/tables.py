"""Tables of results: the nodes of a verification; failed nodes, forecasts, traces, pairs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING

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

# --- The nodes of a verification, on a terminal --------------------------------------------------

SHORT = {"transformers": "tfm"}  # names of packages that the one-line form shortens as well
REPORTED = ("torch", "transformers", "datasets", "numpy")
"""Packages that come first; a project without them has its own."""
MAX_PACKAGES = 5  # columns for packages: more do not fit on a screen


def make_node_table(nodes: Sequence[NodeCheck]) -> Table:
    """Return a row for each node of a result of ``verify``; its name is never shortened."""
    from rich.table import Table
    from rich.text import Text

    present = dict.fromkeys(name for node in nodes for name in node.packages)
    packages = sorted(present, key=lambda name: name not in REPORTED)[:MAX_PACKAGES]
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("node", no_wrap=True)
    table.add_column("state", no_wrap=True)
    names = [SHORT.get(name, escape_invisible(name)) for name in packages]
    for title in ("python", *names, "interface", "address", "seconds", "problem"):
        table.add_column(Text(title), overflow="fold")
    for node in nodes:
        versions = [node.packages.get(name) or "" for name in packages]
        seconds = "" if node.seconds is None else f"{node.seconds:.1f}"
        facts = [node.python, *versions, node.interface, node.address, seconds]
        state = Text("OK", "green") if node.ok else Text("FAILED", "bold red")
        name, *cells = map(escape_invisible, [node.node, *facts, "; ".join(node.problems)])
        table.add_row(Text(name), state, *map(Text, cells))
    return table


# --- The nodes that failed lately ----------------------------------------------------------------

TITLES = ("node", "times", "last", "job", "failure")
_LINE = 80


def format_failed_nodes(result: NodesResult, *, whole: bool) -> Iterator[str]:
    """Yield the rows; unless ``whole``, they fit 80 columns if no name is very long."""
    for node, times, last, job, failure in (TITLES, *_list_failed_nodes(result)):
        begin = f"{node:14} {times:>5}  {last:10}  {job:9} "
        room = max(_LINE - len(begin), 20)
        yield begin + (failure if whole or len(failure) <= room else f"{failure[: room - 3]}...")


def _list_failed_nodes(result: NodesResult) -> Iterator[tuple[str, ...]]:
    several = len({node.cluster for node in result.nodes}) > 1
    for node in result.nodes:
        name = f"{node.node} ({node.cluster})" if several and node.cluster else node.node
        for fault in node.faults:
            last = datetime.fromtimestamp(fault.last).strftime("%Y-%m-%d")
            failure = escape_line_feeds(f"{fault.fault.words}: {fault.cause}")
            yield name, str(fault.times), last, fault.job_id, failure


# --- An estimate of the time that staging takes --------------------------------------------------

PHASES = ("preflight", "send", "unpack", "stage", "probe", "launch", "total")
"""Sending and unpacking overlap: both are in ``stage``."""
_CASE = 18
_FILE_SYSTEMS = {"lustre": "Lustre", "nfs": "NFS"}


def format_phases(seconds: Mapping[str, float]) -> str:
    """Return the seconds of each phase in a line."""
    return ", ".join(f"{name} {seconds[name]:.1f} s" for name in PHASES)


def format_forecast(estimate: Estimate) -> Iterator[str]:
    """Yield the rows, which fit 80 columns."""
    for nodes, case, cells in (("nodes", "case", PHASES), *_list_forecasts(estimate)):
        first, *middle, last = cells
        aligned = "".join(f"{cell:>7}" for cell in middle)
        yield f"{nodes:>6} {case:{_CASE}.{_CASE}}{first:>10}{aligned}{last:>8}"


def _list_forecasts(estimate: Estimate) -> Iterator[tuple[int, str, Sequence[str]]]:
    for forecast in estimate.forecasts:
        cases = {
            "nothing there yet": forecast.cold,
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


# --- Files that a smoke test did not read, and the setting that leaves them out ------------------

MOST_ROWS = 20  # rows of the table; what is left is summed in one more
_HEAD = ("package", "not read", "files", "bytes")
_MOST_NAMES = 6  # packages that are named in a line


def format_trace(trace: TraceResult) -> list[str]:
    """Return the table; it fits 80 columns."""
    rows = (_HEAD, *_list_unread(trace)) if trace.unread else ()
    return [
        f"{_shorten(name, 20):20} {_shorten(what, 38):38} {files:>8} {size:>9}"
        for name, what, files, size in rows
    ]


def _shorten(text: str, width: int) -> str:
    if len(text) <= width:
        return text
    begin = (width - 3) // 3  # the end of a path says most
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


# --- The network between the nodes, as ``verify --deep`` measured it -----------------------------

SHOWN = 20
"""Pairs that are shown; of more, the slowest. ``--json`` has all."""


def format_pairs(measured: AllReduceMeasured) -> list[str]:
    """Return a line for each pair: all in their order, or the slowest, the very slowest first."""
    pairs = list(measured.pairs)
    return [
        f"PAIR {pair.a} {pair.b} -> {pair.gb_per_s:.2f} GB/s {pair.latency_us:.0f} us"
        for pair in (pairs if len(pairs) <= SHOWN else sorted(pairs, key=_rate)[:SHOWN])
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


def _rate(pair: NodePair) -> float:
    return pair.gb_per_s
