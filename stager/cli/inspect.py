"""``stager inspect``: show what is in a bundle."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .grouped import grouped
from .options.bundle import BundleId, bundle_id
from .options.output import Json, file_option
from .program import app, boundary, make_reports
from .settings_place import settings_place

if TYPE_CHECKING:
    from ..config.load import Config
    from ..console.reports import Reports
    from ..inventory.inventory import Inventory
    from ..pack.bundle_file import ChosenBundle


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
@grouped
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
    asked = bundle_id(id, "--id")
    console = make_reports(as_json=view.json)
    with boundary(console):
        chosen, config = _chosen(bundle, asked)
        if view.licenses or view.sbom:
            _show_components(console, view, chosen, config)
        else:
            _show_layers(console, view, chosen, config)


def _chosen(bundle: Path | None, asked: str) -> tuple[ChosenBundle, Config | None]:
    """Return the bundle, and the settings of the project; None for those of no project."""
    from ..config.load import find, load
    from ..core.errors import ConfigError
    from ..jobs.preparation import chosen_bundle, load_project
    from ..pack.bundle_file import ChosenBundle

    place = settings_place()
    if bundle is None:
        config = load_project(None, asked, place)
        return chosen_bundle(config, None, asked), config if find(place) else None
    chosen = ChosenBundle(path=bundle, id=asked)
    with suppress(ConfigError):
        return chosen, load(place)
    return chosen, None


def _show_layers(
    console: Reports, view: InspectFlags, chosen: ChosenBundle, config: Config | None
) -> None:
    from ..pack.members import inspect as inspect_bundle
    from ..pack.members import inspect_files
    from ..trust import inspected_signature

    look = inspect_files if view.files else inspect_bundle
    result = look(chosen.path, asked=chosen.id)
    made = inspected_signature(config, chosen.path, result.id)
    result = replace(result, signature=made)
    if view.json:
        console.emit(result)
    else:
        console.inspected(result)


def _show_components(
    console: Reports, view: InspectFlags, chosen: ChosenBundle, config: Config | None
) -> None:
    from ..inventory.inventory import inventory, licence_list
    from ..inventory.provenance import locks_at_hand

    found = inventory(chosen, locks_at_hand(chosen.path, config))
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
    from ..inventory.inventory import sbom, unknown_sources, write_sbom

    console.without_source(unknown_sources(found), len(found.packages))
    if view.output is None:
        console.text(sbom(found))
        return
    result = write_sbom(found, view.output.absolute(), config.project.path if config else None)
    if view.json:
        console.emit(result)
    console.wrote_sbom(result)
