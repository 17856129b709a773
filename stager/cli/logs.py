"""``stager logs``: show the logs of a job, merged by time."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from bundle.protocol.counts import counted

from .grouped import grouped
from .options.logs import JobArgument, LogDir, chosen_files, job_files
from .options.output import Talk
from .program import app, boundary

if TYPE_CHECKING:
    from ..logs.merged_lines import LineFilter


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
@grouped
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
    from ..logs.merged_lines import follow as followed
    from ..logs.merged_lines import merged

    wanted = choice.wanted()
    console = talk.console()
    with boundary(console):
        files = chosen_files(job, log_dir, console)
        if follow:
            console.lines(followed(lambda: job_files(files.job_id or job, log_dir), wanted))
        else:
            looked = counted(len(files.logs), "log")
            none = f"no errors found in {looked}" if wanted.errors else "no line matches"
            console.lines(merged(files, wanted), files, none)


def _pattern(text: str | None) -> re.Pattern[str] | None:
    try:
        return None if text is None else re.compile(text)
    except re.error as exc:
        raise typer.BadParameter(
            f"{text!r} is not a regular expression: {exc}", param_hint="--grep"
        ) from None
