"""``stager build``: make the bundle from the project's settings."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .application import app, get_settings_place, path_flag, path_option
from .options import JobTalk, ResolveFlags, file_option, load_settings

if TYPE_CHECKING:
    from ..config.load import Config


@app.command()
def build(
    *,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[SCRIPT | -- COMMAND...]",
            help="A script that says itself what it needs (PEP 723); default: the project. "
            "With --trace, the smoke test.",
        ),
    ] = None,
    resolving: ResolveFlags,
    locked: Annotated[
        bool, typer.Option("--locked", help="Fail if the lock is not current.")
    ] = False,
    no_prove: Annotated[
        bool, typer.Option("--no-prove", help="Skip the proof that nothing is missing.")
    ] = False,
    output: Annotated[
        Path | None, file_option("Write the bundle as one file, to carry or to use elsewhere.")
    ] = None,
    sign: Annotated[
        Path | None,
        path_flag(
            "--sign", metavar="KEY", help="Sign it with this SSH key, as `stager sign` does."
        ),
    ] = None,
    on_node: Annotated[
        bool, typer.Option("--on-node", help="Build sdists on a node of the cluster.")
    ] = False,
    jobs: Annotated[
        int | None,
        typer.Option("--jobs", metavar="N", min=1, help="Layers made at a time; default: CPUs."),
    ] = None,
    trace: Annotated[
        bool,
        typer.Option("--trace", help="Run COMMAND in it, and show which files were never read."),
    ] = False,
    console: JobTalk,
) -> None:
    """Make the bundle, and prove that nothing is missing in it."""
    from .. import pipeline
    from ..building.build import BuildOptions
    from ..lock.pip import NoNodeError
    from ..slurm.messages import make_failure
    from ..slurm.request import make_build_launcher

    words = words or []
    _check_words(words, trace=trace)
    options = resolving.options(
        BuildOptions(locked=locked, prove=not no_prove, output=output, sign=sign, jobs=jobs)
    )
    config = _load_settings(words, trace=trace)
    if on_node:
        options = replace(options, launcher=make_build_launcher(config, os.environ))
    try:
        if trace:
            traced = pipeline.build_traced(config, options, words, console)
            console.show(traced, console.show_trace)
        else:
            console.show(pipeline.build(config, options, console), console.show_build)
    except NoNodeError as exc:
        raise make_failure(exc.context, 1, "") from exc
    except KeyboardInterrupt:
        console.say("what was fetched and made is kept: the next build goes on from there")
        raise


def _check_words(words: Sequence[str], *, trace: bool) -> None:
    if trace and not words:
        raise typer.BadParameter(
            "there is no smoke test to run; give one after two dashes: "
            "stager build --trace -- train.py --smoke",
            param_hint="--trace",
        )
    if len(words) > 1 and not trace:
        raise typer.BadParameter(
            f"a build takes no more than a script, and runs a command only with --trace: "
            f"{words[1]!r} cannot be used",
            param_hint="SCRIPT",
        )


def _load_settings(words: Sequence[str], *, trace: bool) -> Config:
    if not trace:
        return load_settings(path_option(words[0]) if words else None)
    from ..jobs.preparation import load_project

    return load_project(None, start=get_settings_place(), command=words)
