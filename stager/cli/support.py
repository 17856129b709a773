"""``stager support``: pack the evidence of a job, without its secrets."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bundle.protocol.counts import counted

from ..support import LOG_BYTES
from .grouped import grouped
from .options.logs import JobArgument, LogDir, chosen_files
from .options.output import Talk, file_option
from .program import app, boundary

if TYPE_CHECKING:
    from ..console.job_result import Console
    from ..diagnosis.failure import Diagnosis
    from ..support.archive import Supported, SupportListing, SupportOptions

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
@grouped
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
    from ..support.archive import listed
    from ..support.archive import support as make_archive

    console = talk.console()
    with boundary(console):
        files = chosen_files(job, log_dir, console, named=False)
        if list_:
            _show_listing(console, listed(files, packing.max_log_bytes), packing.max_log_bytes)
            return
        archive = make_archive(files, packing.options(), _in_words, step=_Progress(console).step)
        console.stop()
        if talk.json:
            console.emit(archive)
        else:
            _show_archive(console, archive)


def _show_archive(console: Console, archive: Supported) -> None:
    console.data(str(archive.archive))
    total = sum(archive.redacted.values())
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(archive.redacted.items()))
    content = f"{counted(archive.files, 'file')}, {counted(archive.size, 'byte')}"
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


def _in_words(diagnosis: Diagnosis) -> str:
    from ..console.job_result import Recorder

    recorder = Recorder(quiet=True)
    recorder.diagnosed(diagnosis)
    return "\n".join(recorder.recorded)
