"""Files that a smoke test did not read: a table, a summary, the setting that leaves them out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from bundle.protocol.counts import counted, sized

from ..core.errors import visible
from ..core.toml import dumps

if TYPE_CHECKING:
    from rich.table import Table

    from ..tracing import TraceResult, UnreadFiles

MOST_ROWS = 20
"""Rows of the table; what is left is summed in one more."""
_HEAD = ("package", "not read", "files", "bytes")
_WIDTHS = (20, 38, 8, 9)
_MOST_NAMES = 6
"""Packages that are named in a line."""


def lines(trace: TraceResult) -> list[str]:
    """Return the table for a file or a pipe; it fits 80 columns."""
    if not trace.unread:
        return []
    return [_aligned(row) for row in (_HEAD, *_rows(trace))]


def table(trace: TraceResult) -> Table:
    """Return the same rows for a terminal."""
    from rich.table import Table
    from rich.text import Text

    made = Table(box=None, pad_edge=False, header_style="bold")
    for name in _HEAD:
        right = name in ("files", "bytes")
        made.add_column(name, justify="right" if right else "left", no_wrap=right)
    for row in _rows(trace):
        made.add_row(*(Text(cell) for cell in row))
    return made


def _aligned(row: Sequence[str]) -> str:
    name, what, files, size = row
    wide, wider, narrow, last = _WIDTHS
    return f"{_cut(name, wide):{wide}} {_cut(what, wider):{wider}} {files:>{narrow}} {size:>{last}}"


def _cut(text: str, width: int) -> str:
    """Return a text that fits, its middle left out: the end of a path says most."""
    if len(text) <= width:
        return text
    begin = (width - 3) // 3
    return f"{text[:begin]}...{text[begin + 3 - width :]}"


def _rows(trace: TraceResult) -> Iterator[tuple[str, str, str, str]]:
    for part in trace.unread[:MOST_ROWS]:
        what = visible(part.path) or f"({part.reason})"
        yield visible(part.package), what, f"{part.files:,}", sized(part.bytes)
    rest = trace.unread[MOST_ROWS:]
    if rest:
        yield ("", f"{len(rest)} more", *_sum(rest))


def _sum(parts: Sequence[UnreadFiles]) -> tuple[str, str]:
    return f"{sum(part.files for part in parts):,}", sized(sum(part.bytes for part in parts))


def summary(trace: TraceResult) -> Iterator[str]:
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


def proposal(trace: TraceResult) -> Iterator[str]:
    """Yield the lines to paste into ``stager.toml``: what is there already, then the proposals."""
    if not trace.proposed:
        return
    files, size = counted(trace.proposed_files, "file"), sized(trace.proposed_bytes)
    yield f"# [environment] in stager.toml: without {files}, {size}, that the test did not read"
    yield "prune = ["
    for entry in (*trace.prune, *trace.proposed):
        yield f"    {dumps({'v': entry}).strip()[len('v = ') :]},"
    yield "]"
