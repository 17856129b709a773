"""``stager support``: pack the evidence of a job, without its secrets."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bundle.protocol.counts import counted

from ..console import Console
from ..core.printable import visible
from .grouped import grouped
from .options import JobArgument, LogDir, Talk, job_files
from .program import app, boundary

if TYPE_CHECKING:
    from ..diagnosis.failure import Diagnosis
    from ..support.contents import Contents
    from ..support.support import SupportOptions

_LOG_BYTES = 5_000_000
_PATIENCE = 2.0
"""Seconds without a word."""


@dataclass(frozen=True, kw_only=True)
class PackFlags:
    """What goes into the archive, and where that goes."""

    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", metavar="FILE", help="Default: stager-support-JOB.tar.gz here."
        ),
    ] = None
    max_log_bytes: Annotated[
        int,
        typer.Option("--max-log-bytes", min=1, help="Of a longer log the middle is left out."),
    ] = _LOG_BYTES
    hide_names: Annotated[
        bool,
        typer.Option("--hide-names", help="Stand-ins for users, machines and addresses, too."),
    ] = False

    def options(self) -> SupportOptions:
        """The same as :func:`stager.support.support.support` takes it."""
        from ..support.support import SupportOptions

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
    from ..support.support import listed
    from ..support.support import support as supported

    console = talk.console()
    with boundary(console):
        files = job_files(job, log_dir)
        if list_:
            _show(console, listed(files), packing.max_log_bytes)
            return
        made = supported(files, packing.options(), _in_words, step=_Progress(console).step)
        console.stop()
        if talk.json:
            console.emit(made.to_json())
            return
        console.data(str(made.archive))
        total = sum(made.redacted.values())
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(made.redacted.items()))
        console.say(
            f"{counted(made.files, 'file')}, {counted(made.size, 'byte')}; taken out: {total}"
        )
        if kinds:
            console.note(kinds)
        for line in made.left_out:
            console.note(f"left out: {line}")
        console.say("look through it before you send it: README.txt in it says what was done")


def _show(console: Console, found: Contents, limit: int) -> None:
    """What would go in."""
    items = sorted(found.items, key=lambda item: item.name)
    cut = {item.name for item in items if item.may_be_cut and item.size > limit}
    if console.as_json:
        shown = [{"name": one.name, "bytes": one.size, "cut": one.name in cut} for one in items]
        console.emit({"ok": True, "files": shown, "left_out": list(found.left_out)})
        return
    for one in items:
        note = f" (cut to {limit:,})" if one.name in cut else ""
        console.data(f"{one.size:>13,}  {one.name}{note}")
    for name in ("README.txt", "diagnosis.json", "diagnosis.txt", "versions.json"):
        console.data(f"{'':>13}  {name}")
    for line in found.left_out:
        console.note(f"left out: {line}")


class _Progress:
    """Says how far it is, once that takes a while."""

    def __init__(self, console: Console) -> None:
        self._console, self._begun = console, time.monotonic()

    def step(self, name: str, done: int, total: int) -> None:
        """A file is read now."""
        if time.monotonic() - self._begun > _PATIENCE:
            self._console.step(name, done, total)


def _in_words(found: Diagnosis) -> str:
    """A diagnosis as ``stager diagnose`` words it."""
    paper = _Paper(quiet=True)
    paper.diagnosed(found)
    return "\n".join(paper.lines_said)


class _Paper(Console):
    """A voice that is kept and not heard."""

    def __init__(self, *, quiet: bool) -> None:
        super().__init__(quiet=quiet)
        self.lines_said: list[str] = []

    def data(self, line: str) -> None:
        """Keep a line."""
        self.lines_said.append(visible(line))
