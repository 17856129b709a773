"""The staging of the bundle and the start of the ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import typer

from bundle.protocol.enumerations import Backend, Launcher, Stage, TransferWay

from .logs import LogDir
from .values import choice

NprocPerNode = Annotated[
    str | None,
    typer.Option("--nproc-per-node", metavar="N|auto|gpu|cpu", help="Ranks on each node."),
]
Command = Annotated[
    list[str] | None,
    typer.Argument(metavar="[-- COMMAND...]", help="A script or -m MODULE, and its arguments."),
]


@dataclass(frozen=True, kw_only=True)
class LaunchFlags:
    """The staging of the bundle and the start of the ranks."""

    panel: ClassVar[str] = "Staging and launching"

    nproc_per_node: NprocPerNode = None
    launcher: Annotated[str | None, choice(Launcher, "What starts the ranks.")] = None
    backend: Annotated[str | None, choice(Backend, "The backend of torch.distributed.")] = None
    interface: Annotated[
        str | None, typer.Option(metavar="NAME", help="auto, or a network interface's name.")
    ] = None
    stage: Annotated[
        str | None,
        choice(Stage, "Whether the bundle is sent."),
    ] = None
    transfer: Annotated[
        str | None,
        choice(TransferWay, "How the nodes get it."),
    ] = None
    min_nodes: Annotated[
        int | None,
        typer.Option("--min-nodes", metavar="N", min=1, help="Leave out bad nodes, but keep N."),
    ] = None
    log_dir: LogDir = None
    outputs: Annotated[
        list[str] | None,
        typer.Option(
            "--outputs",
            metavar="PATH",
            help="What to bring back where nodes do not see this folder; repeatable.",
        ),
    ] = None
    pass_env: Annotated[
        list[str] | None,
        typer.Option("--pass-env", metavar="NAME", help="A secret variable for the ranks."),
    ] = None
    container_image: Annotated[
        str | None,
        typer.Option(
            "--container-image",
            metavar="IMAGE",
            help="Image to run the ranks in: of pyxis, or a .sif or directory for Apptainer.",
        ),
    ] = None
    container_mounts: Annotated[
        list[str] | None,
        typer.Option("--container-mounts", metavar="SRC:DST", help="What the container sees."),
    ] = None
