"""The report about a job: one file of HTML that needs no other, no network and no script."""

from __future__ import annotations

import base64
import hashlib
import shlex
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import field, replace
from enum import Enum
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from bundle.format.manifest import Layer
from bundle.protocol.counts import format_count, format_size
from bundle.protocol.dataclass import dataclass
from bundle.redaction.secrets import mask_arguments
from bundle.system import permissions

from .. import __version__
from ..core.errors import TURNING, BundleError
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
from ..pack.bundle_file import read_manifest
from ..redaction.redactor import Redactor
from ..slurm import messages
from ..support.evidence import redact_diagnosis
from .charts import (
    Curves,
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
    find_differences,
    find_phases,
)

if TYPE_CHECKING:
    from jinja2 import Environment


class Verdict(Enum):
    """The outcome of a job."""

    WELL = "ended well"
    FAILED = "failed"
    RUNNING = "still running"
    INTERRUPTED = "interrupted"
    UNKNOWN = "unknown"


_AT_WORK = {
    *("RUNNING", "PENDING", "COMPLETING", "CONFIGURING", "SUSPENDED", "REQUEUED", "RESIZING"),
    *("STOPPED", "SIGNALING", "STAGE_OUT", "REQUEUE_HOLD"),
}
"""Slurm's states of a job that has not ended (``man squeue``, job state codes)."""


class BundleContents(NamedTuple):
    """The parts of a bundle, the largest first, or the reason why they are not known."""

    path: str
    missing: str
    parts: tuple[Layer, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ReportData:
    """Everything that a page about a job shows."""

    job_id: str
    folder: Path
    job: KeptJob
    """The job as its driver got it, without what looks like a secret."""
    record: JobRecord
    verdict: Verdict
    diagnosis: Diagnosis | None
    phases: JobPhases
    nodes: tuple[Node, ...]
    curves: Sequence[Curves]
    other_curves: Sequence[Path]
    contents: BundleContents | None
    stacks: tuple[str, ...]
    """The places of the ranks when they were last asked, in lines; none if they never were."""
    written: float

    @property
    def title(self) -> str:
        """The title of the page."""
        if not self.job_id:
            return f"Logs in {self.folder.name or self.folder}"
        return f"Job {self.job_id}{f' ({self.job.name})' if self.job.name else ''}"

    @property
    def command(self) -> str:
        """The command of each rank."""
        return shlex.join(self.job.launch.command)

    @property
    def backend(self) -> str:
        """The backend of the process group; empty where it is not known."""
        asked = self.job.launch.backend
        result = self.record.result
        return (result and result.backend) or ("" if asked == "auto" else asked)

    @property
    def logs_lost(self) -> str:
        """The reason why its logs are not complete."""
        result = self.record.result
        if result is None:
            return ""
        who = ", ".join(f"{loss.node} {loss}".strip() for loss in result.logs_lost)
        return "; ".join(filter(None, [result.logs_fault, who]))

    @property
    def first(self) -> str:
        """The node that failed first; empty where there is none, or it has no name."""
        first = None if self.diagnosis is None else self.diagnosis.first
        return "" if first is None else first.node


def collect_report(files: JobFiles) -> ReportData:
    """Return everything known about a job, from the files that it has left."""
    job = files.read_job()
    launch = replace(job.launch, command=tuple(mask_arguments(job.launch.command)))
    record = read_events(files.events) if files.job_id else JobRecord()
    try:
        diagnosis = redact_diagnosis(diagnose(files, record), Redactor())
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError):
        diagnosis = None  # the events are not a driver's: the rest still makes a page
    verdict, now = _judge(files, record, diagnosis), time.time()
    curves, other_curves = find_curves(files, job, record)
    return ReportData(
        job_id=files.job_id,
        folder=files.folder.absolute(),
        job=replace(job, launch=launch),
        record=record,
        verdict=verdict,
        diagnosis=diagnosis,
        phases=find_phases(record, now if verdict is Verdict.RUNNING else None),
        nodes=describe_nodes(record),
        curves=curves,
        other_curves=other_curves,
        contents=_read_bundle(job) if job.bundle else None,
        stacks=_describe_stacks(files, job, has_ended=verdict is not Verdict.RUNNING),
        written=now,
    )


def _judge(files: JobFiles, record: JobRecord, diagnosis: Diagnosis | None) -> Verdict:
    result = record.result
    if result is not None:
        is_the_users = result.interrupted and not result.ended_by
        outcome = Verdict.INTERRUPTED if is_the_users else Verdict.FAILED
        return Verdict.WELL if result.ok else outcome
    if files.job_id:
        state = messages.read_job_state(files.job_id, begun=record.begun)
        if state in _AT_WORK or _is_driven_here(files):
            return Verdict.RUNNING
    verdicts = {True: Verdict.WELL, False: Verdict.FAILED, None: Verdict.UNKNOWN}
    return verdicts[diagnosis.ok if diagnosis else None]


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


def _read_bundle(job: KeptJob) -> BundleContents:
    path = Path(job.bundle)
    try:
        if not path.is_file():
            return BundleContents(job.bundle, "the bundle is gone, or cannot be seen from here")
        manifest = read_manifest(path)
    except (BundleError, OSError, ValueError) as exc:
        return BundleContents(job.bundle, f"the bundle cannot be read: {exc}")
    if manifest.id != job.bundle_id:
        return BundleContents(job.bundle, "a different bundle is there now")
    parts = sorted(manifest.layers, key=lambda layer: (-layer.size, layer.name))
    return BundleContents(job.bundle, "", tuple(parts))


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
    def labels(self) -> list[Tick]:
        """The times below it, with their places as shares of the width."""
        return [(value / self.length, text) for value, text in time_ticks(self.length)[0]]

    @property
    def unit(self) -> str:
        """The unit of these times."""
        return time_ticks(self.length)[1]


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


def describe_timeline(window: TimeWindow, rows: Sequence[NodePhases], first: str) -> str:
    """Return a drawing in words, for screen readers."""
    sentences = [
        f"{window.title}: {format_count(len(rows), 'node')} over {duration(window.length)}."
    ]
    longest: dict[str, float] = {}
    for span in (span for row in rows for span in row.spans):
        longest[span.phase] = max(longest.get(span.phase, 0.0), span.seconds)
    sentences += [
        f"{PHASES[phase][0]} took up to {duration(longest[phase])}."
        for phase in (*STAGING, TRAIN)
        if phase in longest
    ]
    bad = [row.node for row in rows if row.has_failed]
    if bad:
        named = ", ".join(bad[:8]) + " and others" * (len(bad) > 8)
        sentences.append(f"Something failed on {named}{f'; on {first} first' if first else ''}.")
    return " ".join(sentences)


# --- The page: one file of HTML that needs no other, no network and no script --------------------

# What a job has left may hold anything. The templates (``*.html.j2``) have all of the markup; a
# value becomes part of it in one way only, which shows what is invisible in it and escapes the
# rest.

_LONGEST = 600  # characters of a text that are shown; what ranks write may have no end
_SHOWN = {code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\t\n"}
_SHOWN |= {0x7F: "\u2421"}
# A terminal's, as escape is, and halves of characters, which no file can hold.
_SHOWN |= dict.fromkeys((*range(0x80, 0xA0), *range(0xD800, 0xE000)), "\ufffd")
_SHOWN |= {code: f"\\u{code:04x}" for code in TURNING}
_COLUMNS = {
    **{"state": "state", "exit_status": "exit status", "problems": "problems"},
    **{"python": "Python", "packages": "packages"},
    **{"interface": "interface", "address": "address"},
}


def render_page(data: ReportData) -> str:
    """Return the whole file."""
    style = _resource("style.css")
    in_use = {span.phase for span in data.phases.spans}
    return (
        make_environment()
        .get_template("page.html.j2")
        .render(
            data=data,
            program=f"stager {__version__}",
            phases_in_use={phase: words for phase, words in PHASES.items() if phase in in_use},
            states_in_use={span.state for span in data.phases.spans},
            rows=choose_rows(data.phases.rows, data.first),
            windows=_choose_windows(data.phases),
            training=[(curves, curve_charts(curves)) for curves in data.curves],
            columns={
                field: title
                for field, title in _COLUMNS.items()
                if any(getattr(node, field) for node in data.nodes)
            },
            different=find_differences(data.nodes),
            style=style,
            style_digest=base64.b64encode(hashlib.sha256(style.encode()).digest()).decode(),
        )
    )


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
    templates.globals.update(PHASES=PHASES, STATES=STATES, describe_timeline=describe_timeline)
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
    """Return a value with characters shown that are invisible or change the display."""
    # What a macro gives is markup already, and knows it.
    if isinstance(value, int | float) or hasattr(value, "__html__"):
        return value
    return str(value).translate(_SHOWN)


def clip(text: str, longest: int = _LONGEST) -> str:
    """Return a text, or its beginning where it is very long."""
    return text if len(text) <= longest else f"{text[:longest]}\N{HORIZONTAL ELLIPSIS}"


def _resource(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


# --- The report about a job: one page with its verdict, failure, times, nodes and bundle ---------


@dataclass(frozen=True, kw_only=True)
class Report:
    """A page that was written."""

    ok: bool = True
    """True: a page that cannot be written is an error."""
    path: Path = field(metadata={"json": "report"})
    job_id: str
    size: int = field(metadata={"json": "bytes"})


def write_report(files: JobFiles, output: Path | None = None) -> Report:
    """Write the page of a job."""
    name = files.folder / f"report.{files.job_id}.html" if files.job_id else Path("report.html")
    path = (name if output is None else output).absolute()
    place = resolve_output(path, files, "the report")
    data = collect_report(files)
    html = render_page(data).encode("utf-8", "replace")
    with write_output(place, permissions.make_opener(data.job.log_mode)) as file:
        file.write(html)
    return Report(path=path, job_id=files.job_id, size=len(html))
