"""Options that commands share: a job's follow from the rows of the settings."""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from bundle.protocol.counts import format_count

from ..config import checks
from ..config.job_settings import JobOptions, SettingRow, list_option_rows
from ..core.errors import escape_invisible
from .application import get_settings_place, option, path_flag, path_option

if TYPE_CHECKING:
    from ..building.build import BuildOptions
    from ..config.load import Config
    from ..console.job_result import Console
    from ..console.reports import Reports
    from ..logs.job_files import JobFiles

T = TypeVar("T")


def file_option(help: str) -> Any:  # noqa: ANN401
    """Return the option that names the file a command writes."""
    return path_flag("-o --output FILE", help)


Quiet = Annotated[bool, option("-q --quiet", "Print only errors and results.")]
Verbose = Annotated[bool, option("-v --verbose", "Print what is done, and how.")]
Json = Annotated[bool, option("--json", "Print one JSON object on standard output.")]


class _Visible(logging.Formatter):
    """Formats log records for a terminal: a command's arguments may hold anything."""

    def format(self, record: logging.LogRecord) -> str:
        return escape_invisible(super().format(record))


def make_console(*, quiet: Quiet = False, verbose: Verbose = False, json: Json = False) -> Any:  # noqa: ANN401
    """Return the output of a command with a job; a verbose one also shows what is logged."""
    from ..console.job_result import Console  # not before: `--help` has no use for it

    _show_log(verbose=verbose)
    return Console(quiet=quiet, verbose=verbose, as_json=json)


def make_reports(*, quiet: Quiet = False, verbose: Verbose = False, json: Json = False) -> Any:  # noqa: ANN401
    """Return the output of a command without a job, which is there sooner."""
    from ..console.reports import Reports

    _show_log(verbose=verbose)
    return Reports(quiet=quiet, verbose=verbose, as_json=json)


def _make_quiet_reports(*, quiet: Quiet = False, json: Json = False) -> Any:  # noqa: ANN401
    return make_reports(quiet=quiet, json=json)


def _make_json_reports(*, json: Json = False) -> Any:  # noqa: ANN401
    return make_reports(json=json)


def _show_log(*, verbose: bool) -> None:
    if verbose:
        shown = logging.StreamHandler(sys.stderr)
        shown.setFormatter(_Visible("%(message)s"))
        logging.basicConfig(level=logging.DEBUG, handlers=[shown])


if TYPE_CHECKING:
    JobTalk = Console
    Talk = Reports
    QuietTalk = Reports
    JsonTalk = Reports
else:
    JobTalk = Annotated[object, make_console]
    Talk = Annotated[object, make_reports]
    QuietTalk = Annotated[object, _make_quiet_reports]
    JsonTalk = Annotated[object, _make_json_reports]


class JobFlags:
    """Some options of a job, as a group of a command's: by heading, or by name."""

    def __init__(self, *chosen: str, without: Collection[str] = ()) -> None:
        self._names = [
            name
            for one in chosen
            for name, row in list_option_rows().items()
            if one in (name, row.panel) and name not in without
        ]

    @property
    def __signature__(self) -> inspect.Signature:
        """The options, as typer reads them: not made before, `--help` has no use for them."""
        return inspect.Signature([_make_parameter(name) for name in self._names])

    def __call__(self, **given: object) -> JobOptions:
        """Return the options of a job; a value that cannot be used is a usage error."""
        values = {
            name: read_option(name, value) for name, value in given.items() if value is not None
        }
        if values.get("wait") and not values.get("batch"):
            raise typer.BadParameter("it needs --batch", param_hint="--wait")
        return JobOptions(**values)


def _make_parameter(name: str) -> inspect.Parameter:
    row = list_option_rows()[name]
    default = JobOptions.__dataclass_fields__[name].default
    kind: object = list[str] | None if _get_item_check(row) else str | None
    if row.check is checks.boolean:
        kind = bool | None if default is None else bool
    elif row.check is Path:
        kind = Path | None
    elif default:
        kind = str
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default or (False if kind is bool else None),
        annotation=Annotated[kind, typer_option(name, rich_help_panel=row.panel or None)],
    )


def typer_option(name: str, **more: Any) -> Any:  # noqa: ANN401
    """Return an option of a job for a command's signature."""
    row = list_option_rows()[name]
    words = _get_words(row.check)
    if words:
        return choice(words, row.help, row.flag, **more)
    return option(
        row.flag,
        row.help,
        parser=path_option if row.check is Path else None,
        show_default=row.check is not checks.boolean,
        **more,
    )


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


def choice(words: Sequence[str], help: str, flag: str = "", **more: Any) -> Any:  # noqa: ANN401
    """Return an option whose help page and shell completion list the words that it takes."""

    def complete(incomplete: str) -> list[str]:
        return [word for word in words if word.startswith(incomplete)]

    return option(flag, help, metavar="|".join(words), autocompletion=complete, **more)


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
        choose = "--log-dir and a number choose another one"
        console.say(f"newest job: {newest}, of {jobs} in {files.folder}; {choose}")
    return files


RESOLVERS = ("auto", "uv", "pip-tools")
Offline = Annotated[bool, option("--offline", "Fetch nothing.")]
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


def _read_resolving(
    *,
    resolver: Annotated[str, choice(RESOLVERS, "What pins the requirements; auto is uv.")] = "uv",
    offline: Offline = False,
    upgrade: Annotated[
        bool, option("--upgrade -U", "Take the newest versions; keep no pin.")
    ] = False,
    upgrade_package: Annotated[
        list[str] | None,
        option(
            "--upgrade-package -P NAME", "Do not keep this package's pin, or this model's commit."
        ),
    ] = None,
    exclude_newer: Annotated[
        str | None,
        option(
            "--exclude-newer DATE",
            "Ignore files uploaded after DATE, kept in the lock; 'none' removes it.",
        ),
    ] = None,
) -> Any:  # noqa: ANN401
    from ..building.build import BuildOptions
    from ..lock.resolver import ALLOWED, check_cutoff

    chosen: Any = read_text(checks.make_choice_check(RESOLVERS), resolver, "--resolver", "")
    if exclude_newer is not None:
        read_text(lambda text: check_cutoff(str(text)), exclude_newer, "--exclude-newer", ALLOWED)
    return BuildOptions(
        resolver=chosen,
        offline=offline,
        upgrade=upgrade,
        upgrade_packages=tuple(upgrade_package or ()),
        exclude_newer=exclude_newer,
    )


if TYPE_CHECKING:
    Resolving = BuildOptions
else:
    Resolving = Annotated[object, _read_resolving]
