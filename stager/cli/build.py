"""``stager build``: make the bundle from the project's settings."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .application import app, boundary, expand_groups, get_settings_place, path_option
from .options import ResolveFlags, Talk, file_option, load_settings

if TYPE_CHECKING:
    from ..building.build import BuildOptions
    from ..config.load import Config
    from ..console.reports import Reports

    _Make = Callable[[Config, BuildOptions], None]

Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[SCRIPT | -- COMMAND...]",
        help="A script that says itself what it needs (PEP 723); default: the project. "
        "With --trace, the smoke test.",
    ),
]


@dataclass(frozen=True, kw_only=True)
class BuildFlags:
    """The way the bundle is made from its lock, and its place."""

    locked: Annotated[bool, typer.Option("--locked", help="Fail if the lock is not current.")] = (
        False
    )
    no_prove: Annotated[
        bool, typer.Option("--no-prove", help="Skip the proof that nothing is missing.")
    ] = False
    output: Annotated[
        Path | None, file_option("Write the bundle as one file, to carry or to use elsewhere.")
    ] = None
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

    trace: Annotated[
        bool,
        typer.Option("--trace", help="Run COMMAND in it, and show which files were never read."),
    ] = False

    def check(self, words: Sequence[str]) -> None:
        """Refuse a trace without a command, and more than a script without a trace."""
        if self.trace and not words:
            raise typer.BadParameter(
                "there is no smoke test to run; give one after two dashes: "
                "stager build --trace -- train.py --smoke",
                param_hint="--trace",
            )
        if len(words) > 1 and not self.trace:
            raise typer.BadParameter(
                f"a build takes no more than a script, and runs a command only with --trace: "
                f"{words[1]!r} cannot be used",
                param_hint="SCRIPT",
            )

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
@expand_groups
def build(
    *,
    words: Words = None,
    resolving: ResolveFlags,
    making: BuildFlags,
    talk: Talk,
) -> None:
    """Make the bundle, and prove that nothing is missing in it."""
    from ..lock.pip import NoNodeError
    from ..slurm.messages import make_failure
    from ..slurm.request import make_build_launcher

    words = words or []
    making.check(words)
    console, make = _make_traced_build(talk, words) if making.trace else _make_build(talk)
    with boundary(console):
        options = resolving.options(making.options())
        config = _load_settings(words, trace=making.trace)
        if making.on_node:
            options = replace(options, launcher=make_build_launcher(config, os.environ))
        try:
            make(config, options)
        except NoNodeError as exc:
            raise make_failure(exc.context, 1, "") from exc
        except KeyboardInterrupt:
            console.say("what was fetched and made is kept: the next build goes on from there")
            raise


def _load_settings(words: Sequence[str], *, trace: bool) -> Config:
    if not trace:
        return load_settings(path_option(words[0]) if words else None)
    from ..jobs.preparation import load_project

    return load_project(None, start=get_settings_place(), command=words)


def _make_build(talk: Talk) -> tuple[Reports, _Make]:
    """Return the output of a build, and the build itself, which shows its result."""
    from .. import pipeline

    console = talk.reports()

    def make(config: Config, options: BuildOptions) -> None:
        result = pipeline.build(config, options, console)
        if talk.json:
            console.emit(result)
        else:
            console.built(result)

    return console, make


def _make_traced_build(talk: Talk, command: Sequence[str]) -> tuple[Reports, _Make]:
    """Return the same for a build with a smoke test."""
    from .. import pipeline

    console = talk.console()

    def make(config: Config, options: BuildOptions) -> None:
        result = pipeline.build_traced(config, options, command, console)
        if talk.json:
            console.emit(result)
        else:
            console.show_trace(result)

    return console, make
