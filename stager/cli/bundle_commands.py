"""``init``, ``config``, ``lock``, ``sign`` and ``inspect``."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .application import app, boundary, expand_groups, get_settings_place, make_reports, path_option
from .options import (
    BundleId,
    Json,
    Quiet,
    ResolveFlags,
    Script,
    Talk,
    file_option,
    load_settings,
    read_bundle_id,
)

if TYPE_CHECKING:
    from ..config.load import Config
    from ..console.reports import Reports
    from ..inventory.inventory import Inventory
    from ..pack.bundle_file import ChosenBundle


# --- ``stager init``: write a commented ``stager.toml`` ------------------------------------------


@app.command()
def init(
    source: Annotated[
        Path | None,
        typer.Option(
            "--from", metavar="PATH", help="A requirements file to start from, or its folder."
        ),
    ] = None,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Write a commented stager.toml here."""
    from ..config.template import GUESSES, write_settings

    console = make_reports(quiet=quiet, as_json=json)
    with boundary(console):
        place = get_settings_place()
        made = write_settings(place if place.is_dir() else Path.cwd(), source)
        if json:
            console.emit(made)
        if made.requirements:
            named = ", ".join(made.requirements)
            console.say(f"wrote {made.path.name} for {named}; look at it, then: stager build")
        else:
            console.say(
                f"wrote {made.path.name} without requirements: there is no {', '.join(GUESSES)} "
                "here. Fill in environment.requirements, then: stager build"
            )


# --- ``stager config``: show every setting, its value, and where that came from ------------------


@app.command()
@expand_groups
def config(*, talk: Talk) -> None:
    """Show every setting, its value, and where that came from."""
    from ..building.current_bundle import offline_root
    from ..config.load import find, list_settings, load
    from ..config.template import make_default_config

    console = talk.reports()
    with boundary(console):
        place = get_settings_place()
        found = find(place)
        config = load(place) if found else make_default_config(place)
        result = list_settings(config, os.environ, offline_root(config))
        if talk.json:
            console.emit(result)
            return
        if found is None:
            console.note("there is no stager.toml here: these are the values without one")
        console.show_config(result)


# --- ``stager lock``: pin the requirements in ``pylock.toml`` ------------------------------------


@app.command()
@expand_groups
def lock(
    *,
    script: Script = None,
    resolving: ResolveFlags,
    talk: Talk,
) -> None:
    """Pin the requirements: pylock.toml, exact files and digests."""
    from .. import pipeline
    from ..building.build import BuildOptions

    console = talk.reports()
    with boundary(console):
        options = resolving.options(BuildOptions())
        written = pipeline.lock(load_settings(script), options, console)
        console.stop()
        if talk.json:
            console.emit(written)
        console.locked(written)


# --- ``stager sign``: sign a bundle with an SSH key ----------------------------------------------


@app.command()
@expand_groups
def sign(
    *,
    bundle: Annotated[
        Path | None,
        typer.Argument(
            metavar="[BUNDLE]",
            parser=path_option,
            help="Default: the project's newest, made again if need be.",
        ),
    ] = None,
    id: BundleId = None,
    key: Annotated[
        Path,
        typer.Option(
            "--key",
            metavar="KEY",
            parser=path_option,
            help="The SSH key: a private one, the .pub of one in your ssh-agent, or a -cert.pub.",
        ),
    ],
    talk: Talk,
) -> None:
    """Sign a bundle with an SSH key."""
    from ..building.current_bundle import current_bundle
    from ..jobs.preparation import choose_bundle, load_project
    from ..pack.bundle_file import ChosenBundle
    from ..trust import sign as make_signature

    asked = read_bundle_id(id)
    console = talk.reports()
    with boundary(console):
        if bundle is not None:
            chosen = ChosenBundle(path=bundle, id=asked)
        elif asked:
            chosen = choose_bundle(load_project(None, asked, get_settings_place()), None, asked)
        else:  # made again if the project has changed: it is what the next job takes
            chosen = current_bundle(load_project(None, start=get_settings_place()), console)
        result = make_signature(chosen, key, console.note)
        if talk.json:
            console.emit(result)
        console.signed(result)


# --- ``stager inspect``: show what is in a bundle ------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class InspectFlags:
    """The part of a bundle that is shown."""

    files: Annotated[bool, typer.Option("--files", help="List every file.")] = False
    licenses: Annotated[
        bool, typer.Option("--licenses", help="List the licences of packages, models and data.")
    ] = False
    sbom: Annotated[
        bool, typer.Option("--sbom", help="Print a bill of materials: JSON of CycloneDX 1.6.")
    ] = False
    output: Annotated[Path | None, file_option("The file for --sbom; default: print it.")] = None
    json: Json = False

    def check(self) -> None:
        """Refuse options that contradict each other: a usage error."""
        chosen = [name for name in ("files", "licenses", "sbom") if getattr(self, name)]
        if len(chosen) > 1:
            raise typer.BadParameter(
                f"cannot be used with --{chosen[1]}", param_hint=f"--{chosen[0]}"
            )
        if self.output is not None and not self.sbom:
            raise typer.BadParameter("is for --sbom only", param_hint="--output")
        if self.json and self.sbom and self.output is None:
            raise typer.BadParameter(
                "cannot be used with --sbom without --output: that prints JSON of its own",
                param_hint="--json",
            )


@app.command()
@expand_groups
def inspect(
    *,
    bundle: Annotated[
        Path | None, typer.Argument(metavar="[BUNDLE]", help="Default: the project's newest.")
    ] = None,
    id: BundleId = None,
    view: InspectFlags,
) -> None:
    """Show what is in a bundle."""
    view.check()
    asked = read_bundle_id(id)
    console = make_reports(as_json=view.json)
    with boundary(console):
        chosen, config = _choose_bundle(bundle, asked)
        if view.licenses or view.sbom:
            _show_components(console, view, chosen, config)
        else:
            _show_layers(console, view, chosen, config)


def _choose_bundle(bundle: Path | None, asked: str) -> tuple[ChosenBundle, Config | None]:
    """Return the bundle, and the settings of the project; None for those of no project."""
    from ..config.load import find, load
    from ..core.errors import ConfigError
    from ..jobs.preparation import choose_bundle, load_project
    from ..pack.bundle_file import ChosenBundle

    place = get_settings_place()
    if bundle is None:
        config = load_project(None, asked, place)
        return choose_bundle(config, None, asked), config if find(place) else None
    chosen = ChosenBundle(path=bundle, id=asked)
    with suppress(ConfigError):
        return chosen, load(place)
    return chosen, None


def _show_layers(
    console: Reports, view: InspectFlags, chosen: ChosenBundle, config: Config | None
) -> None:
    from ..pack.members import inspect as inspect_bundle
    from ..pack.members import inspect_files
    from ..trust import inspect_signature

    look = inspect_files if view.files else inspect_bundle
    result = look(chosen.path, asked=chosen.id)
    made = inspect_signature(config, chosen.path, result.id)
    result = replace(result, signature=made)
    if view.json:
        console.emit(result)
    else:
        console.show_inspection(result)


def _show_components(
    console: Reports, view: InspectFlags, chosen: ChosenBundle, config: Config | None
) -> None:
    from ..inventory.inventory import inventory, licence_list
    from ..inventory.provenance import list_possible_locks

    found = inventory(chosen, list_possible_locks(chosen.path, config))
    if view.sbom:
        _show_sbom(console, view, found, config)
        return
    result = licence_list(found)
    if view.json:
        console.emit(result)
    else:
        console.licences(result)


def _show_sbom(
    console: Reports, view: InspectFlags, found: Inventory, config: Config | None
) -> None:
    from ..inventory.sbom import sbom, unknown_sources, write_sbom

    console.show_missing_sources(unknown_sources(found), len(found.packages))
    if view.output is None:
        console.text(sbom(found))
        return
    result = write_sbom(found, view.output.absolute(), config.project.path if config else None)
    if view.json:
        console.emit(result)
    console.show_sbom(result)
