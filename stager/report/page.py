"""The report about a job: one file of HTML that needs no other, no network and no script."""

from __future__ import annotations

import base64
import hashlib
import shlex
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import field, replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from bundle.protocol.counts import format_count, format_size
from bundle.protocol.dataclass import dataclass
from bundle.redaction.secrets import mask_arguments
from bundle.system import permissions

from .. import __version__
from ..core.errors import escape_invisible
from ..core.files import read_bytes, write_output
from ..diagnosis.diagnosis import diagnose
from ..diagnosis.failure import (
    Diagnosis,
    format_compiled_code,
    format_ranks,
    format_restart,
    format_retry,
    format_state,
    format_variable,
)
from ..jobs.stacks import FoundStacks, describe_stacks, read_stacks
from ..logs.job_files import JobFiles, KeptJob, format_time, parse_kept_job, resolve_output
from ..logs.job_record import JobRecord, read_events
from ..redaction.redactor import Redactor
from ..slurm import messages
from ..support.evidence import redact_diagnosis
from .charts import (
    Tick,
    anchor,
    curve_charts,
    decimal,
    duration,
    find_curves,
    percent,
    time_ticks,
)
from .phases import (
    PHASES,
    STAGING,
    STATES,
    TRAIN,
    JobPhases,
    Node,
    NodePhases,
    describe_nodes,
    find_phases,
)

if TYPE_CHECKING:
    from jinja2 import Environment


_RUNNING = "still running"
_AT_WORK = {
    *("RUNNING", "PENDING", "COMPLETING", "CONFIGURING", "SUSPENDED", "REQUEUED", "RESIZING"),
    *("STOPPED", "SIGNALING", "STAGE_OUT", "REQUEUE_HOLD"),
}
"""Slurm's states of a job that has not ended (``man squeue``, job state codes)."""


def _diagnose(files: JobFiles, record: JobRecord) -> Diagnosis | None:
    try:
        return redact_diagnosis(diagnose(files, record), Redactor())
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError):
        return None  # the events are not a driver's: the rest still makes a page


def _judge(files: JobFiles, record: JobRecord, diagnosis: Diagnosis | None) -> str:
    ok, result = diagnosis.ok if diagnosis else None, record.result
    if result is not None:
        if result.interrupted and not (result.ok or result.ended_by):
            return "interrupted"
        ok = result.ok
    elif files.job_id:
        state = messages.read_job_state(files.job_id, begun=record.begun)
        if state in _AT_WORK or _is_driven_here(files):
            return _RUNNING
    return {True: "ended well", False: "failed", None: "unknown"}[ok]


def _is_driven_here(files: JobFiles) -> bool:
    """Return whether a driver runs here: its file beside the logs has the process's number."""
    for path in files.folder.glob(".job.*.json"):
        with suppress(OSError, ValueError, IndexError):
            process = Path("/proc", str(int(path.name.split(".")[2])))
            if parse_kept_job(read_bytes(path)).id == files.job_id:
                return b"stager" in (process / "cmdline").read_bytes()
    return False


def _describe_stacks(files: JobFiles, job: KeptJob, *, has_ended: bool) -> tuple[str, ...]:
    stacks = read_stacks(files) if files.job_id else None
    if stacks is None:
        return ()
    lines = describe_stacks(FoundStacks(stacks, job, has_ended=has_ended))
    return tuple(Redactor().words("\n".join(lines)).split("\n"))


# --- The timeline: the nodes that are drawn, and the stretches of time ---------------------------

_MOST = 40  # rows that are drawn; more cannot be looked over
_NAME = 16  # characters of a node's name beside its row; the table has all of it
_SHORT = 0.25
"""The beginning is drawn again, larger, where it takes no more than this share of the job."""


class TimeWindow(NamedTuple):
    """The time that a drawing shows, in seconds."""

    title: str
    begin: float
    length: float

    def find_share(self, at: float) -> float:
        """Return a moment's place along the width, as a share of it."""
        return (at - self.begin) / self.length

    @property
    def axis(self) -> tuple[list[Tick], str]:
        """The times below it, with their places as shares of the width, and their unit."""
        times, unit = time_ticks(self.length)
        return [(value / self.length, text) for value, text in times], unit


def choose_rows(rows: Sequence[NodePhases], first: str) -> list[NodePhases]:
    """Return the rows to draw: the first failure, others, and the slowest, in the job's order."""

    def order(row: NodePhases) -> tuple[bool, bool, float]:
        staging = sum(span.seconds for span in row.spans if span.phase in STAGING)
        return row.node != first, not row.has_failed, -staging

    kept = {row.node for row in sorted(rows, key=order)[:_MOST]}
    return [row for row in rows if row.node in kept]


def _choose_windows(job: JobPhases) -> list[TimeWindow]:
    length = job.end - job.begin
    windows = [TimeWindow("The whole job", job.begin, max(length, 1e-3))]
    # The moment when ranks ran on all nodes that came so far.
    running = max((span.begin for span in job.spans if span.phase == TRAIN), default=job.begin)
    if 0 < running - job.begin < length * _SHORT:
        staging = (running - job.begin) * 1.02
        windows.append(TimeWindow("Until the ranks ran, larger", job.begin, staging))
    return windows


def shorten(name: str) -> str:
    """Return a short form of a node's name, with the end, which tells it from others."""
    return name if len(name) <= _NAME else f"{name[:5]}\u2026{name[6 - _NAME :]}"


# --- The page: one file of HTML that needs no other, no network and no script --------------------

# The templates (``*.html.j2``) have all of the markup. A value becomes part of it in one way only,
# which shows what is invisible in it and escapes the rest.

_LONGEST = 600  # characters of a text that are shown; what ranks write may have no end
_COLUMNS = {
    **{"state": "state", "exit_status": "exit status", "problems": "problems"},
    **{"python": "Python", "packages": "packages"},
    **{"interface": "interface", "address": "address"},
}


def render_page(files: JobFiles) -> str:
    """Return the page about a job, from the files that it has left."""
    job, folder = files.read_job(), files.folder.absolute()
    launch = replace(job.launch, command=tuple(mask_arguments(job.launch.command)))
    record = read_events(files.events) if files.job_id else JobRecord()
    diagnosis = _diagnose(files, record)
    verdict, now = _judge(files, record, diagnosis), time.time()
    first = diagnosis.first.node if diagnosis and diagnosis.first else ""
    phases = find_phases(record, now if verdict == _RUNNING else None)
    in_use = {span.phase for span in phases.spans}
    nodes, style = describe_nodes(record), _resource("style.css")
    template = make_environment().get_template("page.html.j2")
    return template.render(
        title=_make_title(files.job_id, job.name, folder),
        job_id=files.job_id,
        folder=folder,
        job=job,
        command=shlex.join(launch.command),
        backend=_name_backend(job, record),
        logs_lost=_describe_loss(record),
        record=record,
        verdict=verdict,
        diagnosis=diagnosis,
        first_node=first,
        phases=phases,
        nodes=nodes,
        stacks=_describe_stacks(files, job, has_ended=verdict != _RUNNING),
        written=now,
        program=f"stager {__version__}",
        phases_in_use={phase: words for phase, words in PHASES.items() if phase in in_use},
        rows=choose_rows(phases.rows, first),
        windows=_choose_windows(phases),
        training=[(curves, curve_charts(curves)) for curves in find_curves(files, job, record)],
        columns=_choose_columns(nodes),
        style=style,
        style_digest=base64.b64encode(hashlib.sha256(style.encode()).digest()).decode(),
    )


def _make_title(job_id: str, name: str, folder: Path) -> str:
    if not job_id:
        return f"Logs in {folder.name or folder}"
    return f"Job {job_id} ({name})" if name else f"Job {job_id}"


def _name_backend(job: KeptJob, record: JobRecord) -> str:
    chosen = record.result.backend if record.result else ""
    return chosen or ("" if job.launch.backend == "auto" else job.launch.backend)


def _describe_loss(record: JobRecord) -> str:
    if record.result is None:
        return ""
    who = ", ".join(f"{loss.node} {loss}".strip() for loss in record.result.logs_lost)
    return "; ".join(filter(None, [record.result.logs_fault, who]))


def _choose_columns(nodes: Sequence[Node]) -> dict[str, str]:
    used = {field for node in nodes for field in _COLUMNS if getattr(node, field)}
    return {field: title for field, title in _COLUMNS.items() if field in used}


def make_environment() -> Environment:
    """Return the environment of the templates: each value is escaped, and a wrong name fails."""
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    templates = Environment(
        loader=FunctionLoader(_resource),
        autoescape=True,
        finalize=show_value,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    templates.globals.update(PHASES=PHASES, STATES=STATES)
    templates.filters.update(
        anchor=anchor,
        clipped=clip,
        state=format_state,
        variable=format_variable,
        counted=format_count,
        decimal=decimal,
        duration=duration,
        percent=percent,
        ranks=format_ranks,
        restart=format_restart,
        compiled=format_compiled_code,
        retry=format_retry,
        shorten=shorten,
        sized=format_size,
        when=format_time,
    )
    return templates


def show_value(value: object) -> object:
    """Return a value with invisible characters shown; a macro's is markup, and stays."""
    is_safe = isinstance(value, int | float) or hasattr(value, "__html__")
    return value if is_safe else escape_invisible(str(value))


def clip(text: str, longest: int = _LONGEST) -> str:
    """Return a text, or its beginning where it is very long."""
    return text if len(text) <= longest else f"{text[:longest]}\N{HORIZONTAL ELLIPSIS}"


def _resource(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


# --- The report about a job: one page with its verdict, failure, times, nodes and bundle ---------


@dataclass(frozen=True, kw_only=True)
class Report:
    """A page that was written."""

    ok: bool = True  # True: a page that cannot be written is an error
    path: Path = field(metadata={"json": "report"})
    job_id: str
    size: int = field(metadata={"json": "bytes"})


def write_report(files: JobFiles, output: Path | None = None) -> Report:
    """Write the page of a job."""
    name = files.folder / f"report.{files.job_id}.html" if files.job_id else Path("report.html")
    path = (name if output is None else output).absolute()
    place = resolve_output(path, files, "the report")
    html = render_page(files).encode("utf-8", "replace")
    with write_output(place, permissions.make_opener(files.read_job().log_mode)) as file:
        file.write(html)
    return Report(path=path, job_id=files.job_id, size=len(html))
