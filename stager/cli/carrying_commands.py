"""``export``, ``import`` and ``mirror``."""

from __future__ import annotations

import datetime
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .application import app, boundary, expand_groups, get_settings_place, path_option
from .options import (
    BundleChoice,
    BundleId,
    Offline,
    Script,
    Talk,
    file_option,
    load_settings,
    read_bundle_id,
    read_texts,
)

if TYPE_CHECKING:
    from ..carrying.carry import ExportOptions
    from ..config.job_settings import JobOptions
    from ..config.load import Config
    from ..pack.bundle_file import ChosenBundle


# --- ``stager export``: write the bundle to a file that is carried, or to an image to mount ------


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

        for name in _OF_CARRIED:
            if self.squashfs and getattr(self, name):
                hint = f"--{name.replace('_', '-')}"
                raise typer.BadParameter("cannot be used with --squashfs", param_hint=hint)
        if self.base and self.since:
            raise typer.BadParameter("cannot be used with --since", param_hint="--base")
        if self.offline and not self.with_tool:
            raise typer.BadParameter("is for --with-tool only", param_hint="--offline")
        return ExportOptions(
            output=self.output,
            base=read_bundle_id(self.base, "--base"),
            since=_parse_moment(self.since),
            with_tool=self.with_tool,
            offline=self.offline,
        )


_OF_CARRIED = ("base", "since", "with_tool", "offline")
"""What concerns only a file to carry."""


def _parse_moment(text: str | None) -> datetime.datetime | None:
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


def _choose_bundle(flags: JobOptions, script: Path | None) -> tuple[ChosenBundle | None, Config]:
    """Return the bundle that is named, None for the project's, and the settings."""
    from ..jobs.preparation import choose_bundle, load_project

    asked = flags.bundle_id
    if flags.bundle is None and not asked:
        return None, load_settings(script)
    config = (
        load_project(flags.bundle, asked, get_settings_place())
        if script is None
        else load_settings(script)
    )
    return choose_bundle(config, flags.bundle, asked), config


@app.command()
@expand_groups
def export(*, script: Script = None, chosen: BundleChoice, what: ExportFlags, talk: Talk) -> None:
    """Write the bundle to a file to carry over an air gap, or to an image to mount."""
    from ..carrying.carry import export_project
    from ..carrying.image import export_image

    console = talk.reports()
    with boundary(console):
        bundle, config = _choose_bundle(chosen, script)
        options = replace(what.options(), bundle=bundle)
        if what.squashfs:
            image = export_image(config, options.output, console, bundle)
            console.stop()
            if talk.json:
                console.emit(image)
            console.show_image(image)
            return
        result = export_project(config, options, console)
        console.stop()
        if talk.json:
            console.emit(result)
        console.show_export(result)


# --- ``stager import``: take a bundle out of a carried file --------------------------------------


@app.command("import")
@expand_groups
def import_file(
    *,
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", parser=path_option, help="What `stager export` wrote."),
    ],
    id: BundleId = None,
    project: Annotated[
        Path | None,
        typer.Option(
            "--project",
            metavar="DIR",
            parser=path_option,
            help="Write the project's code to a new directory, to edit it and build it there.",
        ),
    ] = None,
    for_builds: Annotated[
        bool,
        typer.Option(
            "--for-builds",
            help="Let builds here take its packages, as --project does; needs trust in its maker.",
        ),
    ] = False,
    talk: Talk,
) -> None:
    """Add the bundle in a carried file to the offline root."""
    from ..carrying.carry import import_bundle
    from ..jobs import preparation

    console = talk.reports()
    with boundary(console):
        config = preparation.load_project(file, "", get_settings_place())
        asked = read_bundle_id(id)
        result = import_bundle(
            config, file, console, asked=asked, project=project, for_builds=for_builds
        )
        console.stop()
        if talk.json:
            console.emit(result)
        console.show_import(result)


# --- ``stager mirror``: a folder of wheels with an index, for pip and uv inside an air gap -------


@dataclass(frozen=True, kw_only=True)
class TargetFlags:
    """The Pythons and platforms that there are to be wheels for."""

    python: Annotated[
        list[str] | None,
        typer.Option(
            "--python", metavar="VERSION", help="Wheels for this Python, as in 3.12; repeatable."
        ),
    ] = None
    platform: Annotated[
        list[str] | None,
        typer.Option(
            "--platform",
            metavar="TAG",
            help="Wheels for this platform, as in manylinux_2_28_aarch64; repeatable.",
        ),
    ] = None

    def read(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return Pythons and platforms; a value that cannot be used is a usage error."""
        from ..config.sections import PLATFORM, PLATFORMS, VERSION, VERSIONS

        return (
            read_texts(VERSION, self.python, "--python", VERSIONS),
            read_texts(PLATFORM, self.platform, "--platform", PLATFORMS),
        )


@app.command()
@expand_groups
def mirror(
    *,
    folder: Annotated[
        Path,
        typer.Argument(metavar="DIR", parser=path_option, help="The folder; made if need be."),
    ],
    requirements: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[REQUIREMENT ...]",
            help="What to add, with all that it needs: packages or requirement files; "
            "default: the project's lock.",
        ),
    ] = None,
    targets: TargetFlags,
    offline: Offline = False,
    talk: Talk,
) -> None:
    """Keep a folder of wheels with an index for pip and uv."""
    from ..carrying.mirror import MirrorRequest, mirror_wheels
    from ..core.files import expand_home

    wanted = MirrorRequest(tuple(requirements or ()), *targets.read(), offline=offline)
    console = talk.reports()
    with boundary(console):
        config = _settings(alone=bool(requirements))
        result = mirror_wheels(config, expand_home(folder).absolute(), wanted, console)
        console.stop()
        if talk.json:
            console.emit(result)
        console.show_mirror(result)


def _settings(*, alone: bool) -> Config:
    from ..config.load import find, load
    from ..config.template import make_default_config

    place = get_settings_place()
    return make_default_config(place) if alone and find(place) is None else load(place)
