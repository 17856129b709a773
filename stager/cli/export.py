"""``stager export``: write the bundle to a file that is carried, or to an image to mount."""

from __future__ import annotations

import datetime
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .grouped import grouped
from .options.bundle import BundleFlags, bundle_id
from .options.lock import Script, settings_for
from .options.output import Talk, file_option
from .program import app, boundary
from .settings_place import settings_place

if TYPE_CHECKING:
    from ..carrying.carry import ExportOptions
    from ..config.load import Config
    from ..pack.bundle_file import ChosenBundle


@dataclass(frozen=True, kw_only=True)
class ExportFlags:
    """The content of the file, and its place."""

    output: Annotated[
        Path | None,
        file_option("The file; default: NAME-ID.carry.tar in this directory, or NAME-ID.env.sqsh."),
    ] = None
    squashfs: Annotated[
        bool,
        typer.Option("--squashfs", help="Write the environment as an image to mount instead."),
    ] = False
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

        if self.squashfs and (self.base or self.since or self.with_tool or self.offline):
            other = next(name for name in _OF_CARRIED if getattr(self, name))
            name = f"--{other.replace('_', '-')}"
            raise typer.BadParameter("cannot be used with --squashfs", param_hint=name)
        if self.base and self.since:
            raise typer.BadParameter("cannot be used with --since", param_hint="--base")
        if self.offline and not self.with_tool:
            raise typer.BadParameter("is for --with-tool only", param_hint="--offline")
        base = Base(id=bundle_id(self.base, "--base"), until=_moment(self.since))
        return ExportOptions(
            output=self.output, base=base, with_tool=self.with_tool, offline=self.offline
        )


_OF_CARRIED = ("base", "since", "with_tool", "offline")
"""What concerns only a file to carry."""


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


def _chosen(flags: BundleFlags, script: Path | None) -> tuple[ChosenBundle | None, Config]:
    """Return the bundle that is named, None for the project's, and the settings."""
    from ..jobs.preparation import chosen_bundle, load_project

    asked = flags.asked
    if flags.bundle is None and not asked:
        return None, settings_for(script)
    config = (
        load_project(flags.bundle, asked, settings_place())
        if script is None
        else settings_for(script)
    )
    return chosen_bundle(config, flags.bundle, asked), config


@app.command()
@grouped
def export(*, script: Script = None, chosen: BundleFlags, what: ExportFlags, talk: Talk) -> None:
    """Write the bundle to a file to carry over an air gap, or to an image to mount."""
    from ..carrying.carry import export_project
    from ..carrying.image import export_image

    console = talk.reports()
    with boundary(console):
        bundle, config = _chosen(chosen, script)
        options = replace(what.options(), bundle=bundle)
        if what.squashfs:
            image = export_image(config, options.output, console, bundle)
            console.stop()
            if talk.json:
                console.emit(image)
            console.exported_image(image)
            return
        result = export_project(config, options, console)
        console.stop()
        if talk.json:
            console.emit(result)
        console.exported(result)
