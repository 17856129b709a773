"""``stager clean-node``: remove from this machine what nobody has used for days."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .grouped import grouped
from .options.batch import DryRun
from .options.output import Talk
from .options.values import path_option
from .program import app, boundary


@app.command("clean-node")
@grouped
def clean_node(
    *,
    bases: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[DIR]...",
            parser=path_option,
            help="Where node roots lie. Default: $SLURM_TMPDIR, $TMPDIR, /tmp and /dev/shm.",
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
            help="GB that the environments of a user may have; those not used for longest go.",
        ),
    ] = None,
    dry_run: DryRun = False,
    talk: Talk,
) -> None:
    """Remove environments from this machine that nobody has used for days.

    For an epilog of Slurm's: it needs no bundle, no settings and no allocation. Root cleans the
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
            console.node_cleaned(result)
        raise typer.Exit(0 if result.ok else 1)
