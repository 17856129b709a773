"""``export``, ``import`` and ``mirror``."""

from __future__ import annotations

import datetime
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bundle.protocol.counts import format_count

from .application import app, get_settings_place, option, path_flag, path_option, refuse_together
from .options import (
    BundleChoice,
    BundleId,
    Offline,
    Script,
    Talk,
    file_option,
    load_settings,
    read_bundle_id,
    read_text,
    read_texts,
)

if TYPE_CHECKING:
    from ..config.job_settings import JobOptions
    from ..config.load import Config
    from ..pack.bundle_file import ChosenBundle


@app.command()
def export(
    *,
    script: Script = None,
    chosen: BundleChoice,
    output: Annotated[
        Path | None,
        file_option("The file; default: NAME-ID.carry.tar in this directory, or NAME-ID.env.sqsh."),
    ] = None,
    squashfs: Annotated[
        bool, option("--squashfs", "Write the environment as an image to mount instead.")
    ] = False,
    base: Annotated[
        str | None, option("--base ID", "Leave out what the bundle with this id has already.")
    ] = None,
    since: Annotated[
        str | None, option("--since DATE", "Leave out what was exported before this date.")
    ] = None,
    with_tool: Annotated[
        bool, option("--with-tool", "Add stager itself, to be installed over there.")
    ] = False,
    offline: Annotated[bool, option("--offline", "Fetch nothing for --with-tool.")] = False,
    with_code: Annotated[
        bool, option("--with-code", "Add what torch.compile has made in earlier jobs.")
    ] = False,
    console: Talk,
) -> None:
    """Write the bundle to a file to carry over an air gap, or to an image to mount."""
    from ..carrying.exports import ExportOptions, export_project
    from ..carrying.image import export_image

    of_file = {"base": base, "since": since, "with-tool": with_tool, "offline": offline}
    for name, value in {**of_file, "with-code": with_code}.items():
        refuse_together(**{name: value}, squashfs=squashfs)
    refuse_together(base=base, since=since)
    if offline and not with_tool:
        raise typer.BadParameter("is for --with-tool only", param_hint="--offline")
    of_base, moment = read_bundle_id(base, "--base"), None
    if since is not None:
        moment = read_text(_read_moment, since, "--since", _MOMENTS)
    bundle, config = _choose_bundle(chosen, script)
    if squashfs:
        console.show(export_image(config, output, console, bundle), console.show_image)
        return
    options = ExportOptions(
        output=output,
        base=of_base,
        since=moment,
        with_tool=with_tool,
        offline=offline,
        with_code=with_code,
        bundle=bundle,
    )
    console.show(export_project(config, options, console), console.show_export)


_MOMENTS = "a date (2026-01-31) or a time (2026-01-31T12:00)"


def _read_moment(value: object) -> datetime.datetime:
    return datetime.datetime.fromisoformat(str(value)).astimezone()  # in this machine's time zone


def _choose_bundle(flags: JobOptions, script: Path | None) -> tuple[ChosenBundle | None, Config]:
    from ..jobs.preparation import choose_bundle, load_project

    bundle, asked = flags.bundle, flags.bundle_id
    if bundle is None and not asked:
        return None, load_settings(script)
    config = load_settings(script) if script else load_project(bundle, asked, get_settings_place())
    return choose_bundle(config, bundle, asked), config


@app.command("import")
def import_file(
    *,
    file: Annotated[
        Path, typer.Argument(metavar="FILE", parser=path_option, help="What `stager export` wrote.")
    ],
    id: BundleId = None,
    project: Annotated[
        Path | None,
        path_flag(
            "--project DIR",
            "Write the project's code to a new directory, to edit it and build it there.",
        ),
    ] = None,
    for_builds: Annotated[
        bool,
        option(
            "--for-builds",
            "Let builds here take its packages, as --project does; needs trust in its maker.",
        ),
    ] = False,
    with_code: Annotated[
        bool,
        option("--with-code", "Let jobs use the compiled code in it; needs trust in its maker."),
    ] = False,
    console: Talk,
) -> None:
    """Add the bundle in a carried file to the offline root."""
    from ..carrying.imports import import_bundle, import_compiled_code, read_compiled_code
    from ..jobs import preparation

    config = preparation.load_project(file, "", get_settings_place())
    asked = read_bundle_id(id)
    code = read_compiled_code(file) if with_code else {}
    result = import_bundle(
        config, file, console, asked=asked, project=project, for_builds=for_builds
    )
    if code:
        import_compiled_code(config, code)
        files = format_count(len(code) // 2, "file")
        console.note(f"compiled code: {files}; `stager inspect` lists what fits a bundle")
    console.show(result, console.show_import)


@app.command()
def mirror(
    *,
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", parser=path_option, help="The folder; made if need be.")
    ],
    requirements: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[REQUIREMENT ...]",
            help="What to add, with all that it needs: packages or requirement files; "
            "default: the project's lock.",
        ),
    ] = None,
    python: Annotated[
        list[str] | None,
        option("--python VERSION", "Wheels for this Python, as in 3.12; repeatable."),
    ] = None,
    platform: Annotated[
        list[str] | None,
        option(
            "--platform TAG", "Wheels for this platform, as in manylinux_2_28_aarch64; repeatable."
        ),
    ] = None,
    offline: Offline = False,
    console: Talk,
) -> None:
    """Keep a folder of wheels with an index for pip and uv."""
    from ..carrying.mirror import mirror_wheels
    from ..config.load import load
    from ..config.sections import PLATFORM, PLATFORMS, VERSION, VERSIONS
    from ..config.template import load_or_default
    from ..core.files import expand_home

    pythons = read_texts(VERSION, python, "--python", VERSIONS)
    platforms = read_texts(PLATFORM, platform, "--platform", PLATFORMS)
    place, wanted = get_settings_place(), requirements or ()
    config = load_or_default(place) if wanted else load(place)
    own = config.environment
    each = product(platforms or (own.platform,), pythons or (own.python,))
    targets = [(version, tag) for tag, version in each]
    root = expand_home(folder).absolute()
    result = mirror_wheels(config, root, wanted, console, targets=targets, offline=offline)
    console.show(result, console.show_mirror)
