"""``stager build``: make the bundle from the project's settings."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .grouped import grouped
from .options.lock import ResolveFlags, Script, settings_for
from .options.output import Talk, file_option
from .options.values import path_option
from .program import app, boundary

if TYPE_CHECKING:
    from ..building.build import BuildOptions


@dataclass(frozen=True, kw_only=True)
class BuildFlags:
    """How the bundle is made from its lock, and where it goes."""

    locked: Annotated[bool, typer.Option("--locked", help="Fail if the lock is not current.")] = (
        False
    )
    no_prove: Annotated[
        bool, typer.Option("--no-prove", help="Skip the proof that nothing is missing.")
    ] = False
    output: Annotated[Path | None, file_option("Copy the bundle to this file, too.")] = None
    sign: Annotated[
        Path | None,
        typer.Option(
            "--sign",
            metavar="KEY",
            parser=path_option,
            help="Sign it with this SSH key, as `stager sign` does.",
        ),
    ] = None
    on_node: Annotated[
        bool,
        typer.Option("--on-node", help="Build sdists on a node of the cluster."),
    ] = False
    jobs: Annotated[
        int | None,
        typer.Option("--jobs", metavar="N", min=1, help="Layers made at a time; default: CPUs."),
    ] = None

    def options(self) -> BuildOptions:
        """Return these options as those of a build."""
        from ..building.build import BuildOptions

        return BuildOptions(
            locked=self.locked,
            prove=not self.no_prove,
            output=self.output,
            sign=self.sign,
            jobs=self.jobs,
        )


@app.command()
@grouped
def build(
    *,
    script: Script = None,
    resolving: ResolveFlags,
    making: BuildFlags,
    talk: Talk,
) -> None:
    """Make the bundle, and prove that nothing is missing in it."""
    from .. import pipeline
    from ..lock.pip import NoNodeError
    from ..slurm.build_step import launcher
    from ..slurm.messages import failure

    console = talk.reports()
    with boundary(console):
        options = resolving.options(making.options())
        config = settings_for(script)
        if making.on_node:
            options = replace(options, launcher=launcher(config, os.environ))
        try:
            result = pipeline.build(config, options, console)
        except NoNodeError as exc:
            raise failure(exc.context, 1, "") from exc
        except KeyboardInterrupt:
            console.say("what was fetched and made is kept: the next build goes on from there")
            raise
        if talk.json:
            console.emit(result)
        else:
            console.built(result)
