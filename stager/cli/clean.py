"""``stager clean``: remove what nobody uses any more from the nodes and the offline root."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from .grouped import grouped
from .options.batch import DryRun
from .options.bundle import PlaceFlags
from .options.job import job_options
from .options.launch import LaunchFlags
from .options.logs import LogDir
from .options.output import Talk
from .options.request import SlurmFlags
from .program import app, boundary
from .settings_place import settings_place

if TYPE_CHECKING:
    from ..config.load import Config
    from ..jobs.job_description import JobOptions
    from ..pipeline import CleanOptions


@dataclass(frozen=True, kw_only=True)
class CleanFlags:
    """The parts that are cleaned, and how thoroughly."""

    nodes_only: Annotated[
        bool, typer.Option("--nodes-only", help="Leave the offline root alone.")
    ] = False
    store_only: Annotated[bool, typer.Option("--store-only", help="Leave the nodes alone.")] = False
    everything: Annotated[
        bool,
        typer.Option(
            "--all",
            help="Remove every project's newest bundle as well, and those that batch scripts name.",
        ),
    ] = False
    wheels: Annotated[
        bool,
        typer.Option(
            "--wheels",
            help="Remove wheels that no lock names, too.",
        ),
    ] = False
    dry_run: DryRun = False

    def options(self, job: JobOptions) -> CleanOptions:
        """Return the options of a removal; two that leave nothing to clean are a usage error."""
        from ..pipeline import CleanOptions

        if self.nodes_only and self.store_only:
            raise typer.BadParameter("cannot be used with --store-only", param_hint="--nodes-only")
        return CleanOptions(
            nodes=not self.store_only,
            store=not self.nodes_only,
            everything=self.everything,
            wheels=self.wheels,
            dry_run=self.dry_run,
            job=job,
        )


@app.command()
@grouped
def clean(
    *,
    what: CleanFlags,
    place: PlaceFlags,
    slurm: SlurmFlags,
    log_dir: LogDir = None,
    talk: Talk,
) -> None:
    """Remove environments, bundles and layers that nobody uses."""
    from .. import pipeline

    options = what.options(job_options(slurm, LaunchFlags(log_dir=log_dir), place))
    console = talk.console()
    with boundary(console):
        config = _settings(what, place)
        result = pipeline.clean(config, options, console)
        code = console.nodes_cleaned(result)
        if talk.json:
            console.emit(result)
        else:
            console.cleaned(result)
        raise typer.Exit(code)


def _settings(what: CleanFlags, place: PlaceFlags) -> Config:
    from ..config.load import find
    from ..config.template import default
    from ..jobs.preparation import load_project

    start = settings_place()
    if what.store_only and find(start) is None:
        return default(start)
    return load_project(place.bundle, place.asked, start)
