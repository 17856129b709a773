"""``estimate``, ``nodes``, ``clean`` and ``clean-node``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from time import time
from typing import Annotated

import typer

from ..config.job_settings import BUNDLE, SLURM, JobOptions
from .application import app, get_settings_place, option, path_option, refuse_together
from .options import (
    BundleChoice,
    DryRun,
    JobFlags,
    JobTalk,
    LogDir,
    Talk,
    read_option,
    typer_option,
)


@app.command()
@app.command("plan", hidden=True)  # its former name, for scripts that use it
def estimate(
    *,
    nodes: Annotated[
        list[str] | None, option("--nodes N,...", "Numbers of nodes, as in 2,16,64.")
    ] = None,
    nproc_per_node: Annotated[str | None, typer_option("nproc_per_node")] = None,
    chosen: BundleChoice,
    console: Talk,
) -> None:
    """Predict how long staging takes, and whether it pays."""
    from .. import forecast
    from ..building.current_bundle import offline_root
    from ..core.store import Store
    from ..jobs.job_description import apply_options
    from ..jobs.preparation import get_named_bundle, load_project

    counts, asked = _read_node_counts(nodes, forecast.MOST_NODES), chosen.bundle_id
    ranks = None if nproc_per_node is None else read_option("nproc_per_node", nproc_per_node)
    options = JobOptions(nproc_per_node=ranks)
    config = apply_options(load_project(chosen.bundle, asked, get_settings_place()), options)
    path, manifest = get_named_bundle(config, chosen.bundle, asked)
    basis = forecast.find_known_rates(Store(offline_root(config)))
    setting = forecast.make_setting(config, path, manifest, basis)
    result = forecast.estimate(setting, counts or (config.cluster.nodes[1],))
    console.show(result, console.show_estimate)


def _read_node_counts(texts: list[str] | None, most: int) -> tuple[int, ...]:
    """Return numbers of nodes, each once, the fewest first; another value is a usage error."""
    words = [word.strip() for text in texts or () for word in text.split(",")]
    for word in words:
        if not (word.isascii() and word.isdigit() and 1 <= int(word) <= most):
            raise typer.BadParameter(
                f"{word!r} cannot be used, allowed: 1 to {most}, as in 1,8,64", param_hint="--nodes"
            )
    return tuple(sorted({int(word) for word in words}))


MOST_DAYS = 90


@app.command()
def nodes(
    *,
    days: Annotated[int, option("--days N", "How many days count.", min=1, max=MOST_DAYS)] = 7,
    forget: Annotated[
        list[str] | None, option("--forget NODES", "Forget the failures of NODES.")
    ] = None,
    console: Talk,
) -> None:
    """List the nodes that failed lately, and why."""
    from ..building.current_bundle import offline_root
    from ..config.template import load_or_default
    from ..core.store import Store
    from ..incidents import node_history
    from ..incidents.pending_jobs import settle_notes

    names = _read_node_names(forget)
    store = Store(offline_root(load_or_default(get_settings_place())))
    now = time()
    settle_notes(store, now)
    forgotten = node_history.forget_nodes(store, names, now) if names else None
    histories = node_history.list_histories(node_history.read_incidents(store, days, now))
    result = node_history.NodesResult(days=days, nodes=histories, forgotten=forgotten)
    console.show(result, console.show_failed_nodes)


def _read_node_names(texts: list[str] | None) -> frozenset[str]:
    from bundle.protocol.problem import NodeError
    from bundle.system.hostlist import expand_hostlist

    names: set[str] = set()
    for text in texts or ():
        try:
            names.update(expand_hostlist(text))
        except NodeError as exc:
            raise typer.BadParameter(exc.problem.sentence, param_hint="--forget") from None
    return frozenset(names)


_ALL_HELP = "Remove every project's newest bundle as well, and those that batch scripts name."


@app.command()
def clean(
    *,
    nodes_only: Annotated[bool, option("--nodes-only", "Leave the offline root alone.")] = False,
    store_only: Annotated[bool, option("--store-only", "Leave the nodes alone.")] = False,
    everything: Annotated[bool, option("--all", _ALL_HELP)] = False,
    wheels: Annotated[bool, option("--wheels", "Remove wheels that no lock names, too.")] = False,
    dry_run: DryRun = False,
    job: Annotated[JobOptions, JobFlags(BUNDLE, SLURM, without=["avoid_bad"])],
    log_dir: LogDir = None,
    console: JobTalk,
) -> None:
    """Remove environments, bundles and layers that nobody uses."""
    from .. import pipeline
    from ..config.template import load_or_default
    from ..jobs.preparation import load_project

    refuse_together(nodes_only=nodes_only, store_only=store_only)
    options = pipeline.CleanOptions(
        nodes=not store_only,
        store=not nodes_only,
        everything=everything,
        wheels=wheels,
        dry_run=dry_run,
        job=replace(job, log_dir=log_dir),
    )
    start = get_settings_place()
    if store_only:
        config = load_or_default(start)
    else:
        config = load_project(job.bundle, job.bundle_id, start)
    result = pipeline.clean(config, options, console)
    code = console.show_cleaned_nodes(result)
    console.show(result, console.show_clean)
    raise typer.Exit(code)


_MAX_GB_HELP = "GB that a user's environments may have; the least recently used go first."


@app.command("clean-node")
def clean_node(
    *,
    bases: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[DIR]...",
            parser=path_option,
            help="Directories that hold node roots. Default: $SLURM_TMPDIR, $TMPDIR, /tmp and "
            "/dev/shm.",
        ),
    ] = None,
    days: Annotated[
        float, option("--days N", "Days that an unused environment stays.", min=0)
    ] = 7.0,
    max_gb: Annotated[float | None, option("--max-gb N", _MAX_GB_HELP, min=0)] = None,
    dry_run: DryRun = False,
    console: Talk,
) -> None:
    """Remove environments that are unused for N days from this machine.

    For Slurm's epilog: it needs no bundle, no settings and no allocation. Root cleans the
    environments of all users, others their own.
    """
    from bundle.environment import clean

    from ..cleanup import CleanNodeResult

    limits = clean.Retention(days, None if max_gb is None else int(max_gb * 1e9))
    roots = tuple(clean.clean_node([str(base) for base in bases or ()], limits, dry_run))
    is_ok, freed = not any(root.problems for root in roots), sum(root.freed for root in roots)
    result = CleanNodeResult(ok=is_ok, dry_run=dry_run, roots=roots, bytes=freed)
    console.show(result, console.show_clean_node)
    raise typer.Exit(0 if result.ok else 1)
