"""``stager export``: write the bundle to a file that is carried over an air gap."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .grouped import grouped
from .options.bundle import bundle_id
from .options.lock import Script, settings_for
from .options.output import Talk, file_option
from .program import app, boundary

if TYPE_CHECKING:
    from ..carrying.carry import ExportOptions


@dataclass(frozen=True, kw_only=True)
class ExportFlags:
    """What is carried, and the file."""

    output: Annotated[
        Path | None, file_option("The file; default: NAME-ID.carry.tar in this directory.")
    ] = None
    base: Annotated[
        str | None,
        typer.Option(
            "--base", metavar="ID", help="Leave out what the bundle with this id has already."
        ),
    ] = None
    since: Annotated[
        str | None,
        typer.Option(
            "--since", metavar="DATE", help="Leave out what was exported before this date."
        ),
    ] = None
    with_tool: Annotated[
        bool, typer.Option("--with-tool", help="Add stager itself, to be installed over there.")
    ] = False
    offline: Annotated[bool, typer.Option("--offline", help="Fetch nothing for --with-tool.")] = (
        False
    )

    def options(self) -> ExportOptions:
        """Return the options of an export; two that name a base are a usage error."""
        from ..carrying.carry import ExportOptions
        from ..carrying.exports import Base

        if self.base and self.since:
            raise typer.BadParameter("cannot be used with --since", param_hint="--base")
        base = Base(id=bundle_id(self.base, "--base"), until=_moment(self.since))
        return ExportOptions(
            output=self.output, base=base, with_tool=self.with_tool, offline=self.offline
        )


def _moment(text: str | None) -> datetime.datetime | None:
    """Return the beginning of a day, or a time, in this machine's time zone; else a usage error."""
    if text is None:
        return None
    try:
        return datetime.datetime.fromisoformat(text).astimezone()
    except (ValueError, OverflowError):
        raise typer.BadParameter(
            f"{text!r} cannot be used, allowed: a date (2026-01-31) or a time (2026-01-31T12:00)",
            param_hint="--since",
        ) from None


@app.command()
@grouped
def export(*, script: Script = None, what: ExportFlags, talk: Talk) -> None:
    """Write the bundle to a file to carry over an air gap."""
    from ..carrying.carry import export_project

    console = talk.reports()
    with boundary(console):
        result = export_project(settings_for(script), what.options(), console)
        console.stop()
        if talk.json:
            console.emit(result)
        console.exported(result)
