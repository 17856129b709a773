"""``init``, ``config``, ``lock``, ``build``, ``sign`` and ``inspect``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bundle.protocol.enumerations import Action

from ..config.job_settings import JobOptions
from .application import app, get_settings_place, option, path_flag, path_option, refuse_together
from .options import (
    BundleId,
    JobTalk,
    JsonTalk,
    QuietTalk,
    Resolving,
    Script,
    Talk,
    file_option,
    load_settings,
    read_bundle_id,
)

if TYPE_CHECKING:
    from ..config.load import Config
    from ..pack.bundle_file import ChosenBundle


@app.command()
def init(
    *,
    source: Annotated[
        Path | None, option("--from PATH", "A requirements file to start from, or its folder.")
    ] = None,
    console: QuietTalk,
) -> None:
    """Write a commented stager.toml here."""
    from ..config.template import GUESSES, write_settings

    place = get_settings_place()
    made = write_settings(place if place.is_dir() else Path.cwd(), source)
    if console.as_json:
        console.emit(made)
    named = "".join(f" for {name}; look at it" for name in made.requirements) or (
        f" without requirements: there is no {', '.join(GUESSES)} "
        "here. Fill in environment.requirements"
    )
    console.say(f"wrote {made.path.name}{named}, then: stager build")


@app.command()
def config(*, console: Talk) -> None:
    """Show every setting, its value, and where that came from."""
    from ..building.current_bundle import offline_root
    from ..config.load import find, list_settings
    from ..config.template import load_or_default

    place = get_settings_place()
    config = load_or_default(place)
    result = list_settings(config, os.environ, offline_root(config))
    if find(place) is None and not console.as_json:
        console.note("there is no stager.toml here: these are the values without one")
    console.show(result, console.show_config)


@app.command()
def lock(*, script: Script = None, resolving: Resolving, console: Talk) -> None:
    """Pin the requirements: pylock.toml, exact files and digests."""
    from .. import pipeline

    console.show(pipeline.lock(load_settings(script), resolving, console), console.show_lock)


@app.command()
def build(
    *,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[SCRIPT | -- COMMAND...]",
            help="A script that says itself what it needs (PEP 723); default: the project. "
            "With --trace or --warm, the smoke test.",
        ),
    ] = None,
    resolving: Resolving,
    locked: Annotated[bool, option("--locked", "Fail if the lock is not current.")] = False,
    no_prove: Annotated[
        bool, option("--no-prove", "Skip the proof that nothing is missing.")
    ] = False,
    output: Annotated[
        Path | None, file_option("Write the bundle as one file, to carry or to use elsewhere.")
    ] = None,
    sign: Annotated[
        Path | None, path_flag("--sign KEY", "Sign it with this SSH key, as `stager sign` does.")
    ] = None,
    on_node: Annotated[bool, option("--on-node", "Build sdists on a node of the cluster.")] = False,
    jobs: Annotated[
        int | None, option("--jobs N", "Layers made at a time; default: CPUs.", min=1)
    ] = None,
    trace: Annotated[
        bool, option("--trace", "Run COMMAND in it, and show which files were never read.")
    ] = False,
    warm: Annotated[
        bool, option("--warm", "Run COMMAND in it, and keep the code that torch.compile makes.")
    ] = False,
    console: JobTalk,
) -> None:
    """Make the bundle, and prove that nothing is missing in it."""
    from .. import pipeline
    from ..lock.pip import NoNodeError
    from ..slurm.messages import make_failure
    from ..slurm.request import make_build_launcher

    words = words or []
    _check_words(words, trace=trace, warm=warm)
    refuse_together(upgrade=resolving.upgrade, locked=locked)
    refuse_together(upgrade_package=resolving.upgrade_packages, locked=locked)
    options = replace(
        resolving, locked=locked, prove=not no_prove, output=output, sign=sign, jobs=jobs
    )
    if trace or warm:
        from ..jobs.preparation import load_project

        config = load_project(None, start=get_settings_place(), command=words)
    else:
        config = load_settings(path_option(words[0]) if words else None)
    if on_node:
        options = replace(options, launcher=make_build_launcher(config, os.environ))
    try:
        if trace:
            traced = pipeline.build_traced(config, options, words, console)
            console.show(traced, console.show_trace)
        else:
            built = pipeline.build(config, options, console)
            if not (warm and console.as_json):  # one result, that of the run
                console.show(built, console.show_build)
    except NoNodeError as exc:
        raise make_failure(exc.context, 1, "") from exc
    except KeyboardInterrupt:
        console.say("what was fetched and made is kept: the next build goes on from there")
        raise
    if warm:
        from ..jobs.outcome import make_run_result
        from .job_commands import run_command

        # What it compiles here, or in the allocation of this shell, is kept.
        allocation = "auto" if os.environ.get("SLURM_JOB_ID") else "local"
        job = JobOptions(allocation=allocation, command=tuple(words))
        run_command(console, Action.RUN, job, make_run_result, console.show_run)


def _check_words(words: Sequence[str], *, trace: bool, warm: bool) -> None:
    refuse_together(trace=trace, warm=warm)
    named = "--trace" if trace else "--warm"
    if (trace or warm) and not words:
        raise typer.BadParameter(
            "there is no smoke test to run; give one after two dashes: "
            f"stager build {named} -- train.py --smoke",
            param_hint=named,
        )
    if len(words) > 1 and not (trace or warm):
        raise typer.BadParameter(
            "a build takes no more than a script, and runs a command only with --trace or --warm: "
            f"{words[1]!r} cannot be used",
            param_hint="SCRIPT",
        )


@app.command()
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
        path_flag(
            "--key KEY",
            "The SSH key: a private one, the .pub of one in your ssh-agent, or a -cert.pub.",
        ),
    ],
    console: Talk,
) -> None:
    """Sign a bundle with an SSH key."""
    from ..building.current_bundle import current_bundle
    from ..jobs.preparation import choose_bundle, load_project
    from ..pack.bundle_file import ChosenBundle
    from ..trust import sign as make_signature

    asked = read_bundle_id(id)
    if bundle is not None:
        chosen = ChosenBundle(path=bundle, id=asked)
    else:
        config = load_project(None, asked, get_settings_place())
        # Made again if the project has changed: it is what the next job takes.
        chosen = choose_bundle(config, None, asked) if asked else current_bundle(config, console)
    console.show(make_signature(chosen, key, console.note), console.show_signature)


@app.command()
def inspect(
    *,
    bundle: Annotated[
        Path | None, typer.Argument(metavar="[BUNDLE]", help="Default: the project's newest.")
    ] = None,
    id: BundleId = None,
    files: Annotated[bool, option("--files", "List every file.")] = False,
    licenses: Annotated[
        bool, option("--licenses", "List the licences of packages, models and data.")
    ] = False,
    sbom: Annotated[
        bool, option("--sbom", "Print a bill of materials: JSON of CycloneDX 1.6.")
    ] = False,
    output: Annotated[Path | None, file_option("The file for --sbom; default: print it.")] = None,
    console: JsonTalk,
) -> None:
    """Show what is in a bundle."""
    refuse_together(files=files, licenses=licenses, sbom=sbom)
    if sbom:
        _write_sbom(console, bundle, id, output)
        return
    if output is not None:
        raise typer.BadParameter("is for --sbom only", param_hint="--output")
    from ..building.current_bundle import offline_root
    from ..core.store import Store
    from ..pack import members
    from ..trust import inspect_signature

    chosen, config = _choose_bundle(bundle, read_bundle_id(id))
    if licenses:
        from ..inventory.inventory import inventory, licence_list
        from ..inventory.provenance import list_possible_locks

        found = inventory(chosen, list_possible_locks(chosen.path, config))
        console.show(licence_list(found), console.show_licences)
        return
    look = members.inspect_files if files else members.inspect
    store = Store(offline_root(config)) if config and not config.trust.require else None
    result = look(chosen.path, asked=chosen.id, store=store)
    made = inspect_signature(config, chosen.path, result.id)
    console.show(replace(result, signature=made), console.show_inspection)


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


def _write_sbom(
    console: JsonTalk, bundle: Path | None, id: str | None, output: Path | None
) -> None:
    from ..inventory.inventory import inventory, sbom, unknown_sources, write_sbom
    from ..inventory.provenance import list_possible_locks

    if console.as_json and output is None:
        raise typer.BadParameter(
            "cannot be used with --sbom without --output: that prints JSON of its own",
            param_hint="--json",
        )
    chosen, config = _choose_bundle(bundle, read_bundle_id(id))
    found = inventory(chosen, list_possible_locks(chosen.path, config))
    console.show_missing_sources(unknown_sources(found), len(found.packages))
    if output is None:
        console.text(sbom(found))
        return
    result = write_sbom(found, output.absolute(), config.project.path if config else None)
    console.show(result, console.show_sbom)
