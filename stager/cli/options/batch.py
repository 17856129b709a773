"""Submitting a job, and the batch script it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import typer

DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be done; do nothing.")]


@dataclass(frozen=True, kw_only=True)
class BatchFlags:
    """Submitting a job, waiting for it, or only planning it; and what hears of its failure."""

    panel: ClassVar[str] = "Batch jobs and failures"

    batch: Annotated[bool, typer.Option("--batch", help="Submit with sbatch.")] = False
    wait: Annotated[
        bool, typer.Option("--wait", help="With --batch: follow the job to its end.")
    ] = False
    dry_run: DryRun = False
    on_failure: Annotated[
        str | None,
        typer.Option(
            "--on-failure", metavar="CMD", help="Start CMD if the job fails; it reads JSON."
        ),
    ] = None

    def check(self) -> None:
        """Refuse ``--wait`` alone: a job that is not submitted is always waited for."""
        if self.wait and not self.batch:
            raise typer.BadParameter("it needs --batch", param_hint="--wait")


@dataclass(frozen=True, kw_only=True)
class ScriptFlags:
    """The kind of batch script that is printed."""

    panel: ClassVar[str] = "The script"

    requeue: Annotated[
        bool,
        typer.Option("--requeue", help="Requeue at the time limit; resume from a checkpoint."),
    ] = False
    embed: Annotated[
        bool | None,
        typer.Option(
            "--embed/--no-embed",
            show_default=False,
            help="Put the node program into the script (460 kB), or take it from the bundle, which"
            " nodes must see. Default: from a bundle on a shared file system.",
        ),
    ] = None
