"""The bundle that a command uses, and the place of the nodes it is put on."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from .values import choice, path_option

Bundle = Annotated[
    Path | None,
    typer.Option(
        "--bundle",
        metavar="FILE",
        parser=path_option,
        help="The bundle; default: the project's newest.",
    ),
]
BundleId = Annotated[
    str | None,
    typer.Option(
        "--id", metavar="ID", help="The id the bundle must have, or 12 or more of its first digits."
    ),
]
Allocation = Annotated[
    str,
    choice(
        ("auto", "slurm", "ssh", "local"),
        "Where nodes come from; local: processes on this machine.",
    ),
]


@dataclass(frozen=True, kw_only=True)
class BundleFlags:
    """The bundle that is used."""

    panel: ClassVar[str] = "The bundle and where it goes"

    bundle: Bundle = None
    id: BundleId = None

    @property
    def asked(self) -> str:
        """The id that the bundle must have, or its first digits; empty for any."""
        return bundle_id(self.id, "--id")


@dataclass(frozen=True, kw_only=True)
class PlaceFlags(BundleFlags):
    """The bundle, and the nodes it is put on."""

    allocation: Allocation = "auto"
    hosts: Annotated[
        str | None,
        typer.Option(
            "--hosts", metavar="HOSTS", help="Hosts to reach over ssh, as in node[01-08],user@gpu9."
        ),
    ] = None
    host_file: Annotated[
        Path | None,
        typer.Option(
            "--host-file",
            metavar="FILE",
            parser=path_option,
            help="A file with one such host in each line.",
        ),
    ] = None


def bundle_id(text: str | None, option: str) -> str:
    """Return an id or its first digits, in lower case; empty for none; else a usage error.

    Other tools write the kind of a digest before it, ``sha256:``.
    """
    if text is None:
        return ""
    digits = text.lower().removeprefix("sha256:")
    if not re.fullmatch(r"[0-9a-f]{12,64}", digits):
        raise typer.BadParameter(
            f"{text!r} cannot be used, allowed: 12 to 64 hexadecimal digits, as `stager verify` "
            "and `stager inspect` show them",
            param_hint=option,
        )
    return digits
