"""``stager mirror``: a folder of wheels with an index, for pip and uv inside an air gap."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .grouped import grouped
from .options.lock import Offline
from .options.output import Talk
from .options.values import each, path_option
from .program import app, boundary
from .settings_place import settings_place

if TYPE_CHECKING:
    from ..carrying.mirror import MirrorTargets
    from ..config.load import Config


@dataclass(frozen=True, kw_only=True)
class TargetFlags:
    """The Pythons and platforms that there are to be wheels for."""

    python: Annotated[
        list[str] | None,
        typer.Option(
            "--python", metavar="VERSION", help="Wheels for this Python, as in 3.12; repeatable."
        ),
    ] = None
    platform: Annotated[
        list[str] | None,
        typer.Option(
            "--platform",
            metavar="TAG",
            help="Wheels for this platform, as in manylinux_2_28_aarch64; repeatable.",
        ),
    ] = None

    def targets(self) -> MirrorTargets:
        """Return the targets; a value that cannot be used is a usage error."""
        from ..carrying.mirror import MirrorTargets
        from ..config.sections import PLATFORM, PLATFORMS, VERSION, VERSIONS

        return MirrorTargets(
            pythons=each(VERSION, self.python, "--python", VERSIONS),
            platforms=each(PLATFORM, self.platform, "--platform", PLATFORMS),
        )


@app.command()
@grouped
def mirror(
    *,
    folder: Annotated[
        Path,
        typer.Argument(metavar="DIR", parser=path_option, help="The folder; made if need be."),
    ],
    requirements: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[REQUIREMENT ...]",
            help="What to add, with all that it needs: packages or requirement files; "
            "default: the project's lock.",
        ),
    ] = None,
    targets: TargetFlags,
    offline: Offline = False,
    talk: Talk,
) -> None:
    """Keep a folder of wheels with an index for pip and uv."""
    from ..carrying.mirror import MirrorRequest, mirror_wheels
    from ..core.files import expanded

    wanted = MirrorRequest(
        requirements=tuple(requirements or ()), targets=targets.targets(), offline=offline
    )
    console = talk.reports()
    with boundary(console):
        config = _settings(alone=bool(requirements))
        result = mirror_wheels(config, expanded(folder).absolute(), wanted, console)
        console.stop()
        if talk.json:
            console.emit(result)
        console.mirrored(result)


def _settings(*, alone: bool) -> Config:
    from ..config.load import find, load
    from ..config.template import default

    place = settings_place()
    return default(place) if alone and find(place) is None else load(place)
