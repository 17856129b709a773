"""``init``, ``lock``, ``build``, ``inspect``: from a project's settings to its bundle."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bundle.protocol.counts import counted

from .grouped import grouped
from .options import Json, Offline, Quiet, Resolver, Talk, resolver_name
from .program import app, boundary, make_console

if TYPE_CHECKING:
    from ..config.load import Config


@app.command()
def init(
    source: Annotated[
        Path | None,
        typer.Option("--from", help="A requirements file to start from, or its folder."),
    ] = None,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Write a commented stager.toml here."""
    from ..config.template import create

    console = make_console(quiet=quiet, as_json=json)
    with boundary(console):
        path = create(Path.cwd(), source)
        if json:
            console.emit({"path": str(path)})
        console.say(f"wrote {path.name}; look at it, then: stager build")


@app.command()
@grouped
def lock(
    *,
    resolver: Resolver = "auto",
    offline: Offline = False,
    talk: Talk,
) -> None:
    """Pin the requirements: pylock.toml, exact files and digests."""
    from ..building.build import BuildOptions, lock_project

    console = talk.console()
    with boundary(console):
        options = BuildOptions(resolver=resolver_name(resolver), offline=offline)
        made = lock_project(_config(), options, console)
        console.stop()
        if talk.json:
            console.emit({"lock": str(made.path), "packages": len(made.files)})
        console.say(f"locked {counted(len(made.files), 'package')} in {made.path}", "good")


@app.command()
@grouped
def build(
    *,
    resolver: Resolver = "auto",
    offline: Offline = False,
    locked: Annotated[
        bool, typer.Option("--locked", help="Fail if the lock is not current.")
    ] = False,
    no_prove: Annotated[
        bool, typer.Option("--no-prove", help="Skip the proof that nothing is missing.")
    ] = False,
    jobs: Annotated[
        int | None, typer.Option("--jobs", min=1, help="Layers made at a time; default: CPUs.")
    ] = None,
    talk: Talk,
) -> None:
    """Make the bundle, and prove that nothing is missing in it."""
    from ..building.build import BuildOptions, build_report
    from ..building.build import build as make

    console = talk.console()
    with boundary(console):
        options = BuildOptions(
            resolver=resolver_name(resolver),
            offline=offline,
            locked=locked,
            prove=not no_prove,
            jobs=jobs,
        )
        report = build_report(make(_config(), options, console))
        console.stop()
        if talk.json:
            console.emit(report)
        else:
            console.built(report)


@app.command()
def inspect(
    bundle: Annotated[Path | None, typer.Argument(help="Default: the project's newest.")] = None,
    files: Annotated[bool, typer.Option("--files", help="List every file.")] = False,
    json: Json = False,
) -> None:
    """Show what is in a bundle."""
    from ..building.current_bundle import newest_bundle
    from ..pack.existing import Chosen
    from ..pack.inspect import inspect as look

    console = make_console(as_json=json)
    with boundary(console):
        chosen = Chosen(path=bundle) if bundle else newest_bundle(_config())
        report = look(chosen.path, files=files, asked=chosen.id)
        if json:
            console.emit(report)
        else:
            console.inspected(report)


def _config() -> Config:
    from ..config.load import load

    return load(Path.cwd())
