"""``logs``, ``diagnose``, ``report`` and ``support``."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bundle.protocol.counts import format_count

from ..support import LOG_BYTES
from .application import app, boundary, expand_groups, get_settings_place
from .options import JobArgument, LogDir, Talk, choose_job_files, file_option, find_job_files

if TYPE_CHECKING:
    from ..console.job_result import Console
    from ..diagnosis.failure import Diagnosis
    from ..logs.merged_lines import LineFilter
    from ..support.archive import Supported, SupportListing, SupportOptions


# --- ``stager logs``: show the logs of a job, merged by time -------------------------------------


@dataclass(frozen=True, kw_only=True)
class LineFlags:
    """The choice of lines."""

    rank: Annotated[
        list[int] | None, typer.Option("--rank", metavar="N", min=0, help="Only this rank's lines.")
    ] = None
    node: Annotated[
        list[str] | None, typer.Option("--node", metavar="NAME", help="Only this node's lines.")
    ] = None
    grep: Annotated[
        str | None, typer.Option("--grep", metavar="REGEX", help="Only lines that match.")
    ] = None
    errors: Annotated[
        bool, typer.Option("--errors", help="Only errors, each once; no warnings.")
    ] = False

    def wanted(self) -> LineFilter:
        """Return the choice, checked."""
        from ..logs.merged_lines import LineFilter

        return LineFilter(
            ranks=tuple(self.rank or ()),
            nodes=tuple(self.node or ()),
            pattern=_pattern(self.grep),
            errors=self.errors,
        )


@app.command()
@expand_groups
def logs(
    *,
    job: JobArgument = None,
    log_dir: LogDir = None,
    choice: LineFlags,
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="Keep reading while the job runs.")
    ] = False,
    talk: Talk,
) -> None:
    """Show a job's logs as one, by time, with node and rank in front."""
    from ..logs.merged_lines import follow_logs as followed
    from ..logs.merged_lines import merge_logs

    wanted = choice.wanted()
    console = talk.console()
    with boundary(console):
        files = choose_job_files(job, log_dir, console)
        if follow:
            console.lines(followed(lambda: find_job_files(files.job_id or job, log_dir), wanted))
        else:
            looked = format_count(len(files.logs), "log")
            none = f"no errors found in {looked}" if wanted.errors else "no line matches"
            console.lines(merge_logs(files, wanted), files, none)


def _pattern(text: str | None) -> re.Pattern[str] | None:
    try:
        return None if text is None else re.compile(text)
    except re.error as exc:
        raise typer.BadParameter(
            f"{text!r} is not a regular expression: {exc}", param_hint="--grep"
        ) from None


# --- ``stager diagnose``: say what failed first in a job, why, and what to do --------------------


@app.command()
@expand_groups
def diagnose(*, job: JobArgument = None, log_dir: LogDir = None, talk: Talk) -> None:
    """Say what failed first in a job, why, and what to do."""
    console = talk.console()
    with boundary(console):
        diagnosis = _diagnosis(job, log_dir, console)
        if talk.json:
            console.emit(diagnosis)
        else:
            console.diagnosed(diagnosis)


def _diagnosis(job: str | None, log_dir: Path | None, console: Console) -> Diagnosis:
    """Return the diagnosis of a job, by default of what came last here; that may be a refusal."""
    from ..config.load import find_project_file
    from ..diagnosis.diagnosis import diagnose as diagnose_job
    from ..diagnosis.diagnosis import diagnose_refused
    from ..logs import job_record
    from ..logs.job_files import choose_log_dir

    folder = choose_log_dir(log_dir)
    refusal = (
        job_record.find_refused(folder, find_project_file(get_settings_place()))
        if job is None
        else None
    )
    if refusal:
        return diagnose_refused(refusal, folder)
    return diagnose_job(choose_job_files(job, log_dir, console))


# --- ``stager report``: write one HTML page about a job ------------------------------------------


@app.command()
@expand_groups
def report(
    *,
    job: JobArgument = None,
    log_dir: LogDir = None,
    output: Annotated[Path | None, file_option("Default: report.JOB.html beside the logs.")] = None,
    talk: Talk,
) -> None:
    """Write one HTML page about a job: its failure, times and nodes."""
    from ..report.page import write_report

    console = talk.console()
    with boundary(console):
        page = write_report(choose_job_files(job, log_dir, console), output)
        if talk.json:
            console.emit(page)
        else:
            console.data(str(page.path))


# --- ``stager support``: pack the evidence of a job, without its secrets -------------------------

_QUIET_SECONDS = 2.0
"""Seconds after which progress is shown."""


@dataclass(frozen=True, kw_only=True)
class PackFlags:
    """The options of the archive."""

    output: Annotated[Path | None, file_option("Default: stager-support-JOB.tar.gz here.")] = None
    max_log_bytes: Annotated[
        int,
        typer.Option(
            "--max-log-bytes", metavar="N", min=1, help="The middle of a longer log is left out."
        ),
    ] = LOG_BYTES
    hide_names: Annotated[
        bool,
        typer.Option("--hide-names", help="Replace users, machines and addresses, too."),
    ] = False

    def options(self) -> SupportOptions:
        """Return them as :func:`stager.support.archive.support` takes them."""
        from ..support.archive import SupportOptions

        return SupportOptions(
            output=self.output, log_bytes=self.max_log_bytes, hide_names=self.hide_names
        )


@app.command()
@expand_groups
def support(
    *,
    job: JobArgument = None,
    log_dir: LogDir = None,
    packing: PackFlags,
    list_: Annotated[
        bool, typer.Option("--list", help="Show what would go in; write nothing.")
    ] = False,
    talk: Talk,
) -> None:
    """Pack a job's logs and diagnosis for support, without secrets."""
    from ..support.archive import list_support_files
    from ..support.archive import make_support_archive as make_archive

    console = talk.console()
    with boundary(console):
        files = choose_job_files(job, log_dir, console, named=False)
        if list_:
            _show_listing(
                console, list_support_files(files, packing.max_log_bytes), packing.max_log_bytes
            )
            return
        archive = make_archive(
            files, packing.options(), _describe_diagnosis, step=_Progress(console).step
        )
        console.stop()
        if talk.json:
            console.emit(archive)
        else:
            _show_archive(console, archive)


def _show_archive(console: Console, archive: Supported) -> None:
    console.data(str(archive.archive))
    total = sum(archive.redacted.values())
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(archive.redacted.items()))
    content = f"{format_count(archive.files, 'file')}, {format_count(archive.size, 'byte')}"
    console.say(f"{content}; taken out: {total}")
    if kinds:
        console.note(kinds)
    for line in archive.left_out:
        console.note(f"left out: {line}")
    console.say("review it before you send it: README.txt in it says what was done")


def _show_listing(console: Console, listing: SupportListing, limit: int) -> None:
    if console.as_json:
        console.emit(listing)
        return
    for file in listing.files:
        note = f" (cut to {limit:,})" if file.cut else ""
        console.data(f"{file.bytes:>13,}  {file.name}{note}")
    for name in ("README.txt", "diagnosis.json", "diagnosis.txt", "versions.json"):
        console.data(f"{'':>13}  {name}")
    for line in listing.left_out:
        console.note(f"left out: {line}")


class _Progress:
    """Shows the progress, once it takes a while."""

    def __init__(self, console: Console) -> None:
        self._console, self._begun = console, time.monotonic()

    def step(self, name: str, done: int, total: int) -> None:
        if time.monotonic() - self._begun > _QUIET_SECONDS:
            self._console.step(name, done, total)


def _describe_diagnosis(diagnosis: Diagnosis) -> str:
    from ..console.job_result import Recorder

    recorder = Recorder(quiet=True)
    recorder.diagnosed(diagnosis)
    return "\n".join(recorder.recorded)
