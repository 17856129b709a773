"""Build, verify, run and clean, for the command line and :mod:`stager.api`.

Nothing here prints or exits: progress goes to a listener. Each function imports what it composes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from bundle.protocol.counts import format_count
from bundle.protocol.dataclass import dataclass
from bundle.protocol.enumerations import Action

from .building.current_bundle import Listener, offline_root
from .config.load import Config
from .core.errors import StagerError
from .core.store import Store

if TYPE_CHECKING:
    from bundle.protocol.events import Record

    from .building.build import BuildOptions, BuildResult
    from .building.project_lock import LockResult
    from .cleanup import CleanedItem, CleanResult
    from .config.job_settings import JobOptions
    from .forecast import KnownRates, PlannedJob
    from .jobs.driver import JobListener, OnEvent
    from .jobs.outcome import Outcome, SubmittedJob
    from .jobs.preparation import Prepared
    from .tracing import TracedBuildResult


@dataclass(frozen=True, kw_only=True)
class CleanOptions:
    """Options of a removal."""

    job: JobOptions | None = None  # of the job that cleans the nodes; None for the defaults
    nodes: bool = True
    store: bool = True
    everything: bool = False  # each project's newest bundle, too; what is in use stays
    wheels: bool = False  # wheels that no lock names, too
    dry_run: bool = False


def build(config: Config, options: BuildOptions, listener: Listener) -> BuildResult:
    """Make the project's bundle; ``stager.building.build`` has the stages."""
    from .building import build as building
    from .pack.bundle_file import ChosenBundle
    from .pack.members import copy_to, refuse_in_project
    from .trust import copy_signature, sign

    if options.output is not None:
        refuse_in_project(options.output, config.project.path)
    built = building.build(config, _add_driver_lookup(config, options), listener)
    packed, signature = built.packed, None
    if options.sign is not None:
        listener.begin("sign")
        chosen = ChosenBundle(path=packed.path, id=packed.manifest.id)
        signature = sign(chosen, options.sign, listener.note).signature
    copy = copy_to(packed.path, options.output) if options.output is not None else None
    if copy is not None and signature is not None:
        copy_signature(signature, copy)
    return replace(building.build_result(built, copy), signature=signature)


def build_traced(
    config: Config, options: BuildOptions, command: Sequence[str], listener: JobListener
) -> TracedBuildResult:
    """Make the project's bundle, and run a smoke test in it to see what it reads."""
    from .pack.bundle_file import ChosenBundle
    from .tracing import TracedBuildResult, trace

    result = build(config, options, listener)
    traced = trace(config, ChosenBundle(path=result.bundle, id=result.id), command, listener)
    return TracedBuildResult(**vars(result), trace=traced)


def lock(config: Config, options: BuildOptions, listener: Listener) -> LockResult:
    """Make the project's lock anew."""
    from .building.project_lock import lock_project

    return lock_project(config, _add_driver_lookup(config, options), listener)


def _add_driver_lookup(config: Config, options: BuildOptions) -> BuildOptions:
    if config.environment.torch_backend != "auto" or options.driver is not None:
        return options
    from .jobs.nvidia_driver import find_driver

    return replace(options, driver=partial(find_driver, config.name))


def run_job(
    config: Config, options: JobOptions, action: Action, listener: JobListener
) -> Outcome | SubmittedJob | PlannedJob:
    """Take a job from its options to its end: bundle, preparation, nodes, driver.

    Return the number of a batch job that is not followed, and of a dry run what it would ask Slurm.
    """
    from . import forecast
    from .incidents import bad_nodes
    from .jobs.driver import run_driver
    from .jobs.outcome import Outcome
    from .jobs.preparation import choose_source, get_current_bundle, make_driver_start, prepare
    from .pack.bundle_file import mark

    source = choose_source(options, config, batch=options.batch)
    bundle = get_current_bundle(config, options.bundle, listener, options.bundle_id)
    prepared = prepare(config, options, bundle, action=action, source=source)
    store = Store(offline_root(config))
    on_event: OnEvent = listener.event
    if source != "local":
        failed = bad_nodes.find_failed_nodes(store)
        prepared = bad_nodes.exclude_bad_nodes(prepared, failed, listener)
        on_event = bad_nodes.point_out_bad_nodes(on_event, failed, prepared, listener)
    prepared = _announce(prepared, forecast.find_known_rates(store), listener)
    with forecast.keep_times(store, on_event) as listen:
        if source == "sbatch":
            return _submit(prepared, options, listener, listen)
        start = make_driver_start(prepared, os.environ)
        if start.argv:
            if options.dry_run:
                return forecast.plan_job(prepared, start.argv)
            _refuse_impossible(prepared)
        outcome = Outcome(job=prepared.job, bundle=prepared.bundle)
        run_driver(outcome, prepared.config, start, listen, listener.talk)
        bad_nodes.remember_bad_nodes(store, outcome)
        if outcome.result is not None and outcome.result.failures:
            mark(store, prepared.bundle)  # for a replay, when the project has changed
        return outcome


def _announce(prepared: Prepared, basis: KnownRates, listener: JobListener) -> Prepared:
    from .jobs.job_description import assign_number

    for note in prepared.notes:
        listener.note(note)
    job = assign_number(prepared.job)
    if basis.jobs:
        job = replace(job, rates=basis.rates)
    listener.job(job, prepared.bundle)
    return prepared._replace(job=job)


def _submit(
    prepared: Prepared, options: JobOptions, listener: JobListener, listen: OnEvent
) -> Outcome | SubmittedJob | PlannedJob:
    from .forecast import plan_job
    from .incidents import bad_nodes
    from .jobs.batch import follow, make_submission, submit
    from .jobs.outcome import Outcome, make_submitted_job

    submission = make_submission(prepared, os.environ)
    if options.dry_run:
        return plan_job(prepared, submission.argv)
    _refuse_impossible(prepared)
    # Its user's figures of earlier jobs are looked at before the job can write any.
    outcome = Outcome(job=prepared.job, bundle=prepared.bundle)
    accepted = submit(submission, listen, Path(prepared.job.log_dir))
    store = Store(offline_root(prepared.config))
    bad_nodes.expect_job(store, prepared, accepted.job_id)
    submitted = make_submitted_job(prepared.job, accepted.job_id)
    listener.submitted(submitted)
    if not options.wait:
        return submitted
    follow(accepted, outcome, listen, listener.note, all_nodes=options.show_all)
    bad_nodes.remember_bad_nodes(store, outcome)
    return outcome


def _refuse_impossible(prepared: Prepared) -> None:
    """Refuse a job for which the cluster has no such nodes: it would wait forever."""
    from .slurm.batch_script import make_submit_environment
    from .slurm.request import make_request, refuse_impossible

    asked = make_request(prepared.config, os.environ)
    refuse_impossible(asked, make_submit_environment(os.environ))


def clean(config: Config, options: CleanOptions, listener: JobListener) -> CleanResult:
    """Remove what nobody uses any more from the nodes and the offline root."""
    from .cleanup import make_clean_result
    from .config.job_settings import JobOptions

    job = replace(options.job or JobOptions(), dry_run=options.dry_run)
    items: list[CleanedItem] = []
    outcome, failure, skipped = None, None, _explain_skipped_nodes(config, options, job)
    if options.nodes and skipped is None:
        try:
            outcome, items = _clean_nodes(config, job, options.everything, listener)
        except StagerError as exc:
            failure = exc
    if options.store:  # that needs no nodes
        items += _clean_store(config, options, listener)
    if failure is not None:
        if items and not options.dry_run:
            listener.note(f"removed from the offline root: {format_count(len(items), 'item')}")
        raise failure
    if skipped is not None:
        listener.warn(f"the nodes were not cleaned: {skipped}")
    return make_clean_result(items, outcome, skipped, dry_run=options.dry_run)


def _explain_skipped_nodes(config: Config, options: CleanOptions, job: JobOptions) -> str | None:
    """Return the reason to leave out nodes that cannot be cleaned from here, and were not named."""
    from .jobs.preparation import choose_source, get_named_bundle
    from .trust import decide_trust

    is_named = job.bundle is not None or job.bundle_id or job.allocation != "auto"
    if is_named or not (options.nodes and options.store):
        return None
    try:
        choose_source(job, config, batch=False)
        path, manifest = get_named_bundle(config, None)
        decide_trust(config, Store(offline_root(config)), path, manifest.id)
    except StagerError as exc:
        return f"{exc.message}; {exc.hint}" if exc.hint else exc.message
    return None


def _clean_nodes(
    config: Config, options: JobOptions, everything: bool, listener: JobListener
) -> tuple[Outcome | None, list[CleanedItem]]:
    """Clean an allocation's nodes; there is no job where a dry run would have to ask for nodes."""
    from bundle.protocol.messages import CleanAnswer

    from .cleanup import has_environment, list_kept_environments, list_removed_on_node
    from .jobs.driver import run_driver
    from .jobs.job_description import assign_number
    from .jobs.outcome import Outcome
    from .jobs.preparation import choose_source, get_named_bundle, make_driver_start, prepare

    source = choose_source(options, config, batch=False)
    path, manifest = get_named_bundle(config, options.bundle, options.bundle_id)
    if source == "salloc" and not config.cluster.nodelist:
        options = _choose_used_nodes(options, listener)
    prepared = prepare(config, options, (path, manifest), action=Action.CLEAN, source=source)
    start = make_driver_start(prepared, os.environ)
    if options.dry_run and start.argv:
        listener.note("the nodes were not examined: a dry run asks Slurm for nothing")
        return None, []
    store = Store(offline_root(config))
    keep = list_kept_environments(store, manifest.id, everything=everything)
    outcome = Outcome(job=replace(assign_number(prepared.job), keep=tuple(keep)), bundle=path)
    items: list[CleanedItem] = []
    keeping: set[str] = set()

    def listen(record: Record) -> None:
        if isinstance(record.event, CleanAnswer):
            if keep and has_environment(record.event, manifest.id):
                keeping.add(record.event.node)
            items.extend(list_removed_on_node(record.event))
        listener.event(record)

    listener.job(outcome.job, path)
    run_driver(outcome, prepared.config, start, listen, listener.talk)
    if keeping:
        nodes = format_count(len(keeping), "node")
        listener.note(f"kept on {nodes}: the environment of {path.name}; --all removes it, too")
    return outcome, items


def _choose_used_nodes(options: JobOptions, listener: JobListener) -> JobOptions:
    from .cleanup import choose_nodes, find_used_nodes
    from .logs.job_files import choose_log_dir
    from .slurm.request import query_nodes

    used = find_used_nodes(choose_log_dir(options.log_dir))
    options, notes = choose_nodes(options, used, query_nodes() or ())
    for note in notes:
        listener.note(note)
    return options


def _clean_store(config: Config, options: CleanOptions, listener: JobListener) -> list[CleanedItem]:
    from .cleanup import Rules, apply, plan
    from .incidents.pending_jobs import settle_notes
    from .pack.bundle_file import list_marked

    store = Store(offline_root(config))
    settle_notes(store, time.time())
    keep_newest, projects = not options.everything, (config.root,)
    rules = Rules(keep_newest=keep_newest, wheels=options.wheels, projects=projects)
    if options.dry_run:
        items = plan(store, rules, time.time())
    else:
        waiting = partial(listener.note, "waiting for a build that is under way")
        items, left = apply(store, rules, time.time(), waiting)
        for item, why in left:
            listener.note(f"{item.path} could not be removed: {why}")
    named = list_marked(store, time.time(), by_jobs=options.everything)
    if named:
        who = "batch scripts name or replays may need; --all removes them"
        who = "jobs in the queue use" if options.everything else who
        listener.note(f"kept: {format_count(len(named), 'bundle')} that {who}")
    return items
