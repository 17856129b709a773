"""``verify``, ``run`` and ``exec``: from a bundle to what becomes of it on the nodes."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from .grouped import grouped
from .options import (
    BatchFlags,
    BundleFlags,
    Command,
    LaunchFlags,
    Place,
    SlurmFlags,
    Talk,
    job_options,
)
from .program import app, boundary, make_console

if TYPE_CHECKING:
    from ..console import Console
    from ..jobs.driver import OnEvent
    from ..jobs.job import JobOptions
    from ..jobs.prepare import Prepared
    from ..jobs.result import Outcome


@app.command()
@grouped
def verify(
    *,
    place: Place,
    slurm: SlurmFlags,
    launch: LaunchFlags,
    deep: Annotated[
        bool, typer.Option("--deep", help="Read every file, try the network between all nodes.")
    ] = False,
    batch: BatchFlags,
    talk: Talk,
) -> None:
    """Put the bundle on every node and check it; launch nothing."""
    from ..jobs.result import verify_report

    batch.check()
    options = replace(
        job_options(slurm, launch, place.allocation), dry_run=batch.dry_run, deep=deep
    )
    console = talk.console()
    with boundary(console):
        with _remembered(options, "verify"):
            outcome = _carry_out(console, place, options, "verify", batch)
        if talk.json:
            console.emit(verify_report(outcome))
        raise typer.Exit(console.verified(outcome))


@app.command(context_settings={"allow_interspersed_args": False})
@grouped
def run(
    *,
    command: Command = None,
    place: Place,
    slurm: SlurmFlags,
    launch: LaunchFlags,
    batch: BatchFlags,
    talk: Talk,
) -> None:
    """Verify, then launch COMMAND (default: project.command)."""
    from ..jobs.result import run_report

    batch.check()
    options = replace(
        job_options(slurm, launch, place.allocation),
        dry_run=batch.dry_run,
        command=tuple(command or ()),
    )
    console = talk.console()
    with boundary(console):
        with _remembered(options, "run"):
            outcome = _carry_out(console, place, options, "run", batch)
        if talk.json:
            console.emit(run_report(outcome))
        raise typer.Exit(console.ran(outcome))


@app.command(name="exec", context_settings={"allow_interspersed_args": False})
@grouped
def exec_(
    *,
    command: Annotated[
        list[str], typer.Argument(metavar="-- COMMAND...", help="A program and its arguments.")
    ],
    chosen: BundleFlags,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="Print only errors.")] = False,
) -> None:
    """Run any command in the environment, on this machine."""
    from ..jobs.driver import execute
    from ..jobs.prepare import bundle_of, project
    from ..pack.existing import Chosen

    asked = chosen.asked
    console = make_console(quiet=quiet)
    with boundary(console):
        config = project(chosen.bundle, asked)
        path, manifest = bundle_of(config, chosen.bundle, console, asked)
        execute(config, Chosen(path=path, id=manifest.id), command)


def _remembered(options: JobOptions, command: str) -> AbstractContextManager[None]:
    """Let ``diagnose`` know of a command that fails before its job begins."""
    from ..logs.files import default_folder
    from ..logs.refused import remembered

    return remembered(default_folder(options.log_dir), command)


def _carry_out(
    console: Console, place: Place, options: JobOptions, action: str, flags: BatchFlags
) -> Outcome:
    """Take a job to its end; one that is only planned or submitted ends the command here."""
    from ..building.current_bundle import offline_root
    from ..core.store import Store
    from ..forecast import history
    from ..jobs.driver import carry_out
    from ..jobs.job import numbered
    from ..jobs.prepare import bundle_of, prepare, project, source_of, way
    from ..jobs.result import Outcome
    from ..jobs.scripts import refuse_absent

    config = project(place.bundle, place.asked)
    source = source_of(options, config, batch=flags.batch)
    made = bundle_of(config, place.bundle, console, place.asked)
    prepared = prepare(config, options, made, action=action, source=source)
    for note in prepared.notes:
        console.note(note)
    if action == "run":
        refuse_absent(prepared.job.launch.command[0], prepared.bundle)
    job = replace(numbered(prepared.job), show_all=console.verbose)
    prepared = replace(prepared, job=job)
    store = Store(offline_root(config))
    known = history.known(store)
    if known.jobs:
        prepared = replace(prepared, job=replace(prepared.job, rates=known.rates))
    console.job(prepared.job, prepared.bundle)
    outcome = Outcome(job=prepared.job, bundle=prepared.bundle)
    with history.kept(store, console.event) as listen:
        if source == "sbatch":
            _submit(console, prepared, outcome, flags, listen)
            return outcome
        how = way(prepared, os.environ)
        if flags.dry_run and how.asks_slurm:
            _planned(console, prepared, how.argv)
        if how.asks_slurm:
            _refuse_impossible(prepared)
        carry_out(outcome, prepared.config, how, listen, console.talk)
    return outcome


def _planned(console: Console, prepared: Prepared, argv: tuple[str, ...]) -> None:
    """Say what would be asked of Slurm, and how long it would take; and end the command."""
    from ..forecast.estimate import expected
    from ..jobs.prepare import dry_run_report

    report = {**dry_run_report(prepared, argv), "forecast": expected(prepared)}
    if console.as_json:
        console.emit(report)
    else:
        console.planned(report)
    raise typer.Exit


def _refuse_impossible(prepared: Prepared) -> None:
    """End the command where Slurm would let the job wait for nodes that there are none of."""
    from ..slurm.capacity import refuse_impossible
    from ..slurm.request import request
    from ..slurm.script import submit_environment

    asked = request(prepared.config, os.environ)
    refuse_impossible(prepared.config, asked, submit_environment(os.environ))


def _submit(
    console: Console, prepared: Prepared, outcome: Outcome, flags: BatchFlags, listen: OnEvent
) -> None:
    """Submit a batch job; without ``--wait`` that is all, and ends the command."""
    from ..jobs.batch import follow, script_of, submit

    submission = script_of(prepared, os.environ)
    if flags.dry_run:
        _planned(console, prepared, submission.argv)
    _refuse_impossible(prepared)
    submitted = submit(submission, listen)
    report = submitted.to_json(prepared.job)
    console.submitted(report)
    if not flags.wait:
        if console.as_json:
            console.emit(report)
        else:
            console.data(submitted.job_id)
        raise typer.Exit
    follow(submitted, outcome, listen, console.note)
