"""The pinning of the requirements: the options of ``lock`` and ``build``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from ..settings_place import settings_place
from .values import choice, one_of, path_option

if TYPE_CHECKING:
    from ...building.build import BuildOptions
    from ...config.load import Config
    from ...lock.resolver import ResolverName

RESOLVERS = ("auto", "uv", "pip-tools")
Resolver = Annotated[str, choice(RESOLVERS, "What pins the requirements; auto is uv.")]
Offline = Annotated[bool, typer.Option("--offline", help="Fetch nothing.")]
Script = Annotated[
    Path | None,
    typer.Argument(
        metavar="[SCRIPT]",
        parser=path_option,
        help="A script that says itself what it needs (PEP 723); default: the project.",
    ),
]


def settings_for(script: Path | None) -> Config:
    """Return the settings of a script, or of this directory's project."""
    from ...config.inline_script import load_script
    from ...config.load import load

    return load(settings_place()) if script is None else load_script(script)


@dataclass(frozen=True, kw_only=True)
class ResolveFlags:
    """The way requirements are resolved, and the pins of the old lock that are kept."""

    resolver: Resolver = "uv"
    offline: Offline = False
    upgrade: Annotated[
        bool, typer.Option("--upgrade", "-U", help="Take the newest versions; keep no pin.")
    ] = False
    upgrade_package: Annotated[
        list[str] | None,
        typer.Option(
            "--upgrade-package",
            "-P",
            metavar="NAME",
            help="Do not keep this package's pin, or this model's commit.",
        ),
    ] = None
    exclude_newer: Annotated[
        str | None,
        typer.Option(
            "--exclude-newer",
            metavar="DATE",
            help="Ignore files uploaded after DATE. The lock keeps it; none lifts it.",
        ),
    ] = None

    def options(self, options: BuildOptions) -> BuildOptions:
        """Return these options in those of a build; values that cannot be used are usage errors."""
        upgraded = tuple(self.upgrade_package or ())
        for name in upgraded:
            if not _is_name(name):
                raise typer.BadParameter(
                    f"{name!r} is not the name of a package, a model or a data set",
                    param_hint="--upgrade-package",
                )
        if options.locked and (self.upgrade or upgraded):
            raise typer.BadParameter(
                "cannot be used with --locked, which takes the lock as it is",
                param_hint="--upgrade" if self.upgrade else "--upgrade-package",
            )
        return replace(
            options,
            resolver=resolver_name(self.resolver),
            offline=self.offline,
            upgrade=self.upgrade,
            upgrade_packages=upgraded,
            exclude_newer=_cutoff(self.exclude_newer),
        )


def _is_name(text: str) -> bool:
    from packaging.utils import InvalidName, canonicalize_name

    from ...hub.repositories import parse_request

    try:
        canonicalize_name(text, validate=True)
    except InvalidName:
        try:
            parse_request("model", text)
        except ValueError:
            return False
    return True


def _cutoff(text: str | None) -> str | None:
    from ...lock import resolver

    if text is None:
        return None
    try:
        return resolver.checked(text)
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} cannot be used, allowed: {resolver.ALLOWED}", param_hint="--exclude-newer"
        ) from None


def resolver_name(text: str) -> ResolverName:
    """Return a resolver's name, checked."""
    return cast("ResolverName", one_of(RESOLVERS, text, "--resolver"))
