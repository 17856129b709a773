"""The request to Slurm for nodes: the long and the short options are salloc's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import typer


@dataclass(frozen=True, kw_only=True)
class SlurmFlags:
    """The request to Slurm."""

    panel: ClassVar[str] = "Slurm"

    nodes: Annotated[
        str | None, typer.Option("-N", "--nodes", metavar="N|MIN:MAX", help="How many nodes.")
    ] = None
    partition: Annotated[
        str | None, typer.Option("-p", "--partition", metavar="NAME", help="Slurm partition.")
    ] = None
    time: Annotated[
        str | None,
        typer.Option("-t", "--time", metavar="TIME", help="Time limit, as in 00:30:00."),
    ] = None
    exclude: Annotated[
        str | None,
        typer.Option("-x", "--exclude", metavar="NODES", help="Nodes to avoid, as in n02,n05."),
    ] = None
    nodelist: Annotated[
        str | None,
        typer.Option("-w", "--nodelist", metavar="NODES", help="Nodes that must be among them."),
    ] = None
    account: Annotated[
        str | None, typer.Option("-A", "--account", metavar="NAME", help="Slurm account.")
    ] = None
    qos: Annotated[
        str | None, typer.Option("--qos", metavar="NAME", help="Quality of service.")
    ] = None
    constraint: Annotated[
        str | None,
        typer.Option("-C", "--constraint", metavar="LIST", help="Features that nodes must have."),
    ] = None
    reservation: Annotated[
        str | None, typer.Option("--reservation", metavar="NAME", help="Slurm reservation.")
    ] = None
    mem: Annotated[
        str | None, typer.Option("--mem", metavar="SIZE", help="Memory on each node, as in 64G.")
    ] = None
    cpus_per_task: Annotated[
        int | None,
        typer.Option("-c", "--cpus-per-task", metavar="N", help="CPUs on each node."),
    ] = None
    gpus_per_node: Annotated[
        str | None,
        typer.Option("--gpus-per-node", metavar="[TYPE:]N", help="GPUs on each node."),
    ] = None
    salloc_arg: Annotated[
        list[str] | None,
        typer.Option(
            "--salloc-arg", metavar="ARG", help="A further option, passed on; may be repeated."
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class RequestFlags(SlurmFlags):
    """The request to Slurm for nodes that a job runs on."""

    avoid_bad: Annotated[
        bool | None,
        typer.Option(
            "--avoid-bad/--no-avoid-bad",
            show_default=False,
            help="Also avoid nodes that failed lately; `stager nodes` lists them.",
        ),
    ] = None
