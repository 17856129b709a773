"""The part that ``verify`` and ``run`` share: from the options of a job to its outcome."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING

import typer

from bundle.protocol.words import Action

from .options import BatchFlags, PlaceFlags

if TYPE_CHECKING:
    from ..console import Console
    from ..forecast.history import Basis
    from ..jobs.driver import OnEvent
    from ..jobs.job import JobOptions
    from ..jobs.prepare import Prepared
    from ..jobs.result import Outcome


def remember_refusal(options: JobOptions, command: str) -> AbstractContextManager[None]:
    """Let ``diagnose`` know of a command that fails before its job begins."""
    from ..logs.files import default_folder
    from ..logs.refused import remembered

    return remembered(default_folder(options.log_dir), command)


def run_job(
    console: Console, place: PlaceFlags, options: JobOptions, action: Action, flags: BatchFlags
) -> Outcome:
    """Return the outcome of a job; one that is only planned or submitted ends the command here."""
    from ..building.current_bundle import offline_root
    from ..core.store import Store
    from ..forecast import history
    from ..jobs.driver import carry_out
    from ..jobs.prepare import bundle_of, prepare, project, source_of, way
    from ..jobs.result import Outcome

    config = project(place.bundle, place.asked)
    source = source_of(options, config, batch=flags.batch)
    bundle = bundle_of(config, place.bundle, console, place.asked)
    prepared = prepare(config, options, bundle, action=action, source=source)
    store = Store(offline_root(config))
    prepared = _announced(console, prepared, history.known(store))
    outcome = Outcome(job=prepared.job, bundle=prepared.bundle)
    with history.kept(store, console.event) as listen:
        if source == "sbatch":
            _submit(console, prepared, outcome, flags, listen)
            return outcome
        driver = way(prepared, os.environ)
        if driver.asks_slurm:
            if flags.dry_run:
                _show_plan(console, prepared, driver.argv)
            _refuse_impossible(prepared)
        carry_out(outcome, prepared.config, driver, listen, console.talk)
    return outcome


def _announced(console: Console, prepared: Prepared, basis: Basis) -> Prepared:
    """Give the job its number and rates, and say what is about to happen."""
    from ..jobs.job import numbered
    from ..jobs.scripts import refuse_absent

    for note in prepared.notes:
        console.note(note)
    if prepared.job.action is Action.RUN:
        refuse_absent(prepared.job.launch.command[0], prepared.bundle)
    job = replace(numbered(prepared.job), show_all=console.verbose)
    if basis.jobs:
        job = replace(job, rates=basis.rates)
    console.job(job, prepared.bundle)
    return replace(prepared, job=job)


def _show_plan(console: Console, prepared: Prepared, argv: tuple[str, ...]) -> None:
    """Show what Slurm would be asked for and how long the job would take, and end the command."""
    from ..forecast.estimate import expected
    from ..jobs.prepare import dry_run_report

    report = {**dry_run_report(prepared, argv), "forecast": expected(prepared)}
    if console.as_json:
        console.emit(report)
    else:
        console.planned(report)
    raise typer.Exit


def _refuse_impossible(prepared: Prepared) -> None:
    """End the command where the cluster has no such nodes: the job would wait for ever."""
    from ..slurm.capacity import refuse_impossible
    from ..slurm.request import request
    from ..slurm.script import submit_environment

    asked = request(prepared.config, os.environ)
    refuse_impossible(prepared.config, asked, submit_environment(os.environ))


def _submit(
    console: Console, prepared: Prepared, outcome: Outcome, flags: BatchFlags, listen: OnEvent
) -> None:
    """Submit a batch job; without ``--wait`` that ends the command."""
    from ..jobs.batch import follow, script_of, submit

    submission = script_of(prepared, os.environ)
    if flags.dry_run:
        _show_plan(console, prepared, submission.argv)
    _refuse_impossible(prepared)
    submitted = submit(submission, listen)
    report = submitted.to_json(prepared.job)
    console.submitted(report)
    if flags.wait:
        follow(submitted, outcome, listen, console.note)
        return
    if console.as_json:
        console.emit(report)
    else:
        console.data(submitted.job_id)
    raise typer.Exit
