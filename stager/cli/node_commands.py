"""``estimate``, ``nodes``, ``clean`` and ``clean-node``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from time import time
from typing import TYPE_CHECKING, Annotated

import typer

from ..config.job_settings import BUNDLE, SLURM, JobOptions
from .application import app, boundary, expand_groups, get_settings_place, path_option
from .options import (
    BundleChoice,
    DryRun,
    JobFlags,
    LogDir,
    Talk,
    read_option,
    typer_option,
)

if TYPE_CHECKING:
    from ..config.load import Config
    from ..pipeline import CleanOptions


# --- ``stager estimate``: predict how long staging takes, and whether it pays --------------------


@app.command()
@app.command("plan", hidden=True)  # its former name, for scripts that use it
@expand_groups
def estimate(
    *,
    nodes: Annotated[
        list[str] | None,
        typer.Option("--nodes", metavar="N,...", help="Numbers of nodes, as in 2,16,64."),
    ] = None,
    nproc_per_node: Annotated[str | None, typer_option("nproc_per_node")] = None,
    chosen: BundleChoice,
    talk: Talk,
) -> None:
    """Predict how long staging takes, and whether it pays."""
    from .. import forecast
    from ..building.current_bundle import offline_root
    from ..core.store import Store
    from ..forecast import MOST_NODES, make_setting
    from ..forecast import estimate as make_estimate
    from ..jobs.job_description import apply_options
    from ..jobs.preparation import get_named_bundle, load_project

    counts, asked = node_counts(nodes, MOST_NODES), chosen.bundle_id
    ranks = None if nproc_per_node is None else read_option("nproc_per_node", nproc_per_node)
    console = talk.reports()
    with boundary(console):
        options = JobOptions(nproc_per_node=ranks)
        config = apply_options(load_project(chosen.bundle, asked, get_settings_place()), options)
        path, manifest = get_named_bundle(config, chosen.bundle, asked)
        basis = forecast.find_known_rates(Store(offline_root(config)))
        setting = make_setting(config, path, manifest, basis)
        result = make_estimate(setting, counts or (config.cluster.nodes[1],))
        if talk.json:
            console.emit(result)
        else:
            console.show_estimate(result)


def node_counts(texts: list[str] | None, most: int) -> tuple[int, ...]:
    """Return numbers of nodes, each once, the fewest first; another value is a usage error."""
    words = [word.strip() for text in texts or () for word in text.split(",")]
    return tuple(sorted({_node_count(word, most) for word in words}))


def _node_count(word: str, most: int) -> int:
    count = int(word) if word.isascii() and word.isdigit() else 0
    if not 1 <= count <= most:
        raise typer.BadParameter(
            f"{word!r} cannot be used, allowed: 1 to {most}, as in 1,8,64",
            param_hint="--nodes",
        )
    return count


# --- ``stager nodes``: list the nodes that failed lately, and forget those that were repaired ----

MOST_DAYS = 90


@app.command()
@expand_groups
def nodes(
    *,
    days: Annotated[
        int, typer.Option("--days", metavar="N", min=1, max=MOST_DAYS, help="How many days count.")
    ] = 7,
    forget: Annotated[
        list[str] | None,
        typer.Option("--forget", metavar="NODES", help="Forget the failures of NODES."),
    ] = None,
    talk: Talk,
) -> None:
    """List the nodes that failed lately, and why."""
    from ..building.current_bundle import offline_root
    from ..config.load import find, load
    from ..config.template import make_default_config
    from ..core.store import Store
    from ..incidents.node_history import (
        NodesResult,
        forget_nodes,
        list_histories,
        read_incidents,
    )
    from ..incidents.pending_jobs import settle_notes

    names = _node_names(forget)
    console = talk.reports()
    with boundary(console):
        here = get_settings_place()
        store = Store(offline_root(make_default_config(here) if find(here) is None else load(here)))
        now = time()
        settle_notes(store, now)
        forgotten = forget_nodes(store, names, now) if names else None
        histories = list_histories(read_incidents(store, days, now))
        result = NodesResult(days=days, nodes=histories, forgotten=forgotten)
        if talk.json:
            console.emit(result)
        else:
            console.failed_nodes(result)


def _node_names(texts: list[str] | None) -> frozenset[str]:
    from bundle.protocol.problem import NodeError
    from bundle.system.hostlist import expand_hostlist

    names: set[str] = set()
    for text in texts or ():
        try:
            names.update(expand_hostlist(text))
        except NodeError as exc:
            raise typer.BadParameter(exc.problem.sentence, param_hint="--forget") from None
    return frozenset(names)


# --- ``stager clean``: remove what nobody uses any more from the nodes and the offline root ------


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
@expand_groups
def clean(
    *,
    what: CleanFlags,
    job: Annotated[JobOptions, JobFlags(BUNDLE, SLURM, without=["avoid_bad"])],
    log_dir: LogDir = None,
    talk: Talk,
) -> None:
    """Remove environments, bundles and layers that nobody uses."""
    from .. import pipeline

    options = what.options(replace(job, log_dir=log_dir))
    console = talk.console()
    with boundary(console):
        config = _settings(what, job)
        result = pipeline.clean(config, options, console)
        code = console.show_cleaned_nodes(result)
        if talk.json:
            console.emit(result)
        else:
            console.show_clean(result)
        raise typer.Exit(code)


def _settings(what: CleanFlags, job: JobOptions) -> Config:
    from ..config.load import find
    from ..config.template import make_default_config
    from ..jobs.preparation import load_project

    start = get_settings_place()
    if what.store_only and find(start) is None:
        return make_default_config(start)
    return load_project(job.bundle, job.bundle_id, start)


# --- ``stager clean-node``: remove from this machine what nobody has used for days ---------------


@app.command("clean-node")
@expand_groups
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
        float,
        typer.Option("--days", metavar="N", min=0, help="Days that an unused environment stays."),
    ] = 7.0,
    max_gb: Annotated[
        float | None,
        typer.Option(
            "--max-gb",
            metavar="N",
            min=0,
            help="GB that a user's environments may have; the least recently used go first.",
        ),
    ] = None,
    dry_run: DryRun = False,
    talk: Talk,
) -> None:
    """Remove environments that are unused for N days from this machine.

    For Slurm's epilog: it needs no bundle, no settings and no allocation. Root cleans the
    environments of all users, others their own.
    """
    from bundle.environment.clean import Retention
    from bundle.environment.clean import clean_node as clean_here

    from ..cleanup import CleanNodeResult

    console = talk.reports()
    with boundary(console):
        limits = Retention(days, None if max_gb is None else int(max_gb * 1e9))
        roots = tuple(clean_here([str(base) for base in bases or ()], limits, dry_run))
        result = CleanNodeResult(
            ok=not any(root.problems for root in roots),
            dry_run=dry_run,
            roots=roots,
            bytes=sum(root.freed for root in roots),
        )
        if talk.json:
            console.emit(result)
        else:
            console.show_clean_node(result)
        raise typer.Exit(0 if result.ok else 1)
