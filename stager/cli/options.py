"""Options that commands share: a job's follow from the rows of the settings."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, cast

import typer
import typer.models

from bundle.protocol.counts import format_count

from ..config import checks
from ..config.job_settings import BUNDLE, JobOptions, SettingRow, list_option_rows
from .application import (
    get_settings_place,
    make_console,
    make_parameter,
    make_reports,
    path_flag,
    path_option,
)

if TYPE_CHECKING:
    from ..building.build import BuildOptions
    from ..config.load import Config
    from ..console.job_result import Console
    from ..console.reports import Reports
    from ..lock.resolver import ResolverName
    from ..logs.job_files import JobFiles

T = TypeVar("T")

# --- The amount and the form of a command's output, and the file that it writes ------------------


def file_option(help_text: str) -> typer.models.OptionInfo:
    """Return the option that names the file a command writes."""
    return path_flag("-o", "--output", metavar="FILE", help=help_text)


_TALK = {
    "quiet": typer.Option("-q", "--quiet", help="Print only errors and results."),
    "verbose": typer.Option("-v", "--verbose", help="Print what is done, and how."),
    "json": typer.Option("--json", help="Print one JSON object on standard output."),
}


class TalkFlags:
    """The amount and the form of a command's output, which is made of them."""

    def __init__(self, make: Callable[..., object], *names: str) -> None:
        self._make, self._names = make, names or tuple(_TALK)

    def parameters(self) -> list[inspect.Parameter]:
        """Return the options, as typer reads them from a signature."""
        return [make_parameter(name, False, Annotated[bool, _TALK[name]]) for name in self._names]

    def make(self, given: Mapping[str, object]) -> object:
        """Return the output of a command."""
        return self._make(**given)


if TYPE_CHECKING:
    JobTalk = Console
    Talk = Reports
    QuietTalk = Reports
    JsonTalk = Reports
else:
    JobTalk = Annotated[object, TalkFlags(make_console)]
    Talk = Annotated[object, TalkFlags(make_reports)]
    QuietTalk = Annotated[object, TalkFlags(make_reports, "quiet", "json")]
    JsonTalk = Annotated[object, TalkFlags(make_reports, "json")]


# --- A job: its options follow from the rows of the settings --------------------------------------


class JobFlags:
    """Some options of a job, as a group of a command's: by heading, or by name."""

    def __init__(self, *chosen: str, without: Collection[str] = ()) -> None:
        self._names = [
            name
            for one in chosen
            for name, row in list_option_rows().items()
            if one in (name, row.panel) and name not in without
        ]

    def parameters(self) -> list[inspect.Parameter]:
        """Return the options, as typer reads them from a signature."""
        return [self._parameter(name, list_option_rows()[name]) for name in self._names]

    def make(self, given: Mapping[str, object]) -> JobOptions:
        """Return the options of a job; a value that cannot be used is a usage error."""
        values = {
            name: read_option(name, value) for name, value in given.items() if value is not None
        }
        if values.get("wait") and not values.get("batch"):
            raise typer.BadParameter("it needs --batch", param_hint="--wait")
        return JobOptions(**values)

    def _parameter(self, name: str, row: SettingRow) -> inspect.Parameter:
        option = typer_option(name)
        option.rich_help_panel = row.panel or None
        default = JobOptions.__dataclass_fields__[name].default
        kind: object = list[str] | None if _get_item_check(row) else str | None
        if row.check is checks.boolean:
            kind = bool | None if default is None else bool
        elif row.check is Path:
            kind = Path | None
        elif default:
            kind = str
        absent = False if kind is bool else None
        return make_parameter(name, default or absent, Annotated[kind, option])


def typer_option(name: str) -> typer.models.OptionInfo:
    """Return an option of a job for a command's signature."""
    row = list_option_rows()[name]
    words = row.flag.split()
    names = [word for word in words if word.startswith("-")]
    if _get_words(row.check):
        return choice(_get_words(row.check), row.help, *names)
    option: typer.models.OptionInfo = typer.Option(
        *names,
        metavar=" ".join(words[len(names) :]) or None,
        help=row.help,
        parser=path_option if row.check is Path else None,
        show_default=row.check is not checks.boolean,
    )
    return option


def read_option(name: str, value: object) -> Any:  # noqa: ANN401
    """Return the value of an option of a job; one that cannot be used is a usage error."""
    row = list_option_rows()[name]
    item = _get_item_check(row)
    if isinstance(value, list) and item:
        return read_texts(item, value, row.option, row.option_allowed)
    if isinstance(value, str):
        return read_text(row.check, value, row.option, row.option_allowed or row.allowed)
    return value


def _get_item_check(row: SettingRow) -> Callable[[object], object] | None:
    return row.check.item if isinstance(row.check, checks.Check) else None


def _get_words(check: Callable[..., object]) -> Sequence[str]:
    words: Sequence[str] = checks.get_schema(check).get("enum", ())
    return words


def read_text(check: Callable[[object], T], text: str, option: str, allowed: str) -> T:
    """Return an option's value, as a text or a number; one that fails is a usage error."""
    with suppress(ValueError):
        return check(text)
    if text.isascii() and text.isdecimal():
        with suppress(ValueError):
            return check(int(text))
    words = _get_words(check)
    wrong = f"is not one of {', '.join(words)}" if words else f"cannot be used, allowed: {allowed}"
    raise typer.BadParameter(f"{text!r} {wrong}", param_hint=option)


def read_texts(
    check: Callable[[object], T], texts: Sequence[str] | None, option: str, allowed: str
) -> tuple[T, ...]:
    """Return the values of an option that may be given several times, each checked."""
    return tuple(read_text(check, text, option, allowed) for text in texts or ())


def choice(words: Sequence[str], help_text: str, *names: str) -> typer.models.OptionInfo:
    """Return an option whose help page and shell completion list the words that it takes."""
    shown: typer.models.OptionInfo = typer.Option(
        *names,
        metavar="|".join(words),
        help=help_text,
        autocompletion=lambda incomplete: [word for word in words if word.startswith(incomplete)],
    )
    return shown


JobPlace = Annotated[JobOptions, JobFlags(BUNDLE)]
BundleChoice = Annotated[JobOptions, JobFlags("bundle", "bundle_id")]
BundleId = Annotated[str | None, typer_option("bundle_id")]
LogDir = Annotated[Path | None, typer_option("log_dir")]
DryRun = Annotated[bool, typer_option("dry_run")]
Command = Annotated[
    list[str] | None,
    typer.Argument(metavar="[-- COMMAND...]", help="A script or -m MODULE, and its arguments."),
]


def read_bundle_id(text: str | None, option: str = "--id") -> str:
    """Return the id that a bundle must have, or its first digits; empty for any."""
    allowed = list_option_rows()["bundle_id"].allowed
    return "" if text is None else read_text(checks.bundle_id, text, option, allowed)


# --- The job whose logs a command reads ----------------------------------------------------------

JobArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="[JOB|DIR]", help="A job's number or a directory of logs; default: the newest job."
    ),
]


def choose_job_files(
    job: str | None, log_dir: Path | None, console: Console, *, named: bool = True
) -> JobFiles:
    """Return a job's files, or the newest's; its project, maybe a secret, is shown if ``named``."""
    from ..logs.job_files import choose_log_dir, find_job_files

    files = find_job_files(job, choose_log_dir(log_dir))
    if job is None:
        console.say(f"newest job: {files.describe(with_project=named)}")
    if files.other_jobs:
        newest = max(log.job for log in files.logs)
        jobs = format_count(len(files.other_jobs) + 1, "job")
        console.say(
            f"newest job: {newest}, of {jobs} in {files.folder}; "
            "--log-dir and a number choose another one"
        )
    return files


# --- The pinning of the requirements: the options of ``lock`` and ``build`` ----------------------

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


def load_settings(script: Path | None) -> Config:
    """Return the settings of a script, or of this directory's project."""
    from ..config.inline_script import load_script
    from ..config.load import load

    return load(get_settings_place()) if script is None else load_script(script)


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
            resolver=cast(
                "ResolverName",
                read_text(checks.make_choice_check(RESOLVERS), self.resolver, "--resolver", ""),
            ),
            offline=self.offline,
            upgrade=self.upgrade,
            upgrade_packages=upgraded,
            exclude_newer=_read_cutoff(self.exclude_newer),
        )


def _is_name(text: str) -> bool:
    from packaging.utils import InvalidName, canonicalize_name

    from ..hub.repositories import parse_request

    try:
        canonicalize_name(text, validate=True)
    except InvalidName:
        try:
            parse_request("model", text)
        except ValueError:
            return False
    return True


def _read_cutoff(text: str | None) -> str | None:
    from ..lock import resolver

    if text is None:
        return None
    try:
        return resolver.check_cutoff(text)
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} cannot be used, allowed: {resolver.ALLOWED}", param_hint="--exclude-newer"
        ) from None
