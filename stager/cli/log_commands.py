"""``logs``, ``stacks``, ``replay``, ``diagnose``, ``report`` and ``support``."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bundle.protocol.counts import format_count

from ..core.errors import StagerError, escape_line_feeds
from ..support import LOG_BYTES
from .application import app, get_settings_place, option
from .options import JobArgument, JobTalk, LogDir, choose_job_files, file_option, typer_option

if TYPE_CHECKING:
    from ..console.job_result import Console
    from ..diagnosis.failure import Diagnosis
    from ..support.archive import Supported, SupportListing


@app.command()
def logs(
    *,
    job: JobArgument = None,
    log_dir: LogDir = None,
    rank: Annotated[list[int] | None, option("--rank N", "Only this rank's lines.", min=0)] = None,
    node: Annotated[list[str] | None, option("--node NAME", "Only this node's lines.")] = None,
    grep: Annotated[str | None, option("--grep REGEX", "Only lines that match.")] = None,
    errors: Annotated[bool, option("--errors", "Only errors, each once; no warnings.")] = False,
    follow: Annotated[bool, option("-f --follow", "Keep reading while the job runs.")] = False,
    console: JobTalk,
) -> None:
    """Show a job's logs as one, by time, with node and rank in front."""
    from ..logs.job_files import choose_log_dir, find_job_files
    from ..logs.lines import LineFilter, follow_logs, merge_logs

    try:
        pattern = None if grep is None else re.compile(grep)
    except re.error as exc:
        raise typer.BadParameter(
            f"{grep!r} is not a regular expression: {exc}", param_hint="--grep"
        ) from None
    lines = LineFilter(
        ranks=tuple(rank or ()), nodes=tuple(node or ()), pattern=pattern, errors=errors
    )
    files = choose_job_files(job, log_dir, console)
    if follow:
        folder = choose_log_dir(log_dir)
        console.lines(follow_logs(lambda: find_job_files(files.job_id or job, folder), lines))
    else:
        looked = format_count(len(files.logs), "log")
        none = f"no errors found in {looked}" if errors else "no line matches"
        console.lines(merge_logs(files, lines), files, none)


@app.command()
def stacks(*, job: JobArgument = None, log_dir: LogDir = None, console: JobTalk) -> None:
    """Show where each rank of a running job is, and what it waits for."""
    from ..jobs.stacks import describe_stacks, find_stacks

    found = find_stacks(choose_job_files(job, log_dir, console), console.say)
    console.show(
        found.stacks,
        lambda _: console.data_lines([*describe_stacks(found, is_full=console.verbose)]),
    )


@app.command()
def replay(
    *,
    job: JobArgument = None,
    log_dir: LogDir = None,
    rank: Annotated[
        int | None, option("--rank N", "Default: the one that failed first.", min=0)
    ] = None,
    pdb: Annotated[bool, option("--pdb", "Start the debugger at the exception.")] = False,
    anyway: Annotated[
        bool, option("--anyway", "Also after a failure of which a replay shows nothing.")
    ] = False,
    bundle: Annotated[Path | None, typer_option("bundle")] = None,
    console: JobTalk,
) -> None:
    """Run a rank that failed again, on this machine and by itself."""
    from ..jobs.preparation import load_project
    from ..jobs.replay import choose_rank, find_bundle
    from ..jobs.replay import replay as run_again

    if pdb and not (sys.stdin.isatty() and sys.stdout.isatty() and not console.as_json):
        raise StagerError(
            "--pdb: the debugger needs a terminal, and this command has none",
            hint="leave it out, or run the command in a terminal, without --json",
        )
    chosen = choose_rank(choose_job_files(job, log_dir, console), rank, is_forced=anyway)
    config = load_project(bundle, chosen.job.bundle_id, get_settings_place())
    result = run_again(
        chosen,
        config,
        find_bundle(config, chosen.job, bundle),
        console.say,
        is_debugged=pdb,
        is_quiet_stdout=console.as_json,
    )
    console.show(result, lambda result: console.say(f"replay: {result.verdict}"))
    if result.work_dir:
        console.say(f"  what it has written: {result.work_dir}")
    raise typer.Exit(result.exit_code)


@app.command()
def diagnose(*, job: JobArgument = None, log_dir: LogDir = None, console: JobTalk) -> None:
    """Say what failed first in a job, why, and what to do."""
    from ..config.load import find_project_file
    from ..diagnosis import diagnosis
    from ..logs import job_record
    from ..logs.job_files import choose_log_dir

    folder = choose_log_dir(log_dir)
    # What came last here may be a refusal.
    refusal = (
        None if job else job_record.find_refused(folder, find_project_file(get_settings_place()))
    )
    if refusal:
        found = diagnosis.diagnose_refused(refusal, folder)
    else:
        found = diagnosis.diagnose(choose_job_files(job, log_dir, console))
    console.show(found, console.show_diagnosis)


@app.command()
def report(
    *,
    job: JobArgument = None,
    log_dir: LogDir = None,
    output: Annotated[Path | None, file_option("Default: report.JOB.html beside the logs.")] = None,
    console: JobTalk,
) -> None:
    """Write one HTML page about a job: its failure, times and nodes."""
    from ..report.page import write_report

    page = write_report(choose_job_files(job, log_dir, console), output)
    console.show(page, lambda page: console.data(str(page.path)))


@app.command()
def support(
    *,
    job: JobArgument = None,
    log_dir: LogDir = None,
    output: Annotated[Path | None, file_option("Default: stager-support-JOB.tar.gz here.")] = None,
    max_log_bytes: Annotated[
        int, option("--max-log-bytes N", "The middle of a longer log is left out.", min=1)
    ] = LOG_BYTES,
    hide_names: Annotated[
        bool, option("--hide-names", "Replace users, machines and addresses, too.")
    ] = False,
    list_: Annotated[bool, option("--list", "Show what would go in; write nothing.")] = False,
    console: JobTalk,
) -> None:
    """Pack a job's logs and diagnosis for support, without secrets."""
    from ..support.archive import SupportOptions, list_support_files, make_support_archive

    files = choose_job_files(job, log_dir, console, named=False)
    if list_:
        listing = list_support_files(files, max_log_bytes)
        console.show(listing, lambda listing: _show_listing(console, listing, max_log_bytes))
        return
    options = SupportOptions(output=output, log_bytes=max_log_bytes, hide_names=hide_names)
    console.begin("gathering the files")
    archive = make_support_archive(files, options, _describe_diagnosis)
    console.show(archive, lambda archive: _show_archive(console, archive))


def _show_archive(console: Console, archive: Supported) -> None:
    console.data(str(archive.archive))
    kinds = ", ".join(f"{count} {kind}" for kind, count in archive.redacted.items())
    content = f"{format_count(archive.files, 'file')}, {format_count(archive.size, 'byte')}"
    console.say(f"{content}; taken out: {kinds or 0}")
    for line in archive.left_out:
        console.note(f"left out: {line}")
    console.say("review it before you send it: README.txt in it says what was done")


def _show_listing(console: Console, listing: SupportListing, limit: int) -> None:
    for file in listing.files:
        note = f" (cut to {limit:,})" if file.cut else ""
        console.data(f"{file.bytes:>13,}  {file.name}{note}")
    for name in ("README.txt", "diagnosis.json", "diagnosis.txt", "versions.json"):
        console.data(f"{'':>13}  {name}")
    for line in listing.left_out:
        console.note(f"left out: {line}")


def _describe_diagnosis(diagnosis: Diagnosis) -> str:
    from ..console.job_result import describe_diagnosis

    return "\n".join(map(escape_line_feeds, describe_diagnosis(diagnosis)))
